//! NVM subsystems of several disks: which volumes, zones and reservations they share.
//!
//! Disks of one subsystem have the same `subsystem`; a namespace of the same ID is the same one to
//! all of them. Its volume is opened once, with its zones if it is to have any, and both are open
//! as long as one of the disks has them.

use crate::keep::{self, KeeperSession, KeptReservations};
use crate::open::{OpenedVolume, Opener};
use anyhow::{Context, Result, ensure};
use config::disk::Disk;
use config::identity;
use config::spec::{ControllerSpec, NamespaceSpec, Specs, hex};
use controller::{InSubsystem, ReservationStore, Saved, Subsystem};
use namespace_files::{NamespaceFiles, WeakNamespaceFiles};
use reservations::{HostId, ReservationFile, Reservations, StoredReservations};
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use sync::Unpoisoned;
use volume::Volume;

/// Open subsystems of the process, by their names.
#[derive(Default)]
pub struct Subsystems {
    all: Mutex<HashMap<String, OpenSubsystem>>,
    /// Identifier of the machine's boot, which is read once.
    boot: OnceLock<[u8; 16]>,
}

#[derive(Default)]
struct OpenSubsystem {
    /// Disks of the configuration that belong to the subsystem.
    disks: Vec<keep::Identity>,
    /// Held while a namespace is opened: disks that were unavailable are opened on threads of their
    /// own.
    opening: Arc<Mutex<()>>,
    subsystem: Weak<Subsystem>,
    /// By namespace.
    open: HashMap<u32, Open>,
}

/// Parts of an open namespace that several disks share, as weak references.
struct Open {
    volume: Weak<dyn Volume>,
    files: WeakNamespaceFiles,
    block_size: Option<u32>,
    /// `None`: the reservations are in a file, or end with the process.
    reservations: Option<Weak<KeptReservations>>,
}

impl Open {
    /// Returns the shared parts, as long as any disk has the namespace open.
    fn get(&self) -> Option<OpenNamespace> {
        Some(OpenNamespace {
            volume: self.volume.upgrade()?,
            // A volume that is open without its zones is not the one that the disks share.
            files: self.files.upgrade()?,
            block_size: self.block_size,
            reservations: self.reservations.as_ref().and_then(Weak::upgrade),
        })
    }
}

/// Parts of an open namespace that several disks share, held by one disk.
struct OpenNamespace {
    volume: Arc<dyn Volume>,
    files: NamespaceFiles,
    block_size: Option<u32>,
    reservations: Option<Arc<KeptReservations>>,
}

impl OpenNamespace {
    /// Returns the open volume for the namespace of this disk.
    fn opened(self, opener: &Opener, disk: &ControllerSpec, nsid: u32) -> OpenedVolume {
        let sizes = &opener.block_sizes;
        sizes.enter(&disk.any_name(), nsid, &self.files);
        OpenedVolume {
            volume: self.volume,
            device: None,
            direct: None,
            files: self.files,
            block_size: self.block_size,
        }
    }
}

/// Returns the name by which the keeper knows memory of a disk's namespaces: of disks of one
/// subsystem a name that no disk has, whichever of them opens a namespace first.
pub fn memory_owner(disk: &dyn Disk) -> String {
    disk.subsystem().map_or_else(|| disk.name(), owner)
}

/// Returns the name by which the keeper knows the reservations of a subsystem's namespaces.
pub fn reservations_owner(subsystem: &str) -> String {
    format!("reservations\n{subsystem}")
}

/// Returns the name that stands for the disks of a subsystem together.
pub fn owner(subsystem: &str) -> String {
    format!("subsystem\n{subsystem}")
}

impl Subsystems {
    fn boot(&self) -> Result<[u8; 16]> {
        if let Some(boot) = self.boot.get() {
            return Ok(*boot);
        }
        let boot = ReservationFile::boot().context("/proc/sys/kernel/random/boot_id")?;
        Ok(*self.boot.get_or_init(|| boot))
    }

    /// Takes notice of the configured disks of each subsystem. A subsystem then begins with the
    /// state that all of its disks have left in the previous process.
    pub fn expect(&self, specs: &Specs) {
        // The file of the boot's identifier cannot be opened in the sandbox.
        if let Err(error) = self.boot() {
            tracing::warn!("{error:#}");
        }
        let mut all = self.all.lock().unpoisoned();
        for spec in &specs.controllers {
            if let Some(name) = &spec.subsystem {
                let known = all.entry(name.clone()).or_default();
                known.disks.push(keep::Identity::of(spec));
            }
        }
    }

    /// The subsystem that a disk is in, if it is in one.
    pub fn of(&self, spec: &ControllerSpec, keeper: &KeeperSession) -> Option<Arc<Subsystem>> {
        let mut all = self.all.lock().unpoisoned();
        let known = all.entry(spec.subsystem.clone()?).or_default();
        let found = known.subsystem.upgrade();
        Some(found.unwrap_or_else(|| {
            let new = Subsystem::new();
            known
                .disks
                .iter()
                .for_each(|disk| keeper.expect(disk, &new));
            known.subsystem = Arc::downgrade(&new);
            new
        }))
    }

    fn opening(&self, name: &str) -> Arc<Mutex<()>> {
        let mut all = self.all.lock().unpoisoned();
        all.entry(name.to_owned()).or_default().opening.clone()
    }

    fn get(&self, name: &str, nsid: u32) -> Option<OpenNamespace> {
        let all = self.all.lock().unpoisoned();
        all.get(name)?.open.get(&nsid)?.get()
    }

    fn enter(&self, name: &str, nsid: u32, shared: &OpenNamespace) {
        let mut all = self.all.lock().unpoisoned();
        let known = all.entry(name.to_owned()).or_default();
        let open = Open {
            volume: Arc::downgrade(&shared.volume),
            files: shared.files.downgrade(),
            block_size: shared.block_size,
            reservations: shared.reservations.as_ref().map(Arc::downgrade),
        };
        known.open.insert(nsid, open);
    }

    /// Records that a disk is served: reservations are kept only until its subsystem ends.
    pub fn served(&self, spec: &ControllerSpec) {
        let name = spec.subsystem.as_deref().unwrap_or_default();
        for nsid in <dyn Disk>::nsids(spec) {
            let shared = self.get(name, nsid);
            if let Some(memory) = shared.and_then(|shared| shared.reservations) {
                memory.served();
            }
        }
    }

    /// Returns the reason why a disk of a subsystem ends with its process; `None` if it does not.
    /// Its namespaces are open.
    pub fn ends_with_process(&self, spec: &ControllerSpec) -> Option<&'static str> {
        let name = spec.subsystem.as_deref()?;
        let mut shared = <dyn Disk>::nsids(spec)
            .into_iter()
            .flat_map(|nsid| self.get(name, nsid));
        // Changes of zones by one controller may depend on those of another, and have no order in
        // the controllers' records.
        shared.find_map(|shared| {
            if shared.files.has_zones() {
                return Some("it shares a namespace with zones");
            }
            let memory = shared.reservations?;
            (!memory.is_kept).then_some("its reservations are not kept")
        })
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
    let opening = opener.subsystems.opening(name);
    let _opening = opening.lock().unpoisoned();
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
    let mut shared = OpenNamespace {
        volume: opened.volume,
        files: opened.files,
        block_size: opened.block_size,
        reservations: None,
    };
    let of = || format!("reservations of namespace {nsid}");
    let found = match &namespace.reservations {
        None => keep::open_reservations(&opener.keeper, name, nsid)
            .with_context(of)?
            .map(|(memory, file, stored)| {
                shared.reservations = Some(Arc::new(memory));
                (file, stored)
            }),
        Some(path) => {
            let owner = owner_of_file(disk, namespace, nsid, &*shared.volume)?;
            let (boot, limit) = (opener.subsystems.boot(), opener.previous.limit);
            let open = |boot| Ok(ReservationFile::open(path, owner, boot, limit)?);
            Some(boot.and_then(open).with_context(of)?)
        }
    };
    let (stored, store) = match found {
        None => (Reservations::new(false).into(), None),
        Some((file, stored)) => {
            let store: Box<dyn ReservationStore> = Box::new(FileStore {
                writer: Mutex::new(Writer::File(file)),
                _memory: shared.reservations.clone(),
            });
            (stored, Some(store))
        }
    };
    subsystem.add_namespace_to(namespace.ana_group(), nsid, stored, store);
    opener.subsystems.enter(name, nsid, &shared);
    Ok(shared.opened(opener, disk, nsid))
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
struct FileStore {
    writer: Mutex<Writer>,
    /// Memory that is kept as long as the namespace is there.
    _memory: Option<Arc<KeptReservations>>,
}

enum Writer {
    File(ReservationFile),
    Thread(Sender<(StoredReservations, Saved)>),
    /// No thread could be had.
    None,
}

impl Writer {
    fn start(file: ReservationFile) -> Self {
        let (states, written) = channel::<(StoredReservations, Saved)>();
        let builder = std::thread::Builder::new().name("reservations".into());
        let mut file = file;
        let thread = builder.spawn(move || {
            for (stored, done) in written {
                let kept = file.save(&stored);
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
    fn save(&self, stored: StoredReservations, done: Saved) {
        let mut writer = self.writer.lock().unpoisoned();
        *writer = match std::mem::replace(&mut *writer, Writer::None) {
            Writer::File(file) => Writer::start(file),
            other => other,
        };
        let left = match &*writer {
            Writer::Thread(states) => states.send((stored, done)).err().map(|unsent| unsent.0.1),
            _ => Some(done),
        };
        drop(writer);
        if let Some(done) = left {
            done(false);
        }
    }
}
