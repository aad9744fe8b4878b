//! A worker's own io_uring, shared by the volumes that the worker has opened.

mod burst;
mod core;
mod drain_watch;
mod entry;
mod event_sources;
mod fixed;
mod inline;
pub(crate) mod job;
mod lane;
mod pool;
mod registered;
pub(crate) mod ring;
mod setup;
mod sleep_hint;
mod stats;
mod stream;
mod windows;

use crate::{Completion, VolumeError};
use dma::Memory;
pub use drain_watch::DrainWatch;
pub use event_sources::Armed;
use event_sources::EventSources;
pub use lane::Lane;
use lane::LaneEnd;
use ring::Ring;
pub use sleep_hint::SleepHint;
pub use stats::{IoCounters, IoStats};
use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
pub use stream::{Incoming, Outgoing, RingStream, RingStreams};
pub use windows::{PinPace, PinnedWindows};

/// Maximum of [`IoOptions::capacity`], the number of outstanding requests of a ring.
pub(crate) const MAX_CAPACITY: u32 = 16384;

/// Options for creating a worker's [`Io`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoOptions {
    /// Maximum number of requests that the ring may have outstanding, at most 16384.
    pub capacity: u32,
    /// Limit in bytes for all bounce buffers. Above it, requests are processed in small pieces.
    pub bounce_bytes: usize,
    /// Whether the kernel pins memory passed to [`Pinner::pin`] (fixed buffers), which saves it
    /// from looking up pages for each request. All of the memory is then allocated and cannot be
    /// swapped out. Pages punched out of it, as by a balloon, are lost to other users while pinned,
    /// because the kernel keeps using the old pages.
    pub fixed_buffers: bool,
    /// Whether a kernel thread takes submitted entries (`IORING_SETUP_SQPOLL`). This saves the
    /// system call for submission, but occupies a processor while there is work.
    pub sqpoll: bool,
    /// Time after [`Io::end`] after which a volume that may hang (FUSE, network file systems) and
    /// has not answered is given up.
    pub stop_timeout: Duration,
}

/// Default of [`IoOptions::stop_timeout`].
const STOP_TIMEOUT: Duration = Duration::from_secs(4);

impl Default for IoOptions {
    fn default() -> Self {
        Self {
            capacity: 1024,
            bounce_bytes: 64 << 20,
            fixed_buffers: false,
            sqpoll: false,
            stop_timeout: STOP_TIMEOUT,
        }
    }
}

/// Minimum size in bytes of a memory mapping that is worth pinning.
const PIN_AT_LEAST: u64 = 1 << 20;

/// A worker's own io_uring. Created and used by one thread; volumes opened on it share it.
///
/// The ring is created when the first volume needs it, so that null and memory volumes work where
/// io_uring is forbidden.
#[derive(Debug)]
pub struct Io {
    options: IoOptions,
    ring: OnceCell<Rc<Ring>>,
    shared: Rc<RefCell<Vec<SharedObject>>>,
    others: Rc<EventSources>,
    ending: Rc<Cell<bool>>,
    /// Number of outstanding requests for which the worker should sleep instead of polling.
    sleep_hints: Rc<Cell<usize>>,
    /// Descriptions of the volumes that were given up because requests did not complete.
    given_up: Rc<RefCell<Vec<String>>>,
    stats: Arc<IoStats>,
    /// Queue that receives the completions, if this `Io` belongs to a lane.
    lane: Option<Rc<LaneEnd>>,
}

/// Object that volumes on one worker share, with its key.
pub(crate) type SharedObject = (usize, Weak<dyn Any>);

impl Io {
    /// Creates an `Io` for the calling thread.
    pub fn new(options: IoOptions) -> Self {
        Self {
            options,
            ring: OnceCell::new(),
            shared: Rc::default(),
            others: Rc::default(),
            ending: Rc::new(Cell::new(false)),
            sleep_hints: Rc::default(),
            given_up: Rc::default(),
            stats: Arc::default(),
            lane: None,
        }
    }

    /// Returns the ring, which is created on first use.
    pub(crate) fn ring(&self) -> Result<Rc<Ring>, VolumeError> {
        if let Some(ring) = self.ring.get() {
            return Ok(ring.clone());
        }
        let ring = Rc::new(Ring::new(&self.options, self.stats.clone())?);
        Ok(self.ring.get_or_init(|| ring).clone())
    }

    /// Creates the ring now, before any volume needs it, for a process that will not be able to
    /// create one later.
    ///
    /// # Errors
    /// [`VolumeError::NoIoUring`] when the kernel refuses to create a ring.
    pub fn make_ring(&self) -> Result<(), VolumeError> {
        self.ring().map(drop)
    }

    /// Returns the queue for completions of files opened on this lane; `None` when they go to the
    /// ring's poller.
    pub(crate) fn lane_end(&self) -> Option<Rc<LaneEnd>> {
        self.lane.clone()
    }

    /// Returns the objects that the volumes on this worker share with each other.
    pub(crate) fn shared(&self) -> &Rc<RefCell<Vec<SharedObject>>> {
        &self.shared
    }

    /// Returns the flag that [`Io::end`] sets when the worker ends.
    pub(crate) fn ending(&self) -> Rc<Cell<bool>> {
        self.ending.clone()
    }

    /// Returns the handle that puts connections onto the worker's ring.
    ///
    /// # Errors
    /// [`VolumeError::NoIoUring`] when the kernel refuses to create a ring.
    pub fn streams(&self) -> Result<RingStreams, VolumeError> {
        Ok(RingStreams(self.ring()?))
    }

    /// Creates the time limit for a queue of a volume that may hang when the worker ends.
    pub fn ending_watch(&self) -> DrainWatch {
        let limit = self.options.stop_timeout;
        DrainWatch::new(self.ending.clone(), limit, self.given_up.clone())
    }

    /// Returns a sleep hint for a queue with requests that threads of this machine execute.
    pub fn sleep_hint(&self) -> SleepHint {
        SleepHint::new(self.sleep_hints.clone())
    }

    /// Returns the number of requests for which their queues prefer sleep to polling
    /// ([`Io::sleep_hint`]).
    #[inline]
    pub fn sleep_hints(&self) -> usize {
        self.sleep_hints.get()
    }

    /// Begins the worker's end. Rate limits no longer apply, so that delayed requests complete
    /// soon. Volumes that may hang get [`IoOptions::stop_timeout`] to answer.
    pub fn end(&self) {
        self.ending.set(true);
    }

    /// Returns the descriptions of the volumes that did not answer in time after [`Io::end`]. Their
    /// requests were ended, and unflushed data may not be durable.
    pub fn given_up(&self) -> Vec<String> {
        self.given_up.borrow().clone()
    }

    /// Returns the maximum number of requests in flight through the ring. Further requests are
    /// refused with [`IoErrorKind::Busy`](crate::IoErrorKind::Busy), so a worker stops fetching
    /// commands at this number.
    pub fn capacity(&self) -> usize {
        self.options.capacity.clamp(1, MAX_CAPACITY) as usize
    }

    /// Returns the number of outstanding requests that were started on the ring.
    pub fn in_flight(&self) -> usize {
        self.ring.get().map_or(0, |ring| ring.in_flight())
    }

    /// Submits all requests started since the last call in one system call, or in none when there
    /// are none. The first requests for an idle device may have been submitted earlier. Returns
    /// `false` when the kernel could not accept all of them: call again before sleeping.
    pub fn flush(&self) -> bool {
        self.ring.get().is_none_or(|ring| ring.flush())
    }

    /// Calls `done` with each completion that has arrived, and returns their number. Makes a system
    /// call only when the kernel reports deferred completions. `done` may start new requests.
    pub fn poll(&self, done: &mut dyn FnMut(Completion)) -> usize {
        self.ring.get().map_or(0, |ring| ring.poll(done))
    }

    /// Returns whether [`Io::poll`] would return completions. Cheap enough to call between two
    /// rounds.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.ring.get().is_some_and(|ring| ring.has_news())
    }

    /// Returns a descriptor for `epoll` that becomes readable when completions arrive after
    /// [`Io::arm`]; `None` while no volume uses the ring. The descriptor never changes and need not
    /// be read, because [`Io::poll`] resets it.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.get().map(|ring| ring.event_fd())
    }

    /// Prepares for sleep on [`Io::event_fd`]: submits the unsent entries, and asks the kernel to
    /// signal the next completion. Returns `false` when completions have arrived already: poll
    /// again instead of sleeping. The next [`Io::poll`] disables the signal again.
    #[must_use = "going to sleep although completions wait may sleep forever"]
    pub fn arm(&self) -> bool {
        self.others.arm() && self.ring.get().is_none_or(|ring| ring.arm())
    }

    /// Adds a source of completions that do not arrive through the ring. The worker wakes up when
    /// `fd` becomes readable. [`Io::arm`] calls `arm` before each sleep until it returns
    /// [`Armed::Gone`].
    ///
    /// # Errors
    /// The system's error when the descriptor cannot be duplicated or added to the epoll set.
    pub fn watch(
        &self,
        fd: BorrowedFd<'_>,
        arm: impl FnMut() -> Armed + 'static,
    ) -> std::io::Result<()> {
        self.watcher().watch(fd, arm)
    }

    /// Returns a handle for [`Io::watch`] that can be used later without the `Io`.
    pub fn watcher(&self) -> Watcher {
        Watcher(self.others.clone())
    }

    /// Returns the epoll descriptor of all sources of [`Io::watch`], to be waited for together with
    /// [`Io::event_fd`]; `None` while there is no source. The descriptor never changes.
    pub fn others_fd(&self) -> Option<BorrowedFd<'_>> {
        self.others.fd()
    }

    /// Returns the pinner of guest memory for this worker's requests, when
    /// [`IoOptions::fixed_buffers`] is set and a volume uses the ring.
    pub fn pinner(&self) -> Option<Pinner> {
        let ring = self.ring.get().filter(|_| self.options.fixed_buffers)?;
        Some(Pinner { ring: ring.clone() })
    }

    /// Returns the number of buffers that the kernel has pinned, of up to 64 MiB each.
    pub fn pinned(&self) -> usize {
        self.ring.get().map_or(0, |ring| ring.pinned())
    }

    /// Returns the counters that other threads may read. [`Io::flush`] and [`Io::arm`] update them.
    pub fn stats(&self) -> Arc<IoStats> {
        self.stats.clone()
    }

    /// Returns the counters of this worker's requests and system calls so far.
    pub fn counters(&self) -> IoCounters {
        self.ring
            .get()
            .map(|ring| ring.counters())
            .unwrap_or_default()
    }
}

/// Handle that adds sources of completions to one worker's [`Io`].
#[derive(Clone, Debug)]
pub struct Watcher(Rc<EventSources>);

impl Watcher {
    /// Adds a source of completions, as [`Io::watch`] does.
    ///
    /// # Errors
    /// The system's error when the descriptor cannot be duplicated or added to the epoll set.
    pub fn watch(
        &self,
        fd: BorrowedFd<'_>,
        arm: impl FnMut() -> Armed + 'static,
    ) -> std::io::Result<()> {
        Ok(self.0.watch(fd, arm)?)
    }
}

/// Handle that pins guest memory for one worker's requests.
#[derive(Debug)]
pub struct Pinner {
    ring: Rc<Ring>,
}

impl Pinner {
    /// Pins `len` bytes of a memory from `offset` on, until the result is dropped. The kernel then
    /// need not look up pages for requests into it. Memory that cannot be pinned still works; the
    /// reason is logged once. Pinning takes time, because missing pages are allocated:
    /// [`PinnedWindows`] does it in pieces.
    ///
    /// Dropping the result removes the memory from the kernel's table. Outstanding requests keep
    /// their own pages pinned until they have completed.
    pub fn pin(&self, memory: &Memory, offset: u64, len: u64) -> Option<PinnedMemory> {
        let mut pinned = self.begin(memory, offset, len)?;
        loop {
            match pinned.step(usize::MAX) {
                PinStep::Allocated | PinStep::Pinned => {}
                PinStep::Done => return Some(pinned),
                PinStep::Failed => return None,
            }
        }
    }

    /// Creates the state for pinning, with nothing pinned yet. Returns `None` when the memory is
    /// too small to be worth it.
    fn begin(&self, memory: &Memory, offset: u64, len: u64) -> Option<PinnedMemory> {
        if len < PIN_AT_LEAST || !memory.is_writable() {
            return None;
        }
        let start = usize::try_from(offset).ok()?;
        Some(PinnedMemory {
            ring: self.ring.clone(),
            memory: memory.clone(),
            pinned_to: start,
            allocated_to: start,
            end: start.checked_add(usize::try_from(len).ok()?)?,
            places: Vec::new(),
        })
    }
}

/// Memory that the kernel has pinned for a worker's requests, until this is dropped; see
/// [`Pinner::pin`].
#[derive(Debug)]
#[must_use = "dropping it unpins the memory"]
pub struct PinnedMemory {
    ring: Rc<Ring>,
    memory: Memory,
    /// Offset up to which the memory is pinned, in bytes.
    pinned_to: usize,
    /// Offset up to which the pages of the memory are allocated, in bytes.
    allocated_to: usize,
    end: usize,
    places: Vec<u16>,
}

/// Result of one step of pinning guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PinStep {
    /// Pages were allocated, so that the next step can pin them.
    Allocated,
    /// A piece of the memory was pinned, and more remains.
    Pinned,
    /// The last piece of the memory was pinned.
    Done,
    /// The memory cannot be pinned, and no part of it is. The reason was logged.
    Failed,
}

impl PinnedMemory {
    /// Performs the next step: allocates at most `bytes` bytes of pages, or pins an allocated
    /// piece.
    fn step(&mut self, bytes: usize) -> PinStep {
        let end = self
            .end
            .min(self.pinned_to.saturating_add(fixed::MAX_BUFFER_LEN));
        if self.allocated_to < end {
            let len = bytes.clamp(1, end - self.allocated_to);
            // Where that fails, pinning allocates the pages, or reports its own error.
            let allocated = self.memory.populate(self.allocated_to, len).is_ok();
            self.allocated_to = if allocated {
                self.allocated_to + len
            } else {
                end
            };
            return PinStep::Allocated;
        }
        match self
            .ring
            .pin(&self.memory, self.pinned_to, end - self.pinned_to)
        {
            Ok(place) => {
                self.places.push(place);
                self.pinned_to = end;
                if end == self.end {
                    PinStep::Done
                } else {
                    PinStep::Pinned
                }
            }
            Err(error) => {
                self.ring.unpin(&std::mem::take(&mut self.places));
                self.ring.say_not_pinned(self.end - self.pinned_to, &error);
                PinStep::Failed
            }
        }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.ring.unpin(&self.places);
    }
}

#[cfg(test)]
mod tests;
