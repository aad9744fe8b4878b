//! The way to a cluster: once for a moment, when a volume is opened; then by a thread, until there
//! is one, which the library keeps.

use crate::error::RbdError;
use crate::ffi::{Image, STACK, drop_last};
use crate::owner::METADATUM;
use crate::settings::SettingsText;
use crate::volume::{LockMode, SharedVolume};
use dma::Buffer;
use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time limit for one attempt to reach the monitors of the cluster.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(20);
/// Pauses between attempts to connect to the cluster, growing from first to last.
const RETRY_INTERVALS: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(3),
];
/// Interval of checks on whether another client has released the image's lock.
const LOCK_PAUSE: Duration = Duration::from_millis(500);
/// Interval between log lines about a cluster that stays unreachable.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Image feature bit RBD_FEATURE_EXCLUSIVE_LOCK.
const EXCLUSIVE_LOCK: u64 = 1 << 2;

/// Properties of an image that was opened briefly, before it is served.
pub(crate) struct ImageProbe {
    pub(crate) size: u64,
    /// ID of the image in its pool, if the cluster reports it.
    pub(crate) id: Option<String>,
    /// Client with the image's exclusive lock, if its process on this host has died.
    pub(crate) dead: Option<String>,
}

/// Returns whether the cluster has answered with an error that will not change.
fn is_final(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, PermissionDenied};
    matches!(error.kind(), NotFound | PermissionDenied | InvalidInput)
}

/// Opens an image for a moment, on a thread of its own; nothing when that takes longer than
/// `limit`. Nothing of the library runs any more afterwards.
pub(crate) fn look<T: Send + 'static>(
    shared: &Arc<SharedVolume>,
    limit: Duration,
    see: impl FnOnce(&Arc<Image>) -> io::Result<T> + Send + 'static,
) -> Result<Option<T>, RbdError> {
    let (told, tell) = mpsc::channel();
    let mine = shared.clone();
    let builder = std::thread::Builder::new()
        .name("rbd-look".into())
        .stack_size(STACK);
    let spawned = builder.spawn(move || {
        sync::leave_cpu();
        let seen = open(&mine, limit, true).and_then(|image| {
            let image = Arc::new(image);
            let seen = see(&image).map_err(|error| ("the image", error));
            drop(image);
            seen
        });
        let _ = told.send(seen);
    });
    if let Err(error) = spawned {
        return Err(shared.failed("no thread", error));
    }
    // The library has its own time limit; this one is a safeguard.
    match tell.recv_timeout(limit + Duration::from_secs(2)) {
        Ok(Ok(seen)) => Ok(Some(seen)),
        Ok(Err((what, error))) if is_final(&error) => Err(shared.failed(what, error)),
        Ok(Err((what, error))) => {
            tracing::warn!("{}: {what}: {error}", shared.text);
            Ok(None)
        }
        Err(_) => Ok(None),
    }
}

/// Reads the properties of an image before it is served.
pub(crate) fn find(shared: &Arc<SharedVolume>) -> Result<Option<ImageProbe>, RbdError> {
    let me = shared.me.clone();
    look(shared, shared.options.wait, move |image| {
        let record = image.metadatum(METADATUM).ok();
        Ok(ImageProbe {
            size: image.size()?,
            id: image.id().ok(),
            dead: record.and_then(|record| me.dead(&record)),
        })
    })
}

/// Reads `len` bytes of an image, blocking; `None` if that fails.
pub(crate) fn read(shared: &Arc<SharedVolume>, offset: u64, len: usize) -> Option<Buffer> {
    let read = look(shared, shared.options.wait, move |image| {
        let (told, tell) = mpsc::channel();
        let work = crate::ffi::ImageOperation::Read(Buffer::new(len));
        let done = Box::new(move |answer: isize, buffer: Option<Buffer>| {
            let _ = told.send((answer, buffer));
        });
        image.start(offset, work, done)?;
        match tell.recv() {
            Ok((answer, Some(buffer))) if answer >= 0 => Ok(buffer),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    });
    read.ok().flatten()
}

fn open(
    shared: &SharedVolume,
    limit: Duration,
    brief: bool,
) -> Result<Image, (&'static str, io::Error)> {
    let cluster = shared.told.connect(limit, brief);
    let cluster = cluster.map_err(|error| ("the cluster does not answer", error))?;
    if !brief {
        shared.set_copies(SettingsText::copies(&cluster));
    }
    Image::open(cluster, &shared.name, brief || shared.options.read_only)
}

/// Starts the thread that connects to the cluster and keeps the image open.
pub(crate) fn start(shared: &Arc<SharedVolume>) -> io::Result<()> {
    let weak = Arc::downgrade(shared);
    let builder = std::thread::Builder::new()
        .name("rbd".into())
        .stack_size(STACK);
    builder.spawn(move || run(&weak)).map(drop)
}

/// Rate limit of a log message that repeats while a cluster is unreachable.
struct RepeatedLog(Option<Instant>);

impl RepeatedLog {
    fn is_due(&mut self) -> bool {
        let due = self.0.is_none_or(|at| at.elapsed() >= LOG_INTERVAL);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}

fn run(weak: &Weak<SharedVolume>) {
    sync::leave_cpu();
    let began = Instant::now();
    let (mut attempts, mut said) = (0usize, RepeatedLog(None));
    loop {
        let Some(shared) = weak.upgrade() else {
            return;
        };
        let attempt = connect(&shared, weak);
        match attempt {
            Ok(Some(image)) => {
                if attempts > 0 {
                    let text = &shared.text;
                    tracing::info!("{text}: connected after {:.1?}", began.elapsed());
                }
                shared.connected(image);
                return;
            }
            // The volume is not used any more.
            Ok(None) => return,
            Err((what, error)) => {
                if said.is_due() {
                    let text = &shared.text;
                    tracing::warn!("{text}: {what}: {error}; requests wait, retrying");
                }
            }
        }
        drop(shared);
        let pause = RETRY_INTERVALS.get(attempts).or(RETRY_INTERVALS.last());
        std::thread::sleep(pause.copied().unwrap_or(ATTEMPT_TIMEOUT));
        attempts = attempts.saturating_add(1);
    }
}

type Attempt = Result<Option<Arc<Image>>, (&'static str, io::Error)>;

fn connect(shared: &Arc<SharedVolume>, weak: &Weak<SharedVolume>) -> Attempt {
    let mut image = open(shared, ATTEMPT_TIMEOUT, false)?;
    let mine = weak.clone();
    let watched = image.watch(move || {
        if let Some(shared) = mine.upgrade() {
            shared.changed();
        }
    });
    watched.map_err(|error| ("its header cannot be watched", error))?;
    let image = Arc::new(image);
    let locked = lock(shared, &image, weak);
    let size = locked.and_then(|locked| {
        if locked {
            image.size().map(Some).map_err(|error| ("its size", error))
        } else {
            Ok(None)
        }
    });
    match size {
        Ok(Some(size)) => {
            shared.set_size(size);
            Ok(Some(image))
        }
        Ok(None) => {
            drop_last(image);
            Ok(None)
        }
        Err(error) => {
            drop_last(image);
            Err(error)
        }
    }
}

/// Acquires the exclusive lock of the image. Returns `false` if the volume was closed meanwhile.
fn lock(
    shared: &SharedVolume,
    image: &Image,
    weak: &Weak<SharedVolume>,
) -> Result<bool, (&'static str, io::Error)> {
    if shared.options.read_only || shared.options.lock == LockMode::Off {
        return Ok(true);
    }
    let features = image.features().map_err(|error| ("its features", error))?;
    let text = &shared.text;
    if features & EXCLUSIVE_LOCK == 0 {
        tracing::warn!(
            "{text}: has no exclusive lock, so other clients may write to it as well (rbd feature \
             enable POOL/IMAGE exclusive-lock)"
        );
        return Ok(true);
    }
    let mut said = RepeatedLog(None);
    loop {
        if image.has_lock().map_err(|error| ("its lock", error))? {
            break;
        }
        let owner = image.lock_owner().map_err(|error| ("its lock", error))?;
        let Some(owner) = owner else { break };
        let watchers = image.watchers().map_err(|error| ("its watchers", error))?;
        // The owner is named by address or by number, depending on the version of the library.
        let of_owner = |(client, address): &&(i64, String)| {
            *address == owner || owner == format!("client.{client}")
        };
        let alive = watchers.iter().find(of_owner);
        let why = match alive {
            _ if shared.is_dead(&owner) => Some("its process was one of this host, and is dead"),
            _ if shared.options.lock == LockMode::Break => Some("lock=break is set"),
            // The library decides which clients are dead, and takes the lock from no other.
            None if image.lock().is_ok() => break,
            _ => None,
        };
        if let Some(why) = why {
            tracing::warn!(
                "{text}: the lock is taken from {owner}, which the cluster blocklists: {why}"
            );
            image
                .break_lock(&owner)
                .map_err(|error| ("its lock cannot be broken", error))?;
            break;
        }
        if said.is_due() {
            let address = alive.map_or("", |(_, address)| address);
            tracing::warn!(
                "{text}: its exclusive lock is held by {owner} ({address}); waiting until that \
                 client closes the image"
            );
        }
        // This thread and the caller's are not enough: somebody has to want it.
        if weak.strong_count() <= 1 {
            return Ok(false);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    image.lock().map_err(|error| ("its lock", error))?;
    let client = image.lock_owner().ok().flatten();
    if let Some(record) = client.and_then(|client| shared.me.record(&client)) {
        // Without it the next process waits for half a minute.
        let _ = image.set_metadatum(METADATUM, &record);
    }
    Ok(true)
}
