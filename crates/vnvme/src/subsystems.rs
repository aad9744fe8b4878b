//! NVM subsystems of several disks: which volumes, zones and reservations they share.
//!
//! Disks of one subsystem have the same `subsystem`; a namespace of the same ID is the same one to
//! all of them. Its volume is opened once, with its zones if it is to have any, and both are open
//! as long as one of the disks has them.

use crate::formats::Chosen;
use crate::identity;
use crate::open::{OpenedVolume, Opener};
use crate::spec::{ControllerSpec, NamespaceSpec, hex};
use anyhow::{Context, Result, ensure};
use controller::{InSubsystem, ReservationStore, Saved, Subsystem, ZonedState};
use reservations::{HostId, ReservationFile, Reservations};
use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use sync::Unpoisoned;
use volume::Volume;

/// Open subsystems of the process, by their names.
#[derive(Default)]
pub struct Subsystems(Mutex<HashMap<String, OpenSubsystem>>);

#[derive(Default)]
struct OpenSubsystem {
    subsystem: Weak<Subsystem>,
    /// By namespace.
    open: HashMap<u32, Open>,
}

/// Parts of an open namespace that several disks share, as weak references.
struct Open {
    volume: Weak<dyn Volume>,
    /// Zones of the namespace; `None` if it has none.
    zones: Option<Weak<ZonedState>>,
    /// LBA formats of the namespace; `None` if the host cannot choose.
    formats: Option<Chosen>,
    block_size: Option<u32>,
}

impl Open {
    /// Returns the shared parts, as long as any disk has the namespace open.
    fn get(&self) -> Option<OpenNamespace> {
        let zones = self.zones.as_ref().map(Weak::upgrade);
        Some(OpenNamespace {
            volume: self.volume.upgrade()?,
            // A volume that is open without its zones is not the one that the disks share.
            zones: match zones {
                None => None,
                Some(zones) => Some(zones?),
            },
            formats: self.formats.clone(),
            block_size: self.block_size,
        })
    }
}

/// Parts of an open namespace that several disks share, held by one disk.
struct OpenNamespace {
    volume: Arc<dyn Volume>,
    zones: Option<Arc<ZonedState>>,
    formats: Option<Chosen>,
    block_size: Option<u32>,
}

impl OpenNamespace {
    /// Returns the open volume for the namespace of this disk.
    fn opened(self, opener: &Opener, disk: &ControllerSpec, nsid: u32) -> OpenedVolume {
        let sizes = &opener.block_sizes;
        sizes.enter(&disk.any_name(), nsid, self.formats.as_ref());
        OpenedVolume {
            volume: self.volume,
            device: None,
            direct: None,
            zones: self.zones,
            placement: None,
            metadata: None,
            formats: self.formats,
            block_size: self.block_size,
        }
    }
}

/// Returns the name by which the keeper knows memory of a disk's namespaces: of disks of one
/// subsystem a name that no disk has, whichever of them opens a namespace first.
pub fn memory_owner(disk: &ControllerSpec) -> String {
    match &disk.subsystem {
        Some(name) => owner(name),
        None => disk.any_name(),
    }
}

/// Returns the name that stands for the disks of a subsystem together.
pub fn owner(subsystem: &str) -> String {
    format!("subsystem\n{subsystem}")
}

impl Subsystems {
    /// The subsystem that a disk is in, if it is in one.
    pub fn of(&self, spec: &ControllerSpec) -> Option<Arc<Subsystem>> {
        let mut all = self.0.lock().unpoisoned();
        let known = all.entry(spec.subsystem.clone()?).or_default();
        let found = known.subsystem.upgrade();
        Some(found.unwrap_or_else(|| {
            let new = Subsystem::new();
            known.subsystem = Arc::downgrade(&new);
            new
        }))
    }

    fn get(&self, name: &str, nsid: u32) -> Option<OpenNamespace> {
        let all = self.0.lock().unpoisoned();
        all.get(name)?.open.get(&nsid)?.get()
    }

    fn enter(&self, name: &str, nsid: u32, shared: &OpenNamespace) {
        let mut all = self.0.lock().unpoisoned();
        let known = all.entry(name.to_owned()).or_default();
        let open = Open {
            volume: Arc::downgrade(&shared.volume),
            zones: shared.zones.as_ref().map(Arc::downgrade),
            formats: shared.formats.clone(),
            block_size: shared.block_size,
        };
        known.open.insert(nsid, open);
    }
}

/// Returns the identifier that a file of reservations has of its namespace: the configured NGUID,
/// or one made from names, whatever the namespace's host is shown.
fn owner_of_file(
    disk: &ControllerSpec,
    namespace: &NamespaceSpec,
    nsid: u32,
    volume: &dyn Volume,
) -> Result<[u8; 16]> {
    if let Some(text) = &namespace.nguid {
        return hex("nguid", text);
    }
    let name = disk.subsystem.as_deref().unwrap_or_default();
    let serial = disk
        .serial
        .clone()
        .unwrap_or_else(|| identity::serial(&[b"subsystem".to_vec(), name.as_bytes().to_vec()]));
    Ok(identity::nguid(&serial, nsid, &volume.id()))
}

/// Opens a namespace of a disk that is in this subsystem, or finds it open.
///
/// # Errors
/// A sentence for the user.
pub fn open(
    opener: &Opener,
    subsystem: &Arc<Subsystem>,
    disk: &ControllerSpec,
    namespace: &NamespaceSpec,
    nsid: u32,
) -> Result<OpenedVolume> {
    let name = disk.subsystem.as_deref().unwrap_or_default();
    if let Some(shared) = opener.subsystems.get(name, nsid)
        && subsystem.has_namespace(nsid)
    {
        return Ok(shared.opened(opener, disk, nsid));
    }
    let opened = opener.open(namespace, &memory_owner(disk), nsid)?;
    opener
        .settings
        .apply(&disk.any_name(), nsid, &*opened.volume);
    ensure!(
        opened.device.is_none(),
        "{}: a device that is driven by this process cannot be shared by disks of a subsystem",
        namespace.volume
    );
    let shared = OpenNamespace {
        volume: opened.volume,
        zones: opened.zones,
        formats: opened.formats,
        block_size: opened.block_size,
    };
    let (reservations, store) = match &namespace.reservations {
        None => (Reservations::new(false), None),
        Some(path) => {
            let owner = owner_of_file(disk, namespace, nsid, &*shared.volume)?;
            let (state, file) = kept(path, owner, opener.previous.limit)
                .with_context(|| format!("reservations of namespace {nsid}"))?;
            let store: Box<dyn ReservationStore> = Box::new(file);
            (state, Some(store))
        }
    };
    subsystem.add_namespace_to(namespace.ana_group(), nsid, reservations, store);
    opener.subsystems.enter(name, nsid, &shared);
    Ok(shared.opened(opener, disk, nsid))
}

fn kept(path: &Path, nguid: [u8; 16], limit: Duration) -> Result<(Reservations, FileStore)> {
    let boot = ReservationFile::boot().context("/proc/sys/kernel/random/boot_id")?;
    let (file, state, _) = ReservationFile::open(path, nguid, boot, limit)?;
    Ok((state, FileStore(Mutex::new(Writer::File(file)))))
}

/// Returns the membership of a disk's controller in its subsystem.
///
/// # Errors
/// The Host Identifier is invalid.
pub fn place(spec: &ControllerSpec, subsystem: Arc<Subsystem>) -> Result<InSubsystem> {
    let host = match &spec.host_id {
        Some(text) => hex("host-id", text)?,
        None => identity::host(&spec.any_name()),
    };
    let host = HostId::extended(host);
    let cntlid = spec.cntlid.unwrap_or_default();
    for namespace in &spec.namespaces {
        let state = namespace.ana_state.unwrap_or_default();
        // The controller is not there yet: nobody is to be waited for.
        subsystem.set_ana_state(cntlid, namespace.ana_group(), state.into());
    }
    Ok(InSubsystem { subsystem, host })
}

/// Writes states to a file, on a thread that is started when there is the first to be written: born
/// in the sandbox, if there is one.
struct FileStore(Mutex<Writer>);

enum Writer {
    File(ReservationFile),
    Thread(Sender<(Reservations, Saved)>),
    /// No thread could be had.
    None,
}

impl Writer {
    fn start(file: ReservationFile) -> Self {
        let (states, written) = channel::<(Reservations, Saved)>();
        let builder = std::thread::Builder::new().name("reservations".into());
        let mut file = file;
        let thread = builder.spawn(move || {
            for (state, done) in written {
                let kept = file.save(&state, &[]);
                if let Err(error) = &kept {
                    tracing::error!(%error, "reservations cannot be stored");
                }
                done(kept.is_ok());
            }
        });
        match thread {
            Ok(_) => Self::Thread(states),
            Err(error) => {
                tracing::error!(%error, "reservations cannot be stored: no thread");
                Self::None
            }
        }
    }
}

impl ReservationStore for FileStore {
    fn save(&self, state: Reservations, done: Saved) {
        let mut writer = self.0.lock().unpoisoned();
        *writer = match std::mem::replace(&mut *writer, Writer::None) {
            Writer::File(file) => Writer::start(file),
            other => other,
        };
        let left = match &*writer {
            Writer::Thread(states) => states.send((state, done)).err().map(|unsent| unsent.0.1),
            _ => Some(done),
        };
        drop(writer);
        if let Some(done) = left {
            done(false);
        }
    }
}
