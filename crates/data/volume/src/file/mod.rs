//! A raw file or block device, by io_uring.

mod copy;
mod description;
mod device;
mod exclusive;
mod fence;
mod format;
mod holder;
mod lock;
mod open;
mod sys;
mod threads;

use crate::io::job::Abilities;
use crate::io::ring::{Alignment, Ring, RingFile};
use crate::request::{MAX_INLINE_BYTES, check_data, check_range};
use crate::{
    Allocation, AtomicWrites, Completion, Extent, FastPath, Info, Io, IoError, IoErrorKind, Kind,
    Op, OpenQueue, QueueState, RangeCopy, Request, Volume, VolumeError, VolumeQueue,
};
pub use copy::{CopiedBytes, CopyRequest, CopySource, FileCopy};
use copy::{Copier, Copies};
pub(crate) use description::FileDescription;
use dma::{Buffer, SegmentList, View};
pub use fence::PreviousProcess;
pub use lock::FileLock;
use open::OpenedFile;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use threads::{FileThreads, ThreadsQueue};

/// Setting for direct I/O (O_DIRECT), which bypasses the page cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Direct {
    /// Direct I/O where the file allows it; otherwise buffered, with a warning in the log.
    #[default]
    Auto,
    /// Direct I/O always; otherwise opening the file fails.
    On,
    /// Buffered I/O always.
    Off,
}

/// Check of a file's first bytes for an image format when the file is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// Only a raw disk: a file that begins like an image of another format (qcow2, VMDK, ...) is
    /// not opened.
    #[default]
    Probe,
    /// No check: the file is served as raw data whatever it contains.
    Raw,
}

/// Options with which a [`FileVolume`] opens its file or block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOptions {
    /// Whether to open the file for reading only, so that writes are refused.
    pub read_only: bool,
    /// Whether requests bypass the page cache.
    pub direct: Direct,
    /// Whether to lock the file against other processes: exclusively, or shared when `read_only`.
    pub lock: bool,
    /// Smallest block in bytes that requests will use, when it has been chosen; a power of two from
    /// 512 to 65536. `None`: a block device's own, or 512 for a file, also where direct I/O needs
    /// larger ones. Such a file is accessed through the page cache, which keeps a flush and
    /// `RWF_DSYNC` as durable as they are. With [`Direct::On`] it is what direct I/O needs.
    pub block_size: Option<u32>,
    /// Whether the file's first bytes are checked for an image format.
    pub format: Format,
    /// Limits of the wait for a previous process that still has the file locked.
    pub previous: PreviousProcess,
    /// Timeout of requests to a file that is not on a disk of this machine, and may hang: an
    /// unanswered request then fails with [`IoErrorKind::Unreachable`]. Requests to other files end
    /// when the kernel ends them.
    pub timeout: Option<Duration>,
    /// The file holds an image of another format, for a volume on top of this one. It may have any
    /// length, in units of a byte where the page cache is not bypassed. Bytes behind its end read
    /// as zeroes, and a write there makes it longer.
    pub image: bool,
    /// Bytes of the longest write that is done as a whole, where the kernel can do that
    /// ([`Volume::atomic_writes`]); 0: none is.
    ///
    /// Not more than is promised to a user: such a write has no fixed buffers, and is copied where
    /// it is several pieces.
    pub atomic: u32,
    /// Whether the file system copies between this and other files ([`RangeCopy::copy`]). Not
    /// applied where the file is a block device, or may hang.
    pub copy: FileCopy,
}

impl FileOptions {
    /// Limit for a promise to hosts where writes are atomic only as aligned powers of two: two
    /// blocks, of 4096 bytes at most ([`AtomicWrites::unit_of_blocks`]).
    pub const TWO_BLOCKS: u32 = 8192;
}

impl Default for FileOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            direct: Direct::Auto,
            lock: true,
            block_size: None,
            format: Format::Probe,
            previous: PreviousProcess::default(),
            timeout: None,
            image: false,
            atomic: FileOptions::TWO_BLOCKS,
            copy: FileCopy::Off,
        }
    }
}

/// A raw file or block device.
///
/// A write is durable after a flush (`fdatasync`) or when written with `fua` (`RWF_DSYNC`).
/// Deallocation punches holes, which read as zeroes. All I/O is asynchronous. It passes through the
/// worker's [`Io`], or through threads of the file's own where it is not on a disk of this machine,
/// and may hang.
#[derive(Debug)]
pub struct FileVolume {
    shared: Arc<FileState>,
}

#[derive(Debug)]
struct FileState {
    path: PathBuf,
    fd: Arc<FileDescription>,
    /// Size of the file in bytes, which changes when the file is resized.
    size: AtomicU64,
    abilities: Arc<Abilities>,
    read_only: bool,
    direct: Option<Alignment>,
    block_size: u32,
    /// The size is a multiple of this: the blocks that the user wants, or `block_size`.
    size_unit: u32,
    optimal_io: u32,
    punch_granularity: u32,
    device: bool,
    /// Whether the file is on a filesystem in memory (tmpfs), so that no request has to wait.
    in_memory: bool,
    description: String,
    id: Vec<u8>,
    own_id: Option<Vec<u8>>,
    medium: Option<String>,
    options: FileOptions,
    /// Name of the file in the registry of open volumes ([`Extent`](crate::Extent)); `None` without
    /// locks.
    root: Option<String>,
    /// Exclusive claim that keeps other users of the system off a block device.
    _exclusive: Option<Arc<OwnedFd>>,
    /// Threads for a file that is not on this machine's disks: no worker may wait for it. Declared
    /// after `fd`, so that the file is not closed before they have ended.
    threads: Option<Arc<FileThreads>>,
    /// Whether the file has no fixed end, so that writes may extend it.
    endless: bool,
    /// Number that no other opening of a file in this process has.
    number: u64,
    /// Threads that make file system copies; `None` if the file takes no part in such copies.
    copier: Option<Copier>,
    /// Number of further openings that each hold a lock of a part of the file.
    openings: AtomicU64,
    /// Lock of the used part of the file, once that part is known.
    lock: OnceLock<Arc<FileLock>>,
}

/// Size in bytes that a file without a fixed end reports.
const UNBOUNDED_SIZE: u64 = i64::MAX as u64;

impl FileState {
    /// Returns the result of a request that needs no work of the file, or is refused.
    fn ends_at_once(&self, request: &Request) -> Option<Result<(), IoError>> {
        let size = self.size.load(Ordering::Acquire);
        if let Err(error) = request.check(size, self.block_size, self.read_only) {
            return Some(Err(error));
        }
        match request.op {
            // The system takes an empty range for a mistake.
            op if op != Op::Flush && request.len == 0 => Some(Ok(())),
            // A file that is never written needs no flush.
            Op::Flush if self.read_only => Some(Ok(())),
            Op::Deallocate if !self.abilities.punch() => Some(Err(IoErrorKind::Unsupported.into())),
            _ => None,
        }
    }
}

impl FileVolume {
    /// Opens a file or block device.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<Self, VolumeError> {
        let volume = Self::open_unlocked(path.as_ref(), options)?;
        volume.lock(0, None)?;
        Ok(volume)
    }

    /// Opens a file or block device without the lock that the options ask for: [`FileVolume::lock`]
    /// sets it, when it is known which part is to be used.
    pub fn open_unlocked(
        path: impl AsRef<Path>,
        options: FileOptions,
    ) -> Result<Self, VolumeError> {
        Self::open_as(path.as_ref(), path.as_ref(), options)
    }

    /// Opens the file at `from`; errors and log messages call it `path`.
    fn open_as(from: &Path, path: &Path, options: FileOptions) -> Result<Self, VolumeError> {
        let opened = open::open(from, &options)?;
        let description = describe(path, &options, &opened);
        if let Some(why) = &opened.buffered_because {
            tracing::warn!(
                "{}: no direct I/O, {why}: using the page cache",
                path.display()
            );
        }
        if options.timeout.is_some() && !opened.may_hang {
            tracing::warn!(
                "{}: timeout= has no effect on a local disk, whose requests the kernel times out",
                path.display()
            );
        }
        if options.copy != FileCopy::Off && (opened.may_hang || opened.device) {
            tracing::warn!(
                "{}: copy= has no effect: not a file on a local disk",
                path.display()
            );
        }
        let writable = !options.read_only;
        let fd = Arc::new(FileDescription::from(opened.fd));
        // Devices are always asked: where they cannot do it, the kernel writes zeroes for them.
        let endless = options.image && !opened.device;
        // The threads of a file that may hang write it in pieces.
        let atomic = if opened.may_hang {
            AtomicWrites::NONE
        } else {
            opened.atomic
        };
        let copies = options.copy != FileCopy::Off && !opened.device && !opened.may_hang;
        let copies = copies && !options.image;
        let abilities = Abilities::new(opened.punch, writable).endless(endless);
        let abilities = Arc::new(abilities.atomic(atomic));
        let threads = opened.may_hang.then(|| {
            let unit = opened.direct.map_or(1, |direct| direct.block.into());
            FileThreads::new(fd.clone(), abilities.clone(), unit)
        });
        Ok(Self {
            shared: Arc::new(FileState {
                path: path.into(),
                fd,
                size: AtomicU64::new(if endless { UNBOUNDED_SIZE } else { opened.size }),
                endless,
                openings: AtomicU64::new(0),
                lock: OnceLock::new(),
                number: copy::number(),
                copier: copies.then(Copier::new),
                abilities,
                read_only: options.read_only,
                direct: opened.direct,
                block_size: opened.block_size,
                size_unit: options
                    .block_size
                    .map_or(opened.block_size, |wanted| wanted.max(opened.block_size)),
                optimal_io: opened.optimal_io,
                punch_granularity: opened.punch_granularity,
                device: opened.device,
                in_memory: opened.in_memory,
                threads: threads.map(Arc::new),
                description,
                id: opened.id,
                own_id: opened.own_id,
                medium: opened.medium,
                options,
                root: options.lock.then_some(opened.root),
                _exclusive: opened.exclusive,
            }),
        })
    }

    /// Locks `len` bytes (or all) from byte `offset` on against other users, by the options:
    /// exclusively, or shared when it is read-only. The lock lasts as long as this opening of the
    /// file is used, and by any request that the kernel still works on. Where a process that has
    /// ended has left such requests behind, this waits for them ([`FileOptions::previous`]).
    pub fn lock(&self, offset: u64, len: Option<u64>) -> Result<(), VolumeError> {
        let shared = &*self.shared;
        if shared.root.is_none() {
            return Ok(());
        }
        open::lock(
            &shared.path,
            &shared.options,
            shared.fd.as_fd(),
            offset,
            len,
        )?;
        self.enter_lock((offset, len), true);
        Ok(())
    }

    /// Notes the part of the file that [`FileLock::try_lock`] is to lock, while another process
    /// still has that lock.
    pub fn lock_later(&self, offset: u64, len: Option<u64>) {
        self.enter_lock((offset, len), false);
    }

    fn enter_lock(&self, part: (u64, Option<u64>), held: bool) {
        let shared = &*self.shared;
        // A block device has a claim of this host beside its lock, and neither is known to other
        // hosts.
        let is_exclusive = shared.root.is_some() && !shared.read_only;
        if is_exclusive && !shared.device && !shared.endless {
            let lock = FileLock::new(shared.path.clone(), &shared.fd, part, held);
            // The part of an opening never changes.
            let _ = shared.lock.set(Arc::new(lock));
        }
    }

    /// Opens the same file a second time, past the page cache or through it. When this opening has
    /// the lock of all of the file to write it, the new one gets a part of that: the next process
    /// that has the file waits for the requests of both.
    ///
    /// # Errors
    /// A [`VolumeError`] when the file cannot be opened, or another process has got the lock's
    /// part.
    pub fn reopen(&self, direct: Direct) -> Result<Self, VolumeError> {
        let shared = &*self.shared;
        let options = FileOptions {
            direct,
            lock: false,
            block_size: None,
            format: Format::Raw,
            copy: FileCopy::Off,
            ..shared.options
        };
        let opened = Self::open_as(&self.own_path(), &shared.path, options)?;
        if shared.options.lock && !shared.read_only {
            let (from, to) = (shared.fd.as_fd(), opened.shared.fd.as_fd());
            let number = shared.openings.fetch_add(1, Ordering::Relaxed);
            open::share_lock(&shared.path, &shared.options, number, from, to)?;
        }
        Ok(opened)
    }

    /// Opens the same file for blocking calls, through the page cache.
    ///
    /// # Errors
    /// The system's.
    pub fn reopen_file(&self) -> std::io::Result<std::fs::File> {
        let mut options = std::fs::File::options();
        let options = options.read(true).write(!self.shared.read_only);
        options.open(self.own_path())
    }

    /// Returns the path of the open file in /proc, which is valid even after the file was renamed.
    fn own_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.shared.fd.as_raw_fd()).into()
    }

    /// Returns the unit in bytes of which all offsets and lengths of requests are multiples.
    pub fn unit(&self) -> u64 {
        self.shared.block_size.into()
    }

    /// Returns whether the file has threads of its own, because it may hang: its completions do not
    /// arrive through the ring.
    pub fn has_threads(&self) -> bool {
        self.shared.threads.is_some()
    }

    /// Returns the number of bytes that the file system has copied to this file so far.
    pub fn copied(&self) -> CopiedBytes {
        let copier = self.shared.copier.as_ref();
        copier.map(Copier::copied).unwrap_or_default()
    }

    /// Returns whether requests bypass the page cache (direct I/O).
    pub fn is_direct(&self) -> bool {
        self.shared.direct.is_some()
    }

    /// Returns the volume with a different promise of atomic writes, for tests.
    #[cfg(test)]
    pub(crate) fn promising(self, atomic: AtomicWrites) -> Self {
        let mut shared = Arc::into_inner(self.shared).expect("nobody else has it");
        shared.abilities = Arc::new(Abilities::new(true, true).atomic(atomic));
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Returns the path with which the file was opened.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }
}

fn describe(path: &Path, options: &FileOptions, opened: &OpenedFile) -> String {
    let what = if opened.device {
        "block device"
    } else {
        "file"
    };
    let how = match (&opened.direct, &opened.buffered_because) {
        (Some(_), _) => "direct I/O".to_owned(),
        (None, Some(why)) => format!("buffered I/O ({why})"),
        (None, None) => "buffered I/O".to_owned(),
    };
    let threads = if opened.may_hang {
        ", by threads of its own (not on a disk of this machine)"
    } else {
        ""
    };
    let only = if options.read_only { ", read-only" } else { "" };
    let atomic = if opened.atomic.is_none() || opened.may_hang {
        String::new()
    } else {
        format!(", {}", opened.atomic)
    };
    format!("{what} {}, {how}{threads}{only}{atomic}", path.display())
}

impl Volume for FileVolume {
    fn info(&self) -> Info {
        let shared = &*self.shared;
        let punch = shared.abilities.punch() && !shared.read_only;
        Info {
            size: shared.size.load(Ordering::Acquire),
            block_size: shared.block_size,
            optimal_io: shared.optimal_io,
            read_only: shared.read_only,
            volatile_cache: true,
            deallocate: punch,
            deallocate_granularity: if punch { shared.punch_granularity } else { 0 },
            zeroes_after_deallocate: punch,
            write_zeroes: punch || (shared.abilities.zero_range() && !shared.device),
            kind: if shared.device {
                Kind::BlockDevice
            } else {
                Kind::File
            },
            description: shared.description.clone(),
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        if let Some(threads) = &self.shared.threads {
            let queue = ThreadsQueue::new(self.shared.clone(), threads.clone(), io)?;
            return Ok(OpenQueue::new(queue));
        }
        let ring = io.ring()?;
        let file = ring.open(RingFile {
            fd: self.shared.fd.clone(),
            direct: self.shared.direct,
            abilities: self.shared.abilities.clone(),
            lane: io.lane_end(),
        });
        // A lane's owner has its own copies to make.
        let alone = io.lane_end().is_none();
        let queue = FileQueue {
            copies: alone.then(|| Copies::new(&self.shared, io)).flatten(),
            shared: self.shared.clone(),
            ring,
            file,
        };
        let atomic = self.atomic_writes();
        Ok(match io.lane_end() {
            // The ring's fast path is for completions that go to its poller.
            Some(_) => OpenQueue::new(queue),
            None if !atomic.is_none() => {
                OpenQueue::with_fast_path(AtomicFileQueue { queue, atomic })
            }
            None => OpenQueue::with_fast_path(queue),
        })
    }

    fn atomic_writes(&self) -> AtomicWrites {
        self.shared.abilities.atomic_writes()
    }

    fn id(&self) -> Vec<u8> {
        self.shared.id.clone()
    }

    fn own_id(&self) -> Option<Vec<u8>> {
        self.shared.own_id.clone()
    }

    fn media(&self) -> Vec<String> {
        self.shared.medium.iter().cloned().collect()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn extent(&self) -> Option<Extent> {
        self.shared.root.clone().map(Extent::whole)
    }

    fn file_lock(&self) -> Option<Arc<FileLock>> {
        self.shared.lock.get().cloned()
    }

    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        let shared = &*self.shared;
        let unit = u64::from(shared.block_size);
        Some(threads::read(shared.fd.as_fd(), buffer, offset, unit))
    }

    fn allocation(&self, offset: u64, len: u64) -> Option<(Allocation, u64)> {
        let shared = &*self.shared;
        if shared.device {
            return None;
        }
        open::allocation(shared.fd.as_fd(), offset, len)
    }

    fn resize(&self, bytes: u64) -> Result<(), VolumeError> {
        let shared = &*self.shared;
        if shared.device || shared.endless {
            return Err(VolumeError::FixedSize);
        }
        if shared.read_only {
            return Err(VolumeError::ReadOnlyMedium {
                path: shared.path.clone(),
            });
        }
        if let Some(lock) = shared.lock.get()
            && !lock.is_held()
        {
            return Err(lock.refusal());
        }
        if bytes == 0 {
            return Err(VolumeError::Empty {
                path: shared.path.clone(),
            });
        }
        open::check_size(&shared.path, bytes, shared.size_unit)?;
        let resized = rustix::fs::ftruncate(&shared.fd, bytes);
        resized.map_err(|errno| VolumeError::System {
            path: shared.path.clone(),
            what: "cannot be resized",
            error: errno.into(),
        })?;
        self.refresh().map(drop)
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        let shared = &*self.shared;
        if shared.endless {
            return Ok(false);
        }
        let size = open::known_size(&shared.path, shared.fd.as_fd(), shared.device)?;
        open::check_size(&shared.path, size, shared.size_unit)?;
        Ok(shared.size.swap(size, Ordering::AcqRel) != size)
    }
}

/// Queue of one worker into a [`FileVolume`].
struct FileQueue {
    shared: Arc<FileState>,
    /// Outstanding copies by the file system; `None` if the file takes no part in them.
    copies: Option<Box<Copies>>,
    ring: Rc<Ring>,
    /// Number by which the worker's ring knows the file.
    file: usize,
}

impl FileQueue {
    /// Reads or writes at once, on a filesystem that has nothing to wait for. The kernel would give
    /// such a request of the ring to a thread of its own, which takes several times as long as the
    /// work.
    fn transfer(&self, op: Op, offset: u64, data: View<'_>) -> Result<(), IoError> {
        let shared = &*self.shared;
        let size = shared.size.load(Ordering::Acquire);
        let (len, block) = (data.len_bytes(), shared.block_size);
        check_range(op, offset, len, size, block, shared.read_only)?;
        check_data(op, len, data)?;
        let write = op.changes();
        let flags = match op {
            Op::Write { fua: true } => libc::RWF_DSYNC,
            _ => 0,
        };
        sys::transfer(shared.fd.as_fd(), write, data, offset, flags).map_err(|error| {
            match error.raw_os_error() {
                Some(errno) => IoError::from_errno(errno, write),
                None => IoErrorKind::Truncated.into(),
            }
        })
    }
}

impl VolumeQueue for FileQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        match self.shared.ends_at_once(&request) {
            Some(result) => Some(request.complete(result)),
            None => self.ring.submit(self.file, request),
        }
    }

    /// Calls `done` with the completions of copies by the file system. All other completions arrive
    /// through the ring.
    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        match &mut self.copies {
            None => 0,
            Some(copies) => copies.poll(done),
        }
    }

    fn state(&self) -> QueueState {
        let copies = self.copies.as_ref().map_or(0, |copies| copies.in_flight());
        QueueState::of_ring(self.ring.in_flight_of(self.file) + copies)
    }

    fn cancel(&mut self, tag: u64) {
        let copies = self.copies.as_mut();
        if !copies.is_some_and(|copies| copies.cancel(tag)) {
            self.ring.cancel(self.file, tag);
        }
    }
}

impl FastPath for FileQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        let shared = &*self.shared;
        let size = shared.size.load(Ordering::Acquire);
        let len = data.len_bytes();
        let range = check_range(op, offset, len, size, shared.block_size, shared.read_only);
        let refused = range.and_then(|()| check_data(op, len, data.view())).err();
        if refused.is_none() && len > 0 && op.has_data() {
            return self.ring.transfer(self.file, tag, op, offset, data);
        }
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {
        self.ring.push();
    }

    fn is_immediate(&self) -> bool {
        self.shared.in_memory && self.shared.direct.is_none()
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let at_once = self.is_immediate() && data.len_bytes() <= MAX_INLINE_BYTES;
        let done = at_once.then(|| self.transfer(op, offset, data));
        // The ordinary path handles reads behind the end.
        done.filter(|done| !self.shared.endless || done.is_ok())
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}

    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        Some(self)
    }
}

impl RangeCopy for FileQueue {
    fn copy_source(&mut self, offset: u64, len: u64) -> Option<CopySource> {
        copy::source(&self.shared, offset, len)
    }

    fn copy(&mut self, copy: CopyRequest) -> bool {
        let copies = self.copies.as_mut();
        copies.is_some_and(|copies| copies.start(&self.shared, copy))
    }
}

/// A queue into a file with atomic writes, which the ring's fast path does not support. Files
/// without atomic writes skip the check.
struct AtomicFileQueue {
    queue: FileQueue,
    atomic: AtomicWrites,
}

impl VolumeQueue for AtomicFileQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.queue.submit(request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.queue.poll(done)
    }

    fn state(&self) -> QueueState {
        self.queue.state()
    }

    fn cancel(&mut self, tag: u64) {
        self.queue.cancel(tag);
    }
}

impl FastPath for AtomicFileQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        match op {
            Op::Write { .. } if self.atomic.covers(offset, data.len_bytes()) => {
                self.submit(Request::transfer(tag, op, offset, data))
            }
            _ => self.queue.start(tag, op, offset, data),
        }
    }

    fn push(&mut self) {
        self.queue.push();
    }

    /// No file in memory has them.
    fn is_immediate(&self) -> bool {
        false
    }

    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}

    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        self.queue.range_copy()
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        self.ring.close(self.file);
    }
}
