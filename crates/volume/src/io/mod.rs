//! A worker's own io_uring, shared by the volumes that the worker has opened.

mod burst;
mod core;
mod ending;
mod entry;
mod fixed;
mod inline;
pub(crate) mod job;
mod lane;
mod others;
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
pub use ending::Ending;
pub use lane::Lane;
use lane::LaneEnd;
pub use others::Armed;
use others::Others;
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

/// Most requests in flight that can be asked for.
pub(crate) const MAX_CAPACITY: u32 = 16384;

/// Options of a worker's [`Io`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoOptions {
    /// Most requests in flight through the ring at one time. At most 16384.
    pub capacity: u32,
    /// Most bytes held in bounce buffers before requests are cut into small pieces.
    pub bounce_bytes: usize,
    /// Memory that [`Pinner::pin`] is called with is pinned by the kernel (fixed buffers), so that
    /// requests need not look its pages up. All of it is then allocated and stays where it is.
    /// Pages that are punched out of it (by a balloon) are lost to its users while it is pinned,
    /// for the kernel still uses the old pages.
    pub fixed_buffers: bool,
    /// A thread of the kernel takes submitted entries (`IORING_SETUP_SQPOLL`): no system call to
    /// submit, for a processor that is busy while there is work.
    pub sqpoll: bool,
    /// After [`Io::end`], a volume that may hang (FUSE, a network file system) and has not answered
    /// for so long is given up.
    pub stop_timeout: Duration,
}

/// The default of [`IoOptions::stop_timeout`].
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

/// Smallest part of a memory that is worth a place in the kernel's table, in bytes.
const PIN_AT_LEAST: u64 = 1 << 20;

/// A worker's own io_uring. Made by and for one thread; volumes opened on it share it.
///
/// The ring is created when the first volume needs it, so null and memory volumes work where
/// io_uring is forbidden.
#[derive(Debug)]
pub struct Io {
    options: IoOptions,
    ring: OnceCell<Rc<Ring>>,
    shared: RefCell<Vec<Shared>>,
    others: Rc<Others>,
    ending: Rc<Cell<bool>>,
    /// Requests for which sleep is better than polling.
    sleep_hints: Rc<Cell<usize>>,
    /// Volumes that were given up.
    given_up: Rc<RefCell<Vec<String>>>,
    stats: Arc<IoStats>,
    /// Queue of the completions, for a lane.
    lane: Option<Rc<LaneEnd>>,
}

/// Something that volumes on one worker share, by their own key.
type Shared = (usize, Weak<dyn Any>);

impl Io {
    /// An `Io` for the calling thread.
    pub fn new(options: IoOptions) -> Self {
        Self {
            options,
            ring: OnceCell::new(),
            shared: RefCell::new(Vec::new()),
            others: Rc::default(),
            ending: Rc::new(Cell::new(false)),
            sleep_hints: Rc::default(),
            given_up: Rc::default(),
            stats: Arc::default(),
            lane: None,
        }
    }

    /// The ring, made when it is first asked for.
    pub(crate) fn ring(&self) -> Result<Rc<Ring>, VolumeError> {
        if let Some(ring) = self.ring.get() {
            return Ok(ring.clone());
        }
        let ring = Rc::new(Ring::new(&self.options, self.stats.clone())?);
        Ok(self.ring.get_or_init(|| ring).clone())
    }

    /// Makes the ring now, although no volume needs it yet: for a process that can make none later.
    ///
    /// # Errors
    /// [`VolumeError::NoIoUring`].
    pub fn make_ring(&self) -> Result<(), VolumeError> {
        self.ring().map(drop)
    }

    /// Returns the queue for completions of files that are opened on this lane; `None`: the ring's
    /// poller.
    pub(crate) fn lane_end(&self) -> Option<Rc<LaneEnd>> {
        self.lane.clone()
    }

    /// Returns the objects that the volumes on this worker share with each other.
    pub(crate) fn shared(&self) -> &RefCell<Vec<Shared>> {
        &self.shared
    }

    /// Returns the flag that [`Io::end`] was called.
    pub(crate) fn ending(&self) -> Rc<Cell<bool>> {
        self.ending.clone()
    }

    /// Returns the handle that puts connections onto the worker's ring.
    ///
    /// # Errors
    /// [`VolumeError::NoIoUring`].
    pub fn streams(&self) -> Result<RingStreams, VolumeError> {
        Ok(RingStreams(self.ring()?))
    }

    /// For a volume that may hang.
    pub fn ending_watch(&self) -> Ending {
        let limit = self.options.stop_timeout;
        Ending::new(self.ending.clone(), limit, self.given_up.clone())
    }

    /// Returns the hint for a queue of requests that threads of this host process.
    pub fn sleep_hint(&self) -> SleepHint {
        SleepHint::new(self.sleep_hints.clone())
    }

    /// Returns the number of requests for which their queues prefer sleep to polling
    /// ([`Io::sleep_hint`]).
    #[inline]
    pub fn sleep_hints(&self) -> usize {
        self.sleep_hints.get()
    }

    /// Begins the worker's end. Limits do not apply any more, so that requests that wait for them
    /// complete soon, and volumes that may hang are given [`IoOptions::stop_timeout`].
    pub fn end(&self) {
        self.ending.set(true);
    }

    /// Returns the descriptions of the volumes that did not answer in that time. Their requests
    /// were ended, and data that was written to them and not flushed may not be durable.
    pub fn given_up(&self) -> Vec<String> {
        self.given_up.borrow().clone()
    }

    /// Most requests that may be in flight through the ring; one more is refused as
    /// [`IoErrorKind::Busy`](crate::IoErrorKind::Busy). A worker stops taking work when it gets
    /// there.
    pub fn capacity(&self) -> usize {
        self.options.capacity.clamp(1, MAX_CAPACITY) as usize
    }

    /// Returns the number of requests that were started on the ring and are outstanding.
    pub fn in_flight(&self) -> usize {
        self.ring.get().map_or(0, |ring| ring.in_flight())
    }

    /// Ends a round: sends everything that was started since the last call to the kernel, in one
    /// system call; none when there is nothing to send. A device that had nothing to do got the
    /// first of it when it was started. `false` when the kernel could not take everything for now:
    /// call again before sleeping.
    pub fn flush(&self) -> bool {
        self.ring.get().is_none_or(|ring| ring.flush())
    }

    /// Calls `done` with each completion that has arrived, and returns their number. Makes no
    /// system call unless the kernel reports completions that wait for one. `done` may start new
    /// requests.
    pub fn poll(&self, done: &mut dyn FnMut(Completion)) -> usize {
        self.ring.get().map_or(0, |ring| ring.poll(done))
    }

    /// Returns whether [`Io::poll`] would find something: for a short look between two rounds.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.ring.get().is_some_and(|ring| ring.has_news())
    }

    /// A descriptor for `epoll`, that becomes readable when completions arrive after [`Io::arm`];
    /// `None` while no volume uses the ring. It stays the same once there is one, and needs no
    /// reading: [`Io::poll`] resets it.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.get().map(|ring| ring.event_fd())
    }

    /// Prepares a sleep on [`Io::event_fd`]: sends the unsent entries, and asks the kernel to
    /// signal the next completion. `false` when completions wait already: poll again instead of
    /// sleeping. The next [`Io::poll`] ends it, so that no signal is paid for while the worker
    /// polls.
    #[must_use = "going to sleep although completions wait may sleep forever"]
    pub fn arm(&self) -> bool {
        self.others.arm() && self.ring.get().is_none_or(|ring| ring.arm())
    }

    /// Has the worker woken for completions that do not arrive through the ring: `fd` is readable
    /// when there are some. [`Io::arm`] calls `arm` until it returns [`Armed::Gone`].
    ///
    /// # Errors
    /// No descriptor is left.
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

    /// Returns the descriptor for the sources of [`Io::watch`], to be waited for as well as
    /// [`Io::event_fd`]. `None` while there is no source; it stays the same once there is one.
    pub fn others_fd(&self) -> Option<BorrowedFd<'_>> {
        self.others.fd()
    }

    /// Returns the pinner of guest memory for this worker's requests, where
    /// [`IoOptions::fixed_buffers`] is set and a volume uses the ring.
    pub fn pinner(&self) -> Option<Pinner> {
        let ring = self.ring.get().filter(|_| self.options.fixed_buffers)?;
        Some(Pinner { ring: ring.clone() })
    }

    /// Buffers that the kernel has pinned: parts of memories, of up to 64 MiB each.
    pub fn pinned(&self) -> usize {
        self.ring.get().map_or(0, |ring| ring.pinned())
    }

    /// The counters for other threads to read; [`Io::flush`] and [`Io::arm`] bring them up to date
    /// after system calls.
    pub fn stats(&self) -> Arc<IoStats> {
        self.stats.clone()
    }

    /// Returns the counters so far.
    pub fn counters(&self) -> IoCounters {
        self.ring
            .get()
            .map(|ring| ring.counters())
            .unwrap_or_default()
    }
}

/// Takes sources of completions for one worker's [`Io`].
#[derive(Clone, Debug)]
pub struct Watcher(Rc<Others>);

impl Watcher {
    /// Adds a source of completions, as [`Io::watch`] does.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn watch(
        &self,
        fd: BorrowedFd<'_>,
        arm: impl FnMut() -> Armed + 'static,
    ) -> std::io::Result<()> {
        Ok(self.0.watch(fd, arm)?)
    }
}

/// Pins guest memory for one worker's requests.
#[derive(Debug)]
pub struct Pinner {
    ring: Rc<Ring>,
}

impl Pinner {
    /// Lets the kernel pin `len` bytes of a memory from `offset` on, for as long as the result
    /// lives. Requests into it are then spared the look-up of its pages. Memory that cannot be
    /// pinned is used without; the reason is logged once. Takes time: pages that are not there yet
    /// are allocated. [`PinnedWindows`] does it piece by piece.
    ///
    /// Dropping the result takes the memory out of the kernel's table. Requests in flight keep
    /// their own pages until they have completed: when both have happened, no page is pinned any
    /// more.
    pub fn pin(&self, memory: &Memory, offset: u64, len: u64) -> Option<PinnedMemory> {
        let mut pinned = self.begin(memory, offset, len)?;
        loop {
            match pinned.step(usize::MAX) {
                Step::Allocated | Step::Pinned => {}
                Step::Done => return Some(pinned),
                Step::Failed => return None,
            }
        }
    }

    /// Begins to pin, with nothing pinned yet. Returns `None` when it would not be worth it.
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

/// Memory that the kernel has pinned for a worker's requests, until this is dropped. See
/// [`Pinner::pin`].
#[derive(Debug)]
#[must_use = "dropping it unpins the memory"]
pub struct PinnedMemory {
    ring: Rc<Ring>,
    memory: Memory,
    /// Up to here it is pinned.
    pinned_to: usize,
    /// Up to here its pages are there.
    allocated_to: usize,
    end: usize,
    places: Vec<u16>,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A number of pages was allocated.
    Allocated,
    /// A piece was pinned; there are more.
    Pinned,
    /// The last one was.
    Done,
    /// The memory cannot be pinned, and none of it is; the reason was logged.
    Failed,
}

impl PinnedMemory {
    /// Continues: allocates at most `bytes` bytes of pages, or pins an allocated piece.
    fn step(&mut self, bytes: usize) -> Step {
        let end = self.end.min(self.pinned_to.saturating_add(fixed::LONGEST));
        if self.allocated_to < end {
            let len = bytes.clamp(1, end - self.allocated_to);
            // Where that fails, pinning allocates the pages, or reports its own error.
            let allocated = self.memory.populate(self.allocated_to, len).is_ok();
            self.allocated_to = if allocated {
                self.allocated_to + len
            } else {
                end
            };
            return Step::Allocated;
        }
        match self
            .ring
            .pin(&self.memory, self.pinned_to, end - self.pinned_to)
        {
            Ok(place) => {
                self.places.push(place);
                self.pinned_to = end;
                if end == self.end {
                    Step::Done
                } else {
                    Step::Pinned
                }
            }
            Err(error) => {
                self.ring.unpin(&std::mem::take(&mut self.places));
                self.ring.say_not_pinned(self.end - self.pinned_to, &error);
                Step::Failed
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
