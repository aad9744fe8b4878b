//! Pools of namespaces that guests make: their options, and the thread that changes a pool's folder
//! (crate `namespace-pool`).

use crate::registry::limits::LimitRegistry;
use crate::registry::on_error::OnErrorRegistry;
use crate::registry::settings::Settings;
use anyhow::{Context, Result, bail, ensure};
use config::options::Size;
use config::spec::{ControllerSpec, NamespaceSpec};
use control::EventSender;
use control::api::EventKind;
use controller::{NamespacePool, PoolChange, PoolDone, PoolError, PooledNamespace};
use namespace_pool::{New, Nguid, PoolEntry, PoolFolder};
use probes::LogLimits;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use sync::Unpoisoned;
use volume::{
    FileOptions, FileVolume, Format, LimitVolume, OnError, OnErrorVolume, PreviousProcess, Volume,
};

/// Open namespace pools of the process, by the names of their disks.
#[derive(Default)]
pub struct Pools(Mutex<HashMap<String, Weak<DiskPool>>>);

impl Pools {
    /// Returns the open namespace pool of a disk, if it has one.
    pub fn of(&self, disk: &str) -> Option<Arc<DiskPool>> {
        self.0.lock().unpoisoned().get(disk)?.upgrade()
    }

    /// Opens the pool of a disk, if it is to have one.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn open(
        &self,
        spec: &ControllerSpec,
        (limits, on_error, settings): (&LimitRegistry, &OnErrorRegistry, &Settings),
        events: &EventSender,
        previous: PreviousProcess,
    ) -> Result<Option<Arc<DiskPool>>> {
        let Some(path) = &spec.pool else {
            return Ok(None);
        };
        let disk = spec.any_name();
        let opened = || -> Result<DiskPool> {
            let folder = open_folder(path, previous.limit)?;
            check_numbers(&folder, &spec.namespaces)?;
            let opener = Opener {
                limits: limits.clone(),
                log: LogLimits::default(),
                on_error: on_error.clone(),
                settings: settings.clone(),
                events: events.clone(),
                disk: disk.clone(),
                previous,
            };
            DiskPool::new(spec, folder, opener)
        };
        let pool = Arc::new(opened().with_context(|| format!("pool {}", path.display()))?);
        let mut all = self.0.lock().unpoisoned();
        all.retain(|_, pool| pool.strong_count() > 0);
        all.insert(disk, Arc::downgrade(&pool));
        Ok(Some(pool))
    }
}

/// Opens a pool's folder. If an ending process has the folder, the call waits for it and logs that.
fn open_folder(path: &Path, limit: Duration) -> Result<PoolFolder, namespace_pool::PoolError> {
    match PoolFolder::open(path, Duration::ZERO) {
        Err(namespace_pool::PoolError::Locked(_)) if !limit.is_zero() => {
            let (pool, seconds) = (path.display(), limit.as_secs());
            tracing::warn!("pool {pool}: another process has it; waiting {seconds} s at most");
            PoolFolder::open(path, limit)
        }
        opened => opened,
    }
}

/// Checks that no configured namespace has the NSID of a namespace in the pool.
fn check_numbers(folder: &PoolFolder, namespaces: &[NamespaceSpec]) -> Result<()> {
    for (namespace, place) in namespaces.iter().zip(1..) {
        let nsid = namespace.nsid.unwrap_or(place);
        ensure!(
            folder.namespaces().iter().all(|entry| entry.nsid() != nsid),
            "the guest has made a namespace {nsid} in it, and {} is to be one, too: give that \
             another nsid",
            namespace.volume
        );
    }
    Ok(())
}

/// Opener of the namespaces' files, which sends events about changes.
struct Opener {
    limits: LimitRegistry,
    on_error: OnErrorRegistry,
    settings: Settings,
    events: EventSender,
    log: LogLimits,
    disk: String,
    previous: PreviousProcess,
}

impl Opener {
    fn open(&self, path: &Path, entry: &PoolEntry) -> Result<Arc<dyn Volume>> {
        let options = FileOptions {
            block_size: Some(entry.block_size()),
            // The format stays raw, whatever a guest writes into its first blocks.
            format: Format::Raw,
            previous: self.previous,
            ..FileOptions::default()
        };
        let volume = FileVolume::open(path, options)?;
        let name = path.display().to_string();
        let volume = Arc::new(LimitVolume::dormant(Arc::new(volume)));
        let volume = OnErrorVolume::new(volume, OnError::default(), &name);
        let volume: Arc<dyn Volume> = Arc::new(volume);
        self.settings.apply(&self.disk, entry.nsid(), &*volume);
        self.limits.enter(&name, &volume);
        self.on_error.enter(&name, &volume);
        // A guest may attach and detach its namespaces as often as it likes.
        self.log.line("opened", |left_out| {
            tracing::info!(volume = name, left_out, "{}", volume.info().description);
        });
        Ok(volume)
    }
}

/// Last known content of a pool's folder, for callers that must not block.
#[derive(Default)]
struct PoolContent(Mutex<Vec<PooledNamespace>>);

impl PoolContent {
    /// Takes the content of the folder. Open volumes stay open where they are needed. Unneeded
    /// volumes are returned, to be closed without the lock.
    fn update(&self, folder: &PoolFolder) -> Vec<Arc<dyn Volume>> {
        let mut known = self.0.lock().unpoisoned();
        let before = std::mem::take(&mut *known);
        let mut left = Vec::new();
        let mut volumes = HashMap::new();
        for namespace in before {
            volumes.insert(namespace.nguid, namespace.volume);
        }
        for entry in folder.namespaces() {
            let volume = volumes.remove(&entry.nguid().0).flatten();
            let attached: Vec<u16> = entry.attached().iter().copied().collect();
            let (volume, closed) = if attached.is_empty() {
                (None, volume)
            } else {
                (volume, None)
            };
            left.extend(closed);
            known.push(PooledNamespace {
                nsid: entry.nsid(),
                blocks: entry.blocks(),
                block_size: entry.block_size(),
                nguid: entry.nguid().0,
                shared: entry.shared(),
                attached,
                volume,
            });
        }
        left.extend(volumes.into_values().flatten());
        left
    }

    fn set_volume(&self, nguid: [u8; 16], volume: Arc<dyn Volume>) {
        let mut known = self.0.lock().unpoisoned();
        if let Some(namespace) = known.iter_mut().find(|ns| ns.nguid == nguid) {
            namespace.volume = Some(volume);
        }
    }

    fn find(&self, nguid: [u8; 16]) -> Option<PooledNamespace> {
        let known = self.0.lock().unpoisoned();
        known.iter().find(|ns| ns.nguid == nguid).cloned()
    }
}

/// Writer of a pool's folder, which runs on a thread of its own.
struct Writer {
    folder: PoolFolder,
    opener: Opener,
    known: Arc<PoolContent>,
}

impl Writer {
    fn run(mut self, changes: &Receiver<(PoolChange, PoolDone)>) {
        for (change, done) in changes {
            let nguid = Nguid(match &change {
                PoolChange::Create { nguid, .. }
                | PoolChange::Delete { nguid }
                | PoolChange::Attach { nguid, .. }
                | PoolChange::Format { nguid, .. }
                | PoolChange::Detach { nguid, .. } => *nguid,
            });
            let before = self.known.find(nguid.0).map(|ns| ns.nsid);
            let changed = self.change(&change, nguid);
            drop(self.known.update(&self.folder));
            if let Err((error, why)) = &changed {
                let (disk, pool) = (&self.opener.disk, self.folder.path().display());
                self.opener.log.line("not changed", |left_out| {
                    let text = format_args!("namespaces of the pool: {why}");
                    tracing::error!(disk, %pool, %nguid, ?error, left_out, "{text}");
                });
            }
            let nsid = before.or_else(|| self.known.find(nguid.0).map(|ns| ns.nsid));
            if changed.is_ok() {
                let (events, disk) = (&self.opener.events, &self.opener.disk);
                events.send(EventKind::Changed, disk, nsid, None);
            }
            done(changed.map_err(|(error, _)| error));
        }
    }

    fn change(&mut self, change: &PoolChange, nguid: Nguid) -> Result<(), (PoolError, String)> {
        let failed = |error: namespace_pool::PoolError| {
            if error.is_full() {
                (PoolError::NoSpace, error.to_string())
            } else {
                (PoolError::Failed, error.to_string())
            }
        };
        match change {
            PoolChange::Create {
                nsid,
                blocks,
                block_size,
                shared,
                ..
            } => {
                let new = New {
                    nsid: *nsid,
                    nguid,
                    blocks: *blocks,
                    block_size: *block_size,
                    shared: *shared,
                };
                self.folder.create(&new).map_err(failed)
            }
            PoolChange::Delete { .. } => self.folder.delete(nguid).map_err(failed),
            PoolChange::Attach { cntlid, .. } => {
                let opened = self.open(nguid);
                let opened = opened.map_err(|why| (PoolError::Failed, format!("{why:#}")))?;
                let kept = self.folder.set_attached(nguid, *cntlid, true);
                kept.map_err(failed)?;
                drop(self.known.update(&self.folder));
                if let Some(volume) = opened {
                    self.known.set_volume(nguid.0, volume);
                }
                Ok(())
            }
            PoolChange::Format { block_size, .. } => {
                let kept = self.folder.set_block_size(nguid, *block_size);
                kept.map_err(failed)
            }
            PoolChange::Detach { cntlid, .. } => {
                let kept = self.folder.set_attached(nguid, *cntlid, false);
                kept.map_err(failed)
            }
        }
    }

    /// Returns the volume of a pool's namespace if it has to be opened, `None` if it is open.
    fn open(&self, nguid: Nguid) -> Result<Option<Arc<dyn Volume>>> {
        let is_open = self
            .known
            .find(nguid.0)
            .is_some_and(|ns| ns.volume.is_some());
        if is_open {
            return Ok(None);
        }
        let mut entries = self.folder.namespaces().iter();
        let entry = entries.find(|entry| entry.nguid() == nguid);
        let entry = entry.context("no such namespace")?;
        Ok(Some(self.opener.open(&self.folder.file(nguid), entry)?))
    }
}

enum State {
    Writer(Box<Writer>),
    /// Channel to the writing thread, which is started at the first change.
    Thread(Sender<(PoolChange, PoolDone)>),
    /// The writing thread could not be started.
    None,
}

/// Namespace pool of a disk, in a folder.
pub struct DiskPool {
    path: PathBuf,
    capacity: u64,
    block_size: u32,
    known: Arc<PoolContent>,
    state: Mutex<State>,
}

impl fmt::Debug for DiskPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl DiskPool {
    fn new(spec: &ControllerSpec, folder: PoolFolder, opener: Opener) -> Result<Self> {
        let Some(Size(capacity)) = spec.pool_capacity else {
            bail!("the size of a pool is that of pool-capacity");
        };
        let known = Arc::<PoolContent>::default();
        drop(known.update(&folder));
        for entry in folder.namespaces() {
            if !entry.attached().is_empty() {
                let volume = opener.open(&folder.file(entry.nguid()), entry)?;
                known.set_volume(entry.nguid().0, volume);
            }
        }
        let block_size = spec.pool_block_size.unwrap_or(512);
        let path = folder.path().to_owned();
        let writer = Writer {
            folder,
            opener,
            known: known.clone(),
        };
        Ok(Self {
            path,
            capacity,
            block_size,
            known,
            state: Mutex::new(State::Writer(Box::new(writer))),
        })
    }

    /// Returns the path of the file that stores a pool's namespace.
    pub fn file(&self, namespace: &PooledNamespace) -> PathBuf {
        namespace_pool::file_of(&self.path, Nguid(namespace.nguid))
    }
}

impl NamespacePool for DiskPool {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn namespaces(&self) -> Vec<PooledNamespace> {
        self.known.0.lock().unpoisoned().clone()
    }

    fn new_nguid(&self) -> Option<[u8; 16]> {
        Nguid::random().ok().map(|nguid| nguid.0)
    }

    fn change(&self, change: PoolChange, done: PoolDone) {
        let mut state = self.state.lock().unpoisoned();
        *state = match std::mem::replace(&mut *state, State::None) {
            State::Writer(writer) => {
                let (changes, made) = channel();
                let builder = std::thread::Builder::new().name("pool".into());
                match builder.spawn(move || writer.run(&made)) {
                    Ok(_) => State::Thread(changes),
                    Err(error) => {
                        tracing::error!(%error, "a pool cannot be changed: no thread");
                        State::None
                    }
                }
            }
            other => other,
        };
        let left = match &*state {
            State::Thread(changes) => changes.send((change, done)).err().map(|unsent| unsent.0.1),
            _ => Some(done),
        };
        drop(state);
        if let Some(done) = left {
            done(Err(PoolError::Failed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;
    use config::spec::{Specs, parse_config};
    use std::sync::mpsc::channel;

    fn spec(path: &Path, more: &str) -> ControllerSpec {
        let none = if more.contains("namespace =") {
            ""
        } else {
            "namespace = []\n"
        };
        let text = format!(
            "[[controller]]\nname = \"d\"\nsocket = \"/s\"\npool = {path:?}\n\
             pool-capacity = \"1M\"\n{more}{none}"
        );
        let specs: Specs = parse_config(Path::new("f.toml"), &text).unwrap();
        specs.controllers.into_iter().next().unwrap()
    }

    fn open(pools: &Pools, spec: &ControllerSpec) -> Result<Arc<DiskPool>> {
        let registry = Registry::default();
        let previous = PreviousProcess {
            limit: Duration::from_secs(10),
            ..PreviousProcess::default()
        };
        let of_volumes = (&registry.limits, &registry.on_error, &registry.settings);
        let opened = pools.open(spec, of_volumes, &registry.events, previous);
        Ok(opened?.unwrap())
    }

    fn change(pool: &DiskPool, change: PoolChange) -> Result<(), PoolError> {
        let (told, result) = channel();
        pool.change(change, Box::new(move |result| told.send(result).unwrap()));
        result.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    fn create(nsid: u32, blocks: u64) -> PoolChange {
        PoolChange::Create {
            nsid,
            blocks,
            block_size: 512,
            nguid: [nsid as u8; 16],
            shared: false,
        }
    }

    #[test]
    fn pool_is_restored_in_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let pools = Pools::default();
        let spec = spec(dir.path(), "pool-block-size = 4096\n");
        let pool = open(&pools, &spec).unwrap();
        assert!(pools.of("d").is_some() && pools.of("e").is_none());
        assert_eq!(change(&pool, create(1, 64)), Ok(()));
        assert_eq!(change(&pool, create(2, 64)), Ok(()));
        let nguid = [2; 16];
        let attach = PoolChange::Attach { nguid, cntlid: 1 };
        assert_eq!(change(&pool, attach.clone()), Ok(()));
        assert_eq!(change(&pool, attach), Ok(()), "again");
        let all = pool.namespaces();
        assert!(all[0].volume.is_none() && all[1].volume.is_some());
        assert_eq!(all[1].volume.as_ref().unwrap().info().size, 32 << 10);
        assert!(pool.file(&all[1]).exists());
        assert_eq!(pool.used(), 64 << 10);
        drop((pool, all));
        assert!(pools.of("d").is_none());
        let pool = open(&pools, &spec).unwrap();
        let all = pool.namespaces();
        assert_eq!(all[1].attached, [1]);
        assert!(all[0].volume.is_none() && all[1].volume.is_some());
        drop(all);
        assert_eq!(
            change(&pool, PoolChange::Detach { nguid, cntlid: 1 }),
            Ok(())
        );
        assert!(pool.namespaces().iter().all(|ns| ns.volume.is_none()));
        assert_eq!(change(&pool, PoolChange::Delete { nguid }), Ok(()));
        assert_eq!(change(&pool, PoolChange::Delete { nguid: [1; 16] }), Ok(()));
        assert_eq!(pool.used(), 0);
        let gone = change(&pool, PoolChange::Attach { nguid, cntlid: 1 });
        assert_eq!(gone, Err(PoolError::Failed));
    }

    #[test]
    fn chosen_format_is_restored_in_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let (pools, spec) = (Pools::default(), spec(dir.path(), ""));
        let pool = open(&pools, &spec).unwrap();
        assert_eq!(change(&pool, create(1, 16)), Ok(()));
        let nguid = [1; 16];
        let attach = PoolChange::Attach { nguid, cntlid: 1 };
        assert_eq!(change(&pool, attach), Ok(()));
        let block_size = 4096;
        let format = PoolChange::Format { nguid, block_size };
        assert_eq!(change(&pool, format), Ok(()));
        let shape = |pool: &DiskPool| {
            let ns = pool.namespaces().remove(0);
            (ns.block_size, ns.blocks, ns.volume.is_some())
        };
        assert_eq!(shape(&pool), (4096, 2, true));
        drop(pool);
        assert_eq!(shape(&open(&pools, &spec).unwrap()), (4096, 2, true));
    }

    /// A guest may write any data.
    #[test]
    fn guest_data_is_never_taken_for_format() {
        let dir = tempfile::tempdir().unwrap();
        let pools = Pools::default();
        let spec = spec(dir.path(), "");
        let pool = open(&pools, &spec).unwrap();
        assert_eq!(change(&pool, create(1, 8)), Ok(()));
        let file = pool.file(&pool.namespaces()[0]);
        let mut image = vec![0; 4096];
        image[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        std::fs::write(file, image).unwrap();
        let nguid = [1; 16];
        assert_eq!(
            change(&pool, PoolChange::Attach { nguid, cntlid: 1 }),
            Ok(())
        );
        let volume = pool.namespaces()[0].volume.clone().unwrap();
        assert_eq!(volume.info().size, 4096);
    }

    #[test]
    fn invalid_pool_is_refused_with_reason() {
        let dir = tempfile::tempdir().unwrap();
        let pools = Pools::default();
        let one = spec(dir.path(), "");
        let pool = open(&pools, &one).unwrap();
        assert_eq!(change(&pool, create(1, 8)), Ok(()));
        let folder = dir.path().display().to_string();
        drop(pool);
        let clash = spec(dir.path(), "namespace = [{ volume = \"mem://1M\" }]\n");
        let error = format!("{:#}", open(&pools, &clash).unwrap_err());
        assert!(
            error.contains("made a namespace 1 in it") && error.contains(&folder),
            "{error}"
        );
        let nowhere = spec(&dir.path().join("nowhere"), "");
        let error = format!("{:#}", open(&pools, &nowhere).unwrap_err());
        assert!(error.contains("nowhere: No such file"), "{error}");
    }
}
