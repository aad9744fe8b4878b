//! NVM subsystems of several disks: which volumes and reservations they share.
//!
//! Disks of one subsystem have the same `subsystem`; a namespace of the same ID is the same one to
//! all of them. Its volume is opened once, and is open as long as one of the disks has it.

use crate::crew::{self, namespace_config};
use crate::formats::Chosen;
use crate::identity;
use crate::open::{Opened, Opener};
use crate::spec::{ControllerSpec, NamespaceSpec, hex};
use anyhow::{Context, Result, ensure};
use controller::{InSubsystem, ReservationStore, Saved, Subsystem};
use reservations::{HostId, ReservationFile, Reservations};
use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use sync::Unpoisoned;
use volume::Volume;

/// The subsystems of the process, by their names.
#[derive(Default)]
pub struct Subsystems(Mutex<HashMap<String, Known>>);

#[derive(Default)]
struct Known {
    subsystem: Weak<Subsystem>,
    /// By namespace.
    volumes: HashMap<u32, Weak<dyn Volume>>,
    /// Of namespaces that can have several, likewise.
    formats: HashMap<u32, Chosen>,
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

    fn opened(&self, name: &str, nsid: u32) -> Option<(Arc<dyn Volume>, Option<Chosen>)> {
        let all = self.0.lock().unpoisoned();
        let known = all.get(name)?;
        let volume = known.volumes.get(&nsid)?.upgrade()?;
        Some((volume, known.formats.get(&nsid).cloned()))
    }

    fn enter(&self, name: &str, nsid: u32, volume: &Arc<dyn Volume>, formats: Option<Chosen>) {
        let mut all = self.0.lock().unpoisoned();
        let known = all.entry(name.to_owned()).or_default();
        known.volumes.insert(nsid, Arc::downgrade(volume));
        known.formats.extend(formats.map(|formats| (nsid, formats)));
    }
}

/// The serial number of the disks of a subsystem: its own, for all of them are one.
pub fn serial(name: &str) -> String {
    identity::serial(&[b"subsystem".to_vec(), name.as_bytes().to_vec()])
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
) -> Result<Opened> {
    let name = disk.subsystem.as_deref().unwrap_or_default();
    let shared = |volume, formats: Option<Chosen>| {
        let sizes = &opener.block_sizes;
        sizes.enter(&disk.any_name(), nsid, formats.as_ref());
        Opened {
            volume,
            device: None,
            direct: None,
            zones: None,
            placement: None,
            metadata: None,
            formats,
        }
    };
    if let Some((volume, formats)) = opener.subsystems.opened(name, nsid)
        && subsystem.has_namespace(nsid)
    {
        return Ok(shared(volume, formats));
    }
    // A name that no disk has: which of them opens it first is no matter.
    let opened = opener.open(namespace, &format!("subsystem\n{name}"), nsid)?;
    ensure!(
        opened.device.is_none(),
        "{}: a device that is driven by this process cannot be shared by disks of a subsystem",
        namespace.volume
    );
    let Opened {
        volume, formats, ..
    } = opened;
    let (reservations, store) = match &namespace.reservations {
        None => (Reservations::new(false), None),
        Some(path) => {
            let serial = crew::serial(disk, &[]);
            let config = namespace_config(namespace, nsid, &serial, volume.clone())?;
            let (state, file) = kept(path, config.nguid, opener.previous.limit)
                .with_context(|| format!("reservations of namespace {nsid}"))?;
            let store: Box<dyn ReservationStore> = Box::new(file);
            (state, Some(store))
        }
    };
    subsystem.add_namespace_to(namespace.ana_group(), nsid, reservations, store);
    let subsystems = &opener.subsystems;
    subsystems.enter(name, nsid, &volume, formats.clone());
    Ok(shared(volume, formats))
}

fn kept(path: &Path, nguid: [u8; 16], limit: Duration) -> Result<(Reservations, FileStore)> {
    let boot = ReservationFile::boot().context("/proc/sys/kernel/random/boot_id")?;
    let (file, state, _) = ReservationFile::open(path, nguid, boot, limit)?;
    Ok((state, FileStore(Mutex::new(Writer::File(file)))))
}

/// A disk's place in its subsystem.
///
/// # Errors
/// Its Host Identifier is none.
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
                    tracing::error!(%error, "reservations cannot be kept");
                }
                done(kept.is_ok());
            }
        });
        match thread {
            Ok(_) => Self::Thread(states),
            Err(error) => {
                tracing::error!(%error, "reservations cannot be kept: no thread");
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
