//! The door: a volume, and one worker's queue into it.

use crate::{
    Completion, Extent, Info, Io, IoError, LimitHandle, Op, Request, ShareHandle, VolumeError,
};
use dma::{SegmentList, View};
use std::fmt::Debug;
use std::time::Instant;

/// A thing to do I/O on. Shared between threads; a worker that wants to do I/O opens its own queue.
pub trait Volume: Send + Sync + Debug {
    /// What the volume is and can do. Cheap enough for control paths, not for every request.
    fn info(&self) -> Info;

    /// Opens a queue for the calling thread, on that thread's `io`.
    fn open(&self, io: &Io) -> Result<Box<dyn VolumeQueue>, VolumeError>;

    /// Bytes that identify the volume: the same each time the same volume is opened, different for different ones.
    /// Default serial numbers and identifiers are made from them. For a file it is the canonical path, so that it
    /// outlives copying and restoring the file.
    fn id(&self) -> Vec<u8>;

    /// Where the volume's bytes lie, if they lie in something that can be opened a second time. `None`: nobody else can
    /// reach them, or the user answers for it.
    fn extent(&self) -> Option<Extent> {
        None
    }

    /// The volume's limits, if it has any that can be changed.
    fn limits(&self) -> Option<LimitHandle> {
        None
    }

    /// The volume's share of the device that it lies in, if it has one that can be changed.
    fn share(&self) -> Option<ShareHandle> {
        None
    }

    /// Looks again at what is behind the volume, which may have been resized. `true` when the size that
    /// [`Volume::info`] tells has changed.
    fn refresh(&self) -> Result<bool, VolumeError> {
        Ok(false)
    }
}

/// One worker's way into a volume. Belongs to the thread that opened it.
///
/// Dropping a queue cancels what can be cancelled and waits for the rest; completions of its requests that have not
/// been seen are still handed out by [`Io::poll`] (or are dropped, for volumes that complete by
/// [`VolumeQueue::poll`]).
pub trait VolumeQueue {
    /// Starts a request. `Some` when it is already done (memory, null, refused requests); otherwise its completion
    /// comes out of [`Io::poll`] or [`VolumeQueue::poll`]. [`Io::flush`] and [`VolumeQueue::push`] send what was started: a
    /// system call is done here for one request of a burst at most.
    ///
    /// Requests may be executed in any order. A flush covers the writes whose completions have been handed out.
    fn submit(&mut self, request: Request) -> Option<Completion>;

    /// [`VolumeQueue::submit`] of a read or write of all of `data`, without a request to be moved from hand to hand on the
    /// way: for those who start many.
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    /// What was started is a batch, and all of it for now. It is sent at once when the worker's ring has nothing else in
    /// flight; what is for a device at work goes with [`Io::flush`].
    fn push(&mut self) {}

    /// Whether [`VolumeQueue::try_now`] does something. Does not change.
    fn is_immediate(&self) -> bool {
        false
    }

    /// Does a read or write of all of `data` at once, where there is nothing to wait for (memory, null, files in memory).
    /// There is then no request to make, to name and to get back. `None`: not this volume, or not this request;
    /// [`VolumeQueue::submit`] takes it, and nothing has happened yet.
    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let _ = (op, offset, data);
        None
    }

    /// Whether [`VolumeQueue::notice`] does something. Does not change.
    fn wants_notice(&self) -> bool {
        false
    }

    /// A request like this comes soon, most likely the next one: what it needs may be fetched meanwhile. It is not checked
    /// yet, and may never come. No effect but speed.
    fn notice(&mut self, op: Op, offset: u64, len: u64) {
        let _ = (op, offset, len);
    }

    /// Hands out the completions that do not come through the ring; returns their number. `done` may not start new
    /// requests on this queue.
    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let _ = done;
        0
    }

    /// Requests of this queue that will complete through [`VolumeQueue::poll`]: while there are any, the worker has
    /// to keep polling, for nothing will wake it up.
    fn polled_in_flight(&self) -> usize {
        0
    }

    /// Requests of this queue that the device, the kernel or [`VolumeQueue::poll`] works on: those that were started and
    /// are not over.
    fn in_flight(&self) -> usize {
        self.polled_in_flight()
    }

    /// When [`VolumeQueue::poll`] has to be called next although nothing will wake the worker up: requests wait for their
    /// time. They are not among [`VolumeQueue::polled_in_flight`]: the worker may sleep until then.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// Tries to end the request early. Its completion still comes, with whatever became of it.
    fn cancel(&mut self, tag: u64) {
        let _ = tag;
    }
}
