//! Copies from file to file by the file system: no data passes through this process.
//!
//! Where it can, the file system lets both files share the same blocks (a reflink, FICLONERANGE:
//! btrfs, XFS). Otherwise the kernel copies (`copy_file_range`), unless the user wants reflinks
//! only. Both calls wait for the disk, and io_uring has neither of them. A participating file has a
//! thread for it, and another one while that is not enough. Completions arrive through an
//! [`Inbox`].
//!
//! A copy that the file system does not do, for any reason, is done by the caller with reads and
//! writes: a failed attempt loses nothing. The exception is data that could not be made durable
//! ([`IoErrorKind::NotDurable`]): the system reports that once.

use super::{FileState, sys};
use crate::request::check_range;
use crate::{Completion, Inbox, Io, IoError, IoErrorKind, Op};
use dma::SegmentList;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use sync::Unpoisoned;

/// Setting whether, and how, the file system copies ranges between files on behalf of a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FileCopy {
    /// The file takes no part in copies by the file system.
    #[default]
    Off,
    /// Only copies that move no data: both files share the blocks until one of them is written.
    Reflink,
    /// The file system makes all copies, with and without sharing blocks.
    On,
}

/// Minimum length of a copy in bytes. Shorter ranges are not worth a thread's wake-up, nor an
/// extent of their own in the file.
const MIN_COPY_LEN: u64 = 64 << 10;
/// Maximum number of bytes that the kernel copies in one call. Cancellation is checked between
/// calls.
const STEP: usize = 1 << 20;
/// Maximum number of threads that make file system copies to one file.
const MAX_THREADS: usize = 2;
/// Idle time after which a copying thread ends, unless it is the last one.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// Stack size of a copying thread in bytes. The thread only makes system calls.
const STACK: usize = 128 << 10;
/// Maximum number of source files that a queue remembers as impossible to copy from.
const MAX_REFUSED: usize = 64;

/// Source range of a copy by the file system; see
/// [`RangeCopy::copy_source`](crate::RangeCopy::copy_source).
pub struct CopySource {
    file: Arc<FileState>,
    offset: u64,
    len: u64,
}

impl CopySource {
    /// Returns the length of the source in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }
}

impl fmt::Debug for CopySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopySource")
            .field("path", &self.file.path)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}

/// A copy from a file to a volume: see [`RangeCopy::copy`](crate::RangeCopy::copy).
#[derive(Debug)]
pub struct CopyRequest {
    /// Tag by which the caller recognises the completion, as in
    /// [`Request::tag`](crate::Request::tag).
    pub tag: u64,
    /// Source range of the copy.
    pub source: CopySource,
    /// Byte offset in the destination volume at which the copy begins.
    pub offset: u64,
    /// Whether the copied data must be durable before the completion is posted.
    pub fua: bool,
}

/// Counters of the file system copies to one file.
#[derive(Debug, Default)]
struct Copied {
    reflinked: AtomicU64,
    copied: AtomicU64,
}

/// Number of bytes that the file system has copied to a file since the file was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopiedBytes {
    /// Number of bytes that became shared blocks of both files (reflinks).
    pub reflinked: u64,
    /// Number of bytes that the kernel has copied as data.
    pub copied: u64,
}

/// Threads that make file system copies to one file. They end after this handle is dropped.
pub(super) struct Copier(Arc<Threads>);

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Copier").field(&self.0.state).finish()
    }
}

#[derive(Default)]
struct Threads {
    state: Mutex<State>,
    /// Signalled when a copy is queued, or when the threads have to end.
    due: Condvar,
    /// Signalled when a copy has ended.
    ended: Condvar,
    copied: Copied,
}

#[derive(Debug, Default)]
struct State {
    due: VecDeque<Job>,
    /// IDs of the copies that threads are making now.
    running: Vec<u64>,
    threads: usize,
    /// Number of threads that wait for work.
    idle: usize,
    last_id: u64,
    ending: bool,
}

/// Copy in the queue that no thread has started.
#[derive(Debug)]
struct Job {
    id: u64,
    copy: CopyRequest,
    to: Arc<FileState>,
    cancelled: Arc<AtomicBool>,
    inbox: Arc<Inbox<FinishedCopy>>,
}

/// Result of a copy that a thread has finished.
#[derive(Debug)]
struct FinishedCopy {
    id: u64,
    result: Result<(), IoError>,
}

impl Copier {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Returns the number of bytes that the file system has copied to the file so far.
    pub(super) fn copied(&self) -> CopiedBytes {
        let Copied { reflinked, copied } = &self.0.copied;
        CopiedBytes {
            reflinked: reflinked.load(Ordering::Relaxed),
            copied: copied.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.0.lock().ending = true;
        self.0.due.notify_all();
    }
}

impl Threads {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    /// Starts the first thread, if none is running.
    ///
    /// # Errors
    /// The system's error when a thread cannot be created.
    fn begin(self: &Arc<Self>) -> io::Result<()> {
        let state = self.lock();
        match state.threads {
            0 => self.clone().spawn(state),
            _ => Ok(()),
        }
    }

    /// Queues a copy for the threads. Returns the ID under which its completion is reported.
    /// Workers do not start threads, because that takes a lock on the process's mappings.
    fn start(&self, job: impl FnOnce(u64) -> Job) -> u64 {
        let mut state = self.lock();
        state.last_id += 1;
        let id = state.last_id;
        state.due.push_back(job(id));
        drop(state);
        self.due.notify_one();
        id
    }

    fn spawn(self: Arc<Self>, mut state: MutexGuard<'_, State>) -> io::Result<()> {
        state.threads += 1;
        drop(state);
        let mine = self.clone();
        let builder = std::thread::Builder::new().name("copy".into());
        let spawned = builder.stack_size(STACK).spawn(move || mine.run());
        if let Err(error) = &spawned {
            self.lock().threads -= 1;
            tracing::debug!(%error, "no further thread for copies to a file");
        }
        spawned.map(drop)
    }

    /// Cancels a copy that no thread has started. The copy completes at once.
    fn cancel(&self, id: u64) {
        let mut state = self.lock();
        let at = state.due.iter().position(|job| job.id == id);
        let job = at.and_then(|at| state.due.remove(at));
        drop(state);
        if let Some(Job { id, inbox, .. }) = job {
            let result = Err(IoErrorKind::Aborted.into());
            inbox.put(FinishedCopy { id, result });
        }
    }

    /// Waits until no thread is making any of the copies with these IDs.
    fn wait_for(&self, ids: &[u64]) {
        let mut state = self.lock();
        while state.running.iter().any(|id| ids.contains(id)) {
            state = self.ended.wait(state).unpoisoned();
        }
    }

    /// Runs the main loop of a copying thread: takes queued copies and executes them.
    fn run(self: Arc<Self>) {
        sync::leave_cpu();
        let mut state = self.lock();
        while !state.ending {
            let Some(job) = state.due.pop_front() else {
                state.idle += 1;
                let (woken, waited) = self.due.wait_timeout(state, IDLE_LIMIT).unpoisoned();
                state = woken;
                state.idle -= 1;
                // The last one stays.
                if waited.timed_out() && state.due.is_empty() && state.idle > 0 {
                    break;
                }
                continue;
            };
            state.running.push(job.id);
            // For the next one.
            if state.idle == 0 && state.threads < MAX_THREADS {
                let _ = self.clone().spawn(state);
            } else {
                drop(state);
            }
            let result = job.carry_out(&self.copied);
            let Job {
                id,
                inbox,
                copy,
                to,
                ..
            } = job;
            // The receiver of the completion may open the files anew. The files are dropped without
            // the lock: a file's drop waits for its threads.
            drop((copy, to));
            state = self.lock();
            state.running.retain(|running| *running != id);
            self.ended.notify_all();
            inbox.put(FinishedCopy { id, result });
        }
        state.threads -= 1;
    }
}

impl Job {
    fn carry_out(&self, copied: &Copied) -> Result<(), IoError> {
        let Self { copy, to, .. } = self;
        let from = &copy.source.file;
        let (source, len) = (copy.source.offset, copy.source.len);
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(IoErrorKind::Aborted.into());
        }
        // A different file system, one without reflinks, or a range that is not in its blocks: the
        // kernel reports these with various errors, all treated alike.
        if sys::reflink(from.fd.as_fd(), source, to.fd.as_fd(), copy.offset, len).is_ok() {
            copied.reflinked.fetch_add(len, Ordering::Relaxed);
        } else if from.options.copy == FileCopy::On && to.options.copy == FileCopy::On {
            self.copy_bytes()?;
            copied.copied.fetch_add(len, Ordering::Relaxed);
        } else {
            return Err(IoErrorKind::Unsupported.into());
        }
        if copy.fua {
            let synced = rustix::fs::fdatasync(&to.fd);
            synced.map_err(|errno| IoError::of_sync(errno.raw_os_error()))?;
        }
        Ok(())
    }

    /// Copies the data in the kernel (`copy_file_range`).
    fn copy_bytes(&self) -> Result<(), IoError> {
        let Self { copy, to, .. } = self;
        let (mut source, mut offset) = (copy.source.offset, copy.offset);
        let end = copy.source.offset + copy.source.len;
        while source < end {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(IoErrorKind::Aborted.into());
            }
            let len = usize::try_from(end - source).map_or(STEP, |left| left.min(STEP));
            let (from, to) = (&copy.source.file.fd, &to.fd);
            // Moves both places on.
            match rustix::fs::copy_file_range(from, Some(&mut source), to, Some(&mut offset), len) {
                // The source has become shorter.
                Ok(0) => return Err(IoErrorKind::Truncated.into()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(IoError::from_errno(errno.raw_os_error(), true)),
            }
        }
        Ok(())
    }
}

/// Outstanding file system copies of one worker's queue into a file.
pub(super) struct Copies {
    threads: Arc<Threads>,
    inbox: Arc<Inbox<FinishedCopy>>,
    under_way: Vec<UnderWay>,
    /// Numbers of the source files from which the file system turned out to be unable to copy.
    refused: Vec<u64>,
}

/// Copy without a completion that was reported to the caller.
struct UnderWay {
    id: u64,
    tag: u64,
    /// Number that identifies the opening of the source file ([`number`]).
    from: u64,
    cancelled: Arc<AtomicBool>,
}

impl Copies {
    /// Creates the list of copies to a file by the worker of `io`. Returns `None` when the file
    /// takes no part in copies, or no descriptor is available.
    pub(super) fn new(to: &FileState, io: &Io) -> Option<Box<Self>> {
        let threads = to.copier.as_ref()?.0.clone();
        threads.begin().ok()?;
        Some(Box::new(Self {
            threads,
            inbox: Inbox::new(io).ok()?,
            under_way: Vec::new(),
            refused: Vec::new(),
        }))
    }

    /// Starts a copy; see [`RangeCopy::copy`](crate::RangeCopy::copy).
    pub(super) fn start(&mut self, to: &Arc<FileState>, copy: CopyRequest) -> bool {
        let (len, from) = (copy.source.len, copy.source.file.number);
        let size = to.size.load(Ordering::Acquire);
        let fits = check_range(
            Op::Write { fua: copy.fua },
            copy.offset,
            len,
            size,
            to.block_size,
            to.read_only,
        );
        // The kernel sees no more of it than a step.
        let overlaps = from == to.number && copy.source.offset.abs_diff(copy.offset) < len;
        if fits.is_err() || overlaps || len < MIN_COPY_LEN || self.refused.contains(&from) {
            return false;
        }
        let (tag, cancelled) = (copy.tag, Arc::new(AtomicBool::new(false)));
        let job = |id| Job {
            id,
            copy,
            to: to.clone(),
            cancelled: cancelled.clone(),
            inbox: self.inbox.clone(),
        };
        let id = self.threads.start(job);
        self.under_way.push(UnderWay {
            id,
            tag,
            from,
            cancelled,
        });
        true
    }

    /// Returns the number of copies without a reported completion.
    pub(super) fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    /// Calls `done` with the completions of ended copies, and returns their number.
    pub(super) fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        if !self.inbox.has_news() {
            return 0;
        }
        let mut count = 0;
        for FinishedCopy { id, result } in self.inbox.take() {
            let Some(at) = self.under_way.iter().position(|one| one.id == id) else {
                continue;
            };
            let UnderWay { tag, from, .. } = self.under_way.swap_remove(at);
            if result.is_err_and(is_for_good) {
                if self.refused.len() == MAX_REFUSED {
                    self.refused.remove(0);
                }
                self.refused.push(from);
            }
            count += 1;
            done(Completion {
                tag,
                result,
                data: SegmentList::new(),
            });
        }
        count
    }

    /// Cancels a copy. Returns whether `tag` belonged to an outstanding copy.
    pub(super) fn cancel(&mut self, tag: u64) -> bool {
        let Some(one) = self.under_way.iter().find(|one| one.tag == tag) else {
            return false;
        };
        one.cancelled.store(true, Ordering::Relaxed);
        self.threads.cancel(one.id);
        true
    }
}

/// Returns whether the error will recur for every range of the two files, so that no further copy
/// is tried.
fn is_for_good(error: IoError) -> bool {
    match error.errno {
        libc::EXDEV | libc::EINVAL | libc::EPERM => true,
        _ => error.kind == IoErrorKind::Unsupported,
    }
}

/// Waits for the copies that threads are executing, so that nothing is written on behalf of a
/// dropped queue.
impl Drop for Copies {
    fn drop(&mut self) {
        for one in &self.under_way {
            one.cancelled.store(true, Ordering::Relaxed);
            self.threads.cancel(one.id);
        }
        let ids: Vec<u64> = self.under_way.iter().map(|one| one.id).collect();
        self.threads.wait_for(&ids);
        self.inbox.close();
    }
}

/// Returns the source of a copy for a range of a file; `None` when the file takes no part in
/// copies.
pub(super) fn source(file: &Arc<FileState>, offset: u64, len: u64) -> Option<CopySource> {
    let size = file.size.load(Ordering::Acquire);
    let fits = check_range(Op::Read, offset, len, size, file.block_size, true);
    (file.copier.is_some() && fits.is_ok()).then(|| CopySource {
        file: file.clone(),
        offset,
        len,
    })
}

/// Returns a number that is unique among all openings of files in this process.
pub(super) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by a panic.
mod tests {
    use super::*;
    use crate::{FileOptions, FileVolume};

    /// Checks that a copy that no thread has started ends at once when it is cancelled, without
    /// effect.
    #[test]
    fn waiting_copy_is_cancelled() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = FileOptions {
            copy: FileCopy::On,
            ..FileOptions::default()
        };
        let shared = FileVolume::open(file.path(), options).unwrap().shared;
        let io = Io::new(Default::default());
        // The thread count is set as if all threads were busy.
        shared.copier.as_ref().unwrap().0.lock().threads = MAX_THREADS;
        let mut copies = Copies::new(&shared, &io).unwrap();
        for tag in [1, 2] {
            let copy = CopyRequest {
                tag,
                source: source(&shared, 0, MIN_COPY_LEN).unwrap(),
                offset: MIN_COPY_LEN,
                fua: false,
            };
            assert!(copies.start(&shared, copy));
        }
        assert!(!copies.cancel(3));
        assert!(copies.cancel(2));
        let mut done = Vec::new();
        copies.poll(&mut |completion| done.push((completion.tag, completion.result)));
        assert_eq!(done, [(2, Err(IoErrorKind::Aborted.into()))]);
        assert_eq!(copies.in_flight(), 1);
        // The remaining copy is dropped with the queue.
        drop(copies);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
