//! An image as a [`Volume`].

use crate::connect;
use crate::error::RbdError;
use crate::ffi::{Image, Name, STACK, drop_last};
use crate::owner::ProcessIdentity;
use crate::queue::{LibraryEvent, RbdQueue};
use crate::settings::{Settings, SettingsText};
use dma::Buffer;
use probes::LogLimit;
use remote::{ConnectionState, ReachWatch, Reachable};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::{Extent, Inbox, Info, Io, IoError, IoErrorKind, Kind, OpenQueue, Volume, VolumeError};

/// Minimum block size of the volume in bytes.
const BLOCK: u32 = 512;
/// Minimum length in bytes of a discard that the library passes to the cluster.
const DISCARDED: u32 = 64 << 10;
/// Time without an answer after which the cluster counts as silent.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for the cluster to end requests when the volume is closed.
const END_LIMIT: Duration = Duration::from_secs(4);

/// Use of the image's exclusive lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LockMode {
    /// The lock is taken when it is free, or its owner is dead.
    #[default]
    Wait,
    /// The lock is acquired even if another client has it, which loses it.
    Break,
    /// The lock is neither checked nor acquired.
    Off,
}

/// Options for using an image as a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RbdOptions {
    /// Whether writes are refused.
    pub read_only: bool,
    /// Use of the image's exclusive lock.
    pub lock: LockMode,
    /// Time limit for the cluster to answer while the volume is opened.
    pub wait: Duration,
    /// Size in bytes of the image if its cluster does not answer in time; `None`: opening fails
    /// then.
    pub size: Option<u64>,
}

impl Default for RbdOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            lock: LockMode::Wait,
            wait: Duration::from_secs(5),
            size: None,
        }
    }
}

/// State of an RBD volume, shared by its queues and threads.
#[derive(Debug)]
pub(crate) struct SharedVolume {
    pub(crate) name: Name,
    /// URL of the image without options, for messages.
    pub(crate) text: String,
    pub(crate) told: SettingsText,
    pub(crate) options: RbdOptions,
    pub(crate) me: ProcessIdentity,
    /// Client with the exclusive lock, if its process on this host has died.
    dead: OnceLock<String>,
    /// ID of the image when the volume was opened.
    id: OnceLock<String>,
    image: OnceLock<Arc<Image>>,
    /// Whether the library copies written data within the call, so that the memory is free
    /// afterwards.
    copies: AtomicBool,
    /// Size of the image in bytes; 0 until it is known.
    size: AtomicU64,
    /// Size of the image in bytes that was last reported.
    last_size: AtomicU64,
    /// Whether the image's header has changed since the size was last read.
    changed: AtomicBool,
    /// Whether the thread that connects to the cluster was started.
    begun: AtomicBool,
    /// Parts of requests that the library was given, and that it has ended.
    pub(crate) started: AtomicU64,
    pub(crate) ended: AtomicU64,
    silence: Mutex<Responsiveness>,
    queues: Mutex<Vec<Weak<Inbox<LibraryEvent>>>>,
    pub(crate) log: LogLimit,
}

impl SharedVolume {
    pub(crate) fn failed(&self, what: &'static str, error: io::Error) -> RbdError {
        RbdError::Image {
            name: self.text.clone(),
            what,
            error,
        }
    }

    /// Returns the open image; `None` until it is connected.
    #[inline]
    pub(crate) fn image(&self) -> Option<&Arc<Image>> {
        self.image.get()
    }

    pub(crate) fn set_copies(&self, copies: bool) {
        self.copies.store(copies, Ordering::Relaxed);
    }

    pub(crate) fn copies(&self) -> bool {
        self.copies.load(Ordering::Relaxed)
    }

    /// Returns the part of the size that consists of whole blocks, in bytes.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        let size = self.size.load(Ordering::Acquire);
        size - size % u64::from(BLOCK)
    }

    pub(crate) fn set_size(&self, size: u64) {
        let before = self.size.swap(size, Ordering::AcqRel);
        if before != size && before != 0 {
            tracing::info!("{}: size changed from {before} to {size} bytes", self.text);
        }
    }

    pub(crate) fn changed(&self) {
        self.changed.store(true, Ordering::Release);
    }

    pub(crate) fn is_dead(&self, client: &str) -> bool {
        self.dead.get().is_some_and(|dead| dead == client)
    }

    /// Checks whether the cluster answers, and logs changes, because the library waits silently.
    fn look(&self) {
        let (started, ended) = (
            self.started.load(Ordering::Relaxed),
            self.ended.load(Ordering::Relaxed),
        );
        let text = &self.text;
        match self.silence.lock().unpoisoned().look(started, ended) {
            Some(Change::Silent(since)) => tracing::warn!(
                "{text}: no answer to {} requests for {since:.1?}; still waiting",
                started.saturating_sub(ended)
            ),
            Some(Change::Back(since)) => {
                tracing::info!("{text}: answers again after {since:.1?}");
            }
            None => {}
        }
    }

    /// Stores the open image, and tells the waiting queues.
    pub(crate) fn connected(&self, image: Arc<Image>) {
        if let Err(image) = self.image.set(image) {
            drop_last(image);
        }
        for queue in self.queues.lock().unpoisoned().drain(..) {
            if let Some(inbox) = queue.upgrade() {
                inbox.put(LibraryEvent::Connected);
            }
        }
    }

    pub(crate) fn info(&self) -> Info {
        let read_only = self.options.read_only;
        let how = match (self.options.read_only, self.image().is_some()) {
            (true, _) => ", read-only",
            (false, _) if self.options.lock == LockMode::Off => ", without its lock",
            (false, _) => "",
        };
        Info {
            size: self.size(),
            block_size: BLOCK,
            optimal_io: 4096,
            read_only,
            volatile_cache: false,
            deallocate: !read_only,
            deallocate_granularity: if read_only { 0 } else { DISCARDED },
            zeroes_after_deallocate: false,
            write_zeroes: !read_only,
            kind: Kind::BlockDevice,
            description: format!("{} by librbd{how}", self.text),
        }
    }
}

/// State of the check on whether the cluster answers requests.
#[derive(Debug, Default)]
struct Responsiveness {
    /// Number of ended parts at the last check, and the time at which that number was first seen.
    at: Option<(u64, Instant)>,
    silent: bool,
    /// Number of times that the cluster became silent.
    times: u64,
}

enum Change {
    Silent(Duration),
    Back(Duration),
}

impl Responsiveness {
    fn look(&mut self, started: u64, ended: u64) -> Option<Change> {
        let (at, since) = *self.at.get_or_insert((ended, Instant::now()));
        let waited = since.elapsed();
        if at == ended && started > ended {
            if self.silent || waited < SILENCE_TIMEOUT {
                return None;
            }
            self.silent = true;
            self.times += 1;
            return Some(Change::Silent(waited));
        }
        self.at = Some((ended, Instant::now()));
        std::mem::take(&mut self.silent).then_some(Change::Back(waited))
    }
}

impl Reachable for SharedVolume {
    fn reach(&self) -> Option<ConnectionState> {
        let silence = self.silence.lock().unpoisoned();
        Some(ConnectionState {
            server: self.text.clone(),
            connected: self.image().is_some() && !silence.silent,
            lost: silence.times,
        })
    }
}

impl Drop for SharedVolume {
    fn drop(&mut self) {
        if let Some(image) = self.image.take() {
            drop_last(image);
        }
    }
}

/// Image of a Ceph cluster, or a snapshot of one, as a volume.
#[derive(Debug)]
pub struct RbdVolume(Arc<SharedVolume>);

impl RbdVolume {
    /// Opens an image. If the cluster does not answer in [`RbdOptions::wait`], the volume has
    /// [`RbdOptions::size`] until it does. Queues start the permanent connection; the library has
    /// no threads before.
    ///
    /// # Errors
    /// [`RbdError`].
    pub fn open(name: Name, settings: Settings, options: RbdOptions) -> Result<Self, RbdError> {
        let told = settings.told()?;
        let text = url(&name);
        let shared = Arc::new(SharedVolume {
            name,
            told,
            options,
            me: ProcessIdentity::new(),
            dead: OnceLock::new(),
            id: OnceLock::new(),
            image: OnceLock::new(),
            copies: AtomicBool::new(false),
            size: AtomicU64::new(0),
            last_size: AtomicU64::new(0),
            changed: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            silence: Mutex::default(),
            queues: Mutex::default(),
            log: LogLimit::default(),
            text,
        });
        match connect::find(&shared)? {
            Some(found) => {
                if found.size % u64::from(BLOCK) != 0 {
                    return Err(RbdError::Size {
                        name: shared.text.clone(),
                        size: found.size,
                        block: BLOCK,
                    });
                }
                shared.set_size(found.size);
                shared.last_size.store(shared.size(), Ordering::Relaxed);
                if let Some(dead) = found.dead {
                    let _ = shared.dead.set(dead);
                }
                if let Some(id) = found.id {
                    let _ = shared.id.set(id);
                }
            }
            None => {
                let wait = shared.options.wait;
                let name = shared.text.clone();
                let Some(size) = shared.options.size else {
                    return Err(RbdError::Away { name, wait });
                };
                tracing::warn!(
                    "{name}: its cluster did not answer in {wait:?} (wait=); serving the disk \
                     with {size} bytes (size=), and requests wait for the cluster"
                );
                shared.set_size(size);
                shared.last_size.store(shared.size(), Ordering::Relaxed);
            }
        }
        Ok(Self(shared))
    }

    /// Returns a handle by which the state of the connection can be watched.
    pub fn watch(&self) -> ReachWatch {
        ReachWatch::new(self.0.clone())
    }

    fn error(&self, what: &'static str, error: io::Error) -> VolumeError {
        VolumeError::System {
            path: PathBuf::from(&self.0.text),
            what,
            error,
        }
    }
}

fn url(name: &Name) -> String {
    let Name {
        pool,
        namespace,
        image,
        snapshot,
    } = name;
    let namespace = if namespace.is_empty() {
        String::new()
    } else {
        format!("{namespace}/")
    };
    let snapshot = snapshot
        .as_ref()
        .map_or(String::new(), |snapshot| format!("@{snapshot}"));
    format!("rbd://{pool}/{namespace}{image}{snapshot}")
}

impl Volume for RbdVolume {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let inbox = Inbox::new(io);
        let inbox =
            inbox.map_err(|error| self.error("has no event descriptor for completions", error))?;
        if self.0.image().is_none() {
            self.0
                .queues
                .lock()
                .unpoisoned()
                .push(Arc::downgrade(&inbox));
            if !self.0.begun.swap(true, Ordering::AcqRel) {
                let started = connect::start(&self.0);
                started.map_err(|error| self.error("no thread that connects", error))?;
            }
        }
        if self.0.image().is_some() {
            // The image was connected between the two checks.
            inbox.put(LibraryEvent::Connected);
        }
        let queue = RbdQueue::new(self.0.clone(), inbox, io);
        Ok(OpenQueue::new(queue))
    }

    fn id(&self) -> Vec<u8> {
        self.0.text.clone().into_bytes()
    }

    fn own_id(&self) -> Option<Vec<u8>> {
        let SharedVolume { id, name, .. } = &*self.0;
        let snapshot = name.snapshot.as_ref();
        let snapshot = snapshot.map_or_else(String::new, |name| format!("@{name}"));
        Some(format!("rbd:{}{snapshot}", id.get()?).into_bytes())
    }

    fn media(&self) -> Vec<String> {
        let id = self.0.id.get();
        id.map(|id| format!("image {id}")).into_iter().collect()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn extent(&self) -> Option<Extent> {
        Some(Extent::whole(self.0.text.clone()))
    }

    fn resize(&self, bytes: u64) -> Result<(), VolumeError> {
        if self.0.options.read_only {
            return Err(VolumeError::FixedSize);
        }
        if bytes == 0 || !bytes.is_multiple_of(BLOCK.into()) {
            return Err(VolumeError::Size {
                size: bytes,
                why: "an image has whole blocks of 512 bytes",
            });
        }
        let gone = || io::Error::from(io::ErrorKind::NotConnected);
        let image = self.0.image().cloned();
        let image = image.ok_or_else(|| self.error("cannot be resized", gone()))?;
        let resized = image.resize(bytes);
        let size = resized.and_then(|()| image.size());
        drop_last(image);
        self.0
            .set_size(size.map_err(|error| self.error("cannot be resized", error))?);
        Ok(())
    }

    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        let read = connect::read(&self.0, offset, buffer.len());
        Some(match read.filter(|read| read.len() == buffer.len()) {
            Some(read) => {
                buffer.copy_from_slice(&read);
                Ok(())
            }
            None => Err(IoErrorKind::Unreachable.into()),
        })
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        let shared = &self.0;
        shared.look();
        if let Some(image) = shared.image()
            && shared.changed.swap(false, Ordering::AcqRel)
        {
            let image = image.clone();
            let size = image.size();
            drop_last(image);
            match size {
                Ok(size) => shared.set_size(size),
                Err(error) => {
                    shared.changed();
                    return Err(self.error("its size", error));
                }
            }
        }
        let size = shared.size();
        Ok(shared.last_size.swap(size, Ordering::Relaxed) != size)
    }
}

impl Drop for RbdVolume {
    /// Releases the lock, if the cluster answers in time, so that the next client need not wait for
    /// it.
    fn drop(&mut self) {
        let Some(image) = self.0.image().cloned() else {
            return;
        };
        let (told, tell) = mpsc::channel();
        let read_only = self.0.options.read_only;
        let closing = move || {
            // Without this check the library ends the process, for a snapshot or an image without
            // the feature.
            if !read_only && image.has_lock().unwrap_or(false) {
                let _ = image.unlock();
            }
            drop_last(image);
            let _ = told.send(());
        };
        let builder = std::thread::Builder::new()
            .name("rbd-close".into())
            .stack_size(STACK);
        if builder.spawn(closing).is_ok() {
            let _ = tell.recv_timeout(END_LIMIT);
        }
    }
}
