//! A worker's ring, as the queues on it use it.

use super::core::{ReapedCompletion, RingCore};
use super::job::Abilities;
use super::lane::LaneEnd;
use super::setup::{self, Mode};
use super::stream::{Incoming, Outgoing};
use super::{IoCounters, IoStats};
use crate::file::FileDescription;
use crate::{Completion, IoOptions, Op, Request, VolumeError};
use dma::{Memory, Segment, SegmentList};
use io_uring::IoUring;
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// File and its properties, as a worker's ring needs them.
#[derive(Debug)]
pub(crate) struct RingFile {
    /// The open file, kept open while the ring uses it.
    pub(crate) fd: Arc<FileDescription>,
    /// Alignment that direct I/O requires, or `None` for buffered I/O.
    pub(crate) direct: Option<Alignment>,
    /// Features that the file supports.
    pub(crate) abilities: Arc<Abilities>,
    /// Lane that receives the file's completions; `None` for the ring's poller.
    pub(crate) lane: Option<Rc<LaneEnd>>,
}

/// Alignment that direct I/O requires; both are powers of two, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Alignment of memory addresses in bytes.
    pub(crate) memory: u32,
    /// Alignment of offsets and lengths in bytes.
    pub(crate) block: u32,
}

impl RingFile {
    /// Returns whether the kernel can use this memory segment directly.
    #[inline(always)]
    pub(super) fn takes(&self, piece: &Segment) -> bool {
        let Some(Alignment { memory, block }) = self.direct else {
            return true;
        };
        let (memory, block) = (memory as usize - 1, block as usize - 1);
        piece.as_ptr().addr() & memory == 0 && piece.len() & block == 0
    }

    /// Returns whether the kernel can use the request's memory directly, without a bounce buffer.
    pub(super) fn reaches(&self, request: &Request) -> bool {
        let segments = request.data.segments();
        segments.iter().all(|segment| self.takes(segment))
    }

    /// Returns the unit in bytes of which offsets and lengths must be multiples.
    pub(super) fn unit(&self) -> u64 {
        self.direct
            .map_or(1, |alignment| u64::from(alignment.block.max(1)))
    }
}

/// A worker's ring, shared by all queues on it through interior mutability. Borrows end inside this
/// module and never last while a caller's code runs.
pub(crate) struct Ring {
    core: RefCell<RingCore>,
    event: OwnedFd,
    /// Whether the kernel was asked to signal `event` at the next completion.
    armed: Cell<bool>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("event", &self.event)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Creates an io_uring for the calling thread.
    pub(crate) fn new(options: &IoOptions, stats: Arc<IoStats>) -> Result<Self, VolumeError> {
        let entries = options.capacity.clamp(1, super::MAX_CAPACITY);
        let (uring, mode) = setup::ring(entries, options.sqpoll)?;
        Self::with(uring, mode, options, stats)
    }

    /// Creates the ring's state around an existing kernel ring.
    pub(super) fn with(
        uring: IoUring,
        mode: Mode,
        options: &IoOptions,
        stats: Arc<IoStats>,
    ) -> Result<Self, VolumeError> {
        let event = event(&uring).map_err(|source| VolumeError::NoIoUring {
            why: "no event descriptor for it",
            source,
        })?;
        let mut core = RingCore::new(uring, mode, options, stats);
        core.signal(false);
        Ok(Self {
            core: RefCell::new(core),
            event,
            armed: Cell::new(false),
        })
    }

    /// Adds a file to the ring. Returns the index that names the file in later calls.
    pub(crate) fn open(&self, file: RingFile) -> usize {
        self.core.borrow_mut().register(file)
    }

    /// Stops trusting the files of this ring not to block; calls [`RingCore::distrust`].
    #[cfg(test)]
    pub(super) fn distrust(&self) {
        self.core.borrow_mut().distrust();
    }

    /// Borrows the core of the ring, for tests that simulate results of the kernel.
    #[cfg(test)]
    pub(super) fn core(&self) -> std::cell::RefMut<'_, RingCore> {
        self.core.borrow_mut()
    }

    /// Removes a file: cancels its requests, waits until the kernel has completed them, and keeps
    /// their completions for the next [`Ring::poll`].
    pub(crate) fn close(&self, file: usize) {
        let core = &mut *self.core.borrow_mut();
        core.finish(Some(file));
        core.unregister(file);
        core.tell();
    }

    /// Starts a request for a file. Returns its completion when it cannot be started.
    pub(crate) fn submit(&self, file: usize, request: Request) -> Option<Completion> {
        let core = &mut *self.core.borrow_mut();
        let refused = core.begin(file, request);
        core.start_burst();
        refused
    }

    /// Starts a read or write of all of `data`. Returns its completion when it cannot be started.
    #[inline]
    pub(crate) fn transfer(
        &self,
        file: usize,
        tag: u64,
        op: Op,
        offset: u64,
        data: SegmentList,
    ) -> Option<Completion> {
        let core = &mut *self.core.borrow_mut();
        let refused = core.begin_transfer(file, tag, op, offset, data);
        core.start_burst();
        refused
    }

    /// Submits the started requests if no other request is in flight.
    #[inline]
    pub(crate) fn push(&self) {
        self.core.borrow_mut().push_idle();
    }

    /// Asks the kernel to cancel the request of `file` with this tag.
    pub(crate) fn cancel(&self, file: usize, tag: u64) {
        self.core.borrow_mut().cancel_tag(file, tag);
    }

    /// Pins `len` bytes of a memory as a fixed buffer. Returns the index for [`Ring::unpin`].
    pub(crate) fn pin(&self, memory: &Memory, offset: usize, len: usize) -> std::io::Result<u16> {
        self.core.borrow_mut().pin(memory, offset, len)
    }

    /// Logs once why memory could not be pinned.
    pub(crate) fn say_not_pinned(&self, len: usize, error: &std::io::Error) {
        self.core.borrow_mut().say_not_pinned(len, error);
    }

    /// Unpins the fixed buffers at these indices of the kernel's table.
    pub(crate) fn unpin(&self, places: &[u16]) {
        self.core.borrow_mut().unpin(places);
    }

    /// Returns the number of buffers that the kernel has pinned.
    pub(crate) fn pinned(&self) -> usize {
        self.core.borrow().pinned()
    }

    /// Returns the number of outstanding requests of the ring.
    pub(crate) fn in_flight(&self) -> usize {
        self.core.borrow().in_flight()
    }

    /// Returns the number of requests for one file that the kernel is executing.
    pub(crate) fn in_flight_of(&self, file: usize) -> usize {
        self.core.borrow().in_flight_of(file)
    }

    /// Submits the started requests. Returns whether the kernel has accepted all of them.
    #[inline]
    pub(crate) fn flush(&self) -> bool {
        let core = &mut *self.core.borrow_mut();
        core.end_burst();
        let all = core.send();
        core.tell();
        all
    }

    /// Calls `done` with each completion that has arrived.
    #[inline]
    pub(crate) fn poll(&self, done: &mut dyn FnMut(Completion)) -> usize {
        if self.armed.take() {
            self.core.borrow_mut().signal(false);
            self.drain();
        }
        if self.is_quiet() {
            return 0;
        }
        self.return_arrived(done)
    }

    /// Returns whether completions are available, or a system call is due for outstanding requests.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        !self.core.borrow_mut().is_quiet()
    }

    /// Tries to receive from the sockets that are polled. Returns whether nothing is available.
    #[inline]
    fn is_quiet(&self) -> bool {
        let core = &mut *self.core.borrow_mut();
        if core.has_tried_streams() {
            core.try_streams();
        }
        core.is_quiet()
    }

    fn return_arrived(&self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut asked = false;
        let mut count = 0;
        // `done` may start requests that are finished before this loop is: a bound keeps it from
        // going on for ever.
        let limit = self.core.borrow().capacity();
        while count < limit {
            // The borrow ends with the statement: `done` may come back here by `submit`.
            let next = self.core.borrow_mut().reap();
            match next {
                Some(ReapedCompletion::Plain { tag, data }) => {
                    count += 1;
                    done(Completion {
                        tag,
                        result: Ok(()),
                        data,
                    });
                }
                Some(ReapedCompletion::Other(completion)) => {
                    count += 1;
                    done(completion);
                }
                // Completions that the kernel holds back while there is enough to do are posted by
                // the next batch's call.
                None if count == 0 && !asked && self.core.borrow_mut().kernel_has_work() => {
                    asked = true;
                    self.core.borrow_mut().enter_for(true);
                }
                None => break,
            }
        }
        self.core.borrow_mut().send_urgent();
        count
    }

    /// Asks for a signal at the next completion before the worker sleeps; see [`crate::Io::arm`].
    pub(crate) fn arm(&self) -> bool {
        let core = &mut *self.core.borrow_mut();
        if !core.leave_streams_to_ring() || !core.send() || core.has_arrivals() {
            return false;
        }
        if core.always_signals() {
            self.drain();
        }
        self.armed.set(true);
        core.signal(true);
        // The kernel queues the work and then looks whether to signal; this side asks for the
        // signal and then looks for work. With a full fence on both sides, one of them sees the
        // other.
        fence(Ordering::SeqCst);
        let idle = core.is_idle();
        if !idle {
            core.run_deferred();
        }
        // Other threads may read them for as long as the worker sleeps.
        core.tell();
        idle || (!core.kernel_has_work() && !core.has_arrivals())
    }

    /// Adds a network connection to the ring; see [`RingCore::open_stream`].
    pub(super) fn open_stream(&self, fd: OwnedFd) -> usize {
        self.core.borrow_mut().open_stream(fd)
    }

    /// Starts to send on a connection; see [`RingCore::stream_send`].
    pub(super) fn stream_send(&self, stream: usize, outgoing: Outgoing) -> Result<(), Outgoing> {
        self.core.borrow_mut().stream_send(stream, outgoing)
    }

    /// Returns a completed send of a connection; see [`RingCore::stream_sent`].
    pub(super) fn stream_sent(&self, stream: usize) -> Option<(Outgoing, io::Result<u64>)> {
        self.core.borrow_mut().stream_sent(stream)
    }

    /// Starts to receive on a connection; see [`RingCore::stream_receive`].
    pub(super) fn stream_receive(&self, stream: usize, incoming: Incoming) -> Result<(), Incoming> {
        self.core.borrow_mut().stream_receive(stream, incoming)
    }

    /// Cancels the receive of a connection; see [`RingCore::stream_cancel`].
    pub(super) fn stream_cancel(&self, stream: usize) {
        self.core.borrow_mut().stream_cancel(stream);
    }

    /// Returns a completed receive of a connection; see [`RingCore::stream_received`].
    pub(super) fn stream_received(&self, stream: usize) -> Option<(Incoming, io::Result<u64>)> {
        self.core.borrow_mut().stream_received(stream)
    }

    /// Returns whether a send or receive has ended; see [`RingCore::stream_has_news`].
    pub(super) fn stream_has_news(&self, stream: usize) -> bool {
        self.core.borrow().stream_has_news(stream)
    }

    /// Shuts a connection down; see [`RingCore::stream_shut_down`].
    pub(super) fn stream_shut_down(&self, stream: usize, how: rustix::net::Shutdown) {
        self.core.borrow_mut().stream_shut_down(stream, how);
    }

    /// Closes a connection; see [`RingCore::close_stream`].
    pub(super) fn close_stream(&self, stream: usize) {
        self.core.borrow_mut().close_stream(stream);
    }

    /// Returns the eventfd that a sleeping worker waits for.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Lets the kernel execute the requests of all files within the system call, for tests.
    #[cfg(test)]
    pub(super) fn trust(&self) {
        self.core.borrow_mut().trust();
    }

    /// Returns whether completions can be read without a system call.
    #[cfg(test)]
    pub(super) fn has_arrivals(&self) -> bool {
        self.core.borrow_mut().has_arrivals()
    }

    /// Makes one `io_uring_enter` call, which submits entries and runs deferred completions.
    #[cfg(test)]
    pub(super) fn enter(&self) {
        self.core.borrow_mut().enter();
    }

    /// Returns the ring's counters of requests and system calls.
    pub(crate) fn counters(&self) -> IoCounters {
        self.core.borrow().counters()
    }

    fn drain(&self) {
        // An empty counter is the usual case and no error.
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
    }
}

/// Creates the eventfd that the kernel signals at completions.
fn event(uring: &IoUring) -> io::Result<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    uring.submitter().register_eventfd(event.as_raw_fd())?;
    Ok(event)
}
