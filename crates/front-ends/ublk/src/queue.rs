//! A ublk queue as a front-end of a worker: passes requests of the kernel to the volume, and
//! returns their results.

use crate::error::UblkError;
use crate::stats::{DiskStats, QueueStats};
use crate::sys::{FetchCompletion, QueueRing};
use crate::uapi::{self, IoDesc};
use dma::SegmentList;
use probes::{IoKind, TIMED_EVERY, cycles};
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;
use volume::{
    Budget, Completion, Io, IoError, IoErrorKind, Op, OpenQueue, PinPace, PinnedWindows, Request,
    Wake,
};
use worker::{Descriptors, Frontend, Interest};

/// Lower 48 bits of the tag of the final flush, which no request of the kernel uses.
const FLUSH_TAG: u64 = (1 << 48) - 1;
/// epoll token of the ring's descriptor, which is readable when the kernel has added an entry.
const TOKEN_RING: u32 = 0;

/// Numbers of a disk's queues that have ended, which the disk waits for.
#[derive(Debug, Default)]
pub(crate) struct EndedQueues {
    /// Number of queues that have ended.
    pub gone: AtomicUsize,
    /// Number of queues that have ended without an error.
    pub clean: AtomicUsize,
}

/// Guard that counts the end of a queue when it is dropped.
struct QueueEndGuard(Arc<EndedQueues>, #[allow(dead_code)] Sender<Infallible>);

impl Drop for QueueEndGuard {
    fn drop(&mut self) {
        self.0.gone.fetch_add(1, Ordering::Release);
    }
}

/// Phase of a queue from serving to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QueuePhase {
    /// The queue has requests, or may get some from the kernel.
    Serving,
    /// The kernel sends no more requests; written data is being made durable.
    Flushing,
    Ended,
}

/// Parts from which a queue is created on its worker.
pub(crate) struct QueueParts {
    pub ring: QueueRing,
    pub volume: OpenQueue,
    /// Buffers of the tags, to be pinned for the volume's requests if configured.
    pub pinned: PinnedWindows,
    pub number: u16,
    pub depth: u16,
    pub owner: u16,
    pub io: Rc<Io>,
    pub stats: Arc<DiskStats>,
    pub served: Arc<EndedQueues>,
    pub gone: Sender<Infallible>,
    pub descriptors: Descriptors,
}

/// A queue of a disk. Only the thread that created it may use it, because the kernel accepts a
/// queue's commands from one thread only.
pub struct Queue {
    /// Volume queue; dropping it waits for its requests, before their memory is freed.
    volume: OpenQueue,
    pinned: PinnedWindows,
    ring: QueueRing,
    number: u16,
    owner: u16,
    io: Rc<Io>,
    stats: Arc<DiskStats>,
    tags: Vec<Tag>,
    /// Number of tags that have a request, or may get one.
    live: usize,
    /// Number of requests that the volume is executing.
    in_flight: usize,
    end: QueuePhase,
    /// Number of requests before the next one with a latency measurement.
    until_timed: u32,
    descriptors: Descriptors,
    life: QueueEndGuard,
}

/// State of a tag, a slot for one request of the kernel.
#[derive(Default)]
struct Tag {
    op: u8,
    /// Whether the volume is executing the tag's request.
    busy: bool,
    /// Arrival time in cycles ([`cycles`]) of a request with a latency measurement, otherwise 0.
    came_at: u64,
    len: u32,
    /// Segments of the request's data; the list is reused for each request.
    data: SegmentList,
}

impl Queue {
    /// Creates a queue, and fetches the first requests from the kernel.
    pub(crate) fn new(parts: QueueParts) -> io::Result<Self> {
        let mut tags = Vec::new();
        tags.resize_with(parts.depth.into(), Tag::default);
        let mut queue = Self {
            ring: parts.ring,
            volume: parts.volume,
            pinned: parts.pinned,
            number: parts.number,
            owner: parts.owner,
            io: parts.io,
            stats: parts.stats,
            tags,
            live: usize::from(parts.depth),
            in_flight: 0,
            end: QueuePhase::Serving,
            until_timed: 0,
            descriptors: parts.descriptors,
            life: QueueEndGuard(parts.served, parts.gone),
        };
        let ring = queue.ring.fd();
        queue
            .descriptors
            .add(ring, TOKEN_RING, Interest::Readable)?;
        for tag in 0..queue.tags.len() {
            queue.ring.fetch(tag as u16)?;
        }
        queue.ring.submit()?;
        Ok(queue)
    }

    fn stats(&self) -> Option<&QueueStats> {
        self.stats.queues.get(usize::from(self.number))
    }

    /// Handles a failure of the ring: the queue ends after making written data durable, and so does
    /// its disk.
    fn fail(&mut self, error: &io::Error) {
        if self.live > 0 {
            let (disk, queue) = (self.stats.id, self.number);
            tracing::error!(disk, queue, %error, "ublk: the queue's ring failed");
            self.live = 0;
        }
    }

    /// Returns whether the ring of the volumes, which is shared, is full.
    fn is_full(&self) -> bool {
        self.io.in_flight() >= self.io.capacity()
    }

    /// Handles requests that have arrived from the kernel. Returns whether there were any.
    fn arrivals(&mut self, budget: &mut Budget) -> io::Result<bool> {
        let mut worked = false;
        while !self.is_full()
            && !budget.is_spent()
            && let Some(FetchCompletion { tag, result }) = self.ring.next()
        {
            worked = true;
            self.arrived(tag, result, budget)?;
        }
        Ok(worked)
    }

    /// Handles the end of all tags. All requests of the device have completed by then, because the
    /// kernel waits for them before it ends the tags. One queue makes their data durable.
    fn finish(&mut self) {
        if self.end != QueuePhase::Serving || self.live > 0 || self.is_full() {
            return;
        }
        if self.number != 0 {
            self.end = QueuePhase::Ended;
            return;
        }
        self.end = QueuePhase::Flushing;
        let request = Request::flush(u64::from(self.owner) << 48 | FLUSH_TAG);
        match self.volume.submit(request) {
            Some(completion) => self.flushed(&completion),
            None => self.in_flight += 1,
        }
    }

    fn flushed(&mut self, completion: &Completion) {
        self.end = QueuePhase::Ended;
        if let Err(error) = completion.result {
            let disk = self.stats.id;
            tracing::error!(disk, %error, "ublk: a flush failed: completed writes may not be durable");
        }
    }

    /// Handles the completion of a fetch command: a new request, or the end of the tag.
    fn arrived(&mut self, tag: u16, result: i32, budget: &mut Budget) -> io::Result<()> {
        budget.spend(1);
        if result != uapi::RES_OK {
            if result != -libc::ENODEV {
                let error = io::Error::from_raw_os_error(-result);
                let disk = self.stats.id;
                tracing::warn!(disk, tag, %error, "ublk: a request could not be fetched");
            }
            self.live = self.live.saturating_sub(1);
            return Ok(());
        }
        let started = match self.ring.descriptor(tag) {
            Some(descriptor) => {
                self.count_arrival(tag, descriptor.op_flags as u8);
                let bytes = u64::from(descriptor.nr_sectors) * 512;
                budget.spend(Budget::units_of(bytes, 0));
                self.start(tag, descriptor)
            }
            None => Some(Err(IoErrorKind::Invalid.into())),
        };
        match started {
            Some(result) => self.commit(tag, result),
            None => Ok(()),
        }
    }

    /// Counts a request, and begins its latency measurement if it is due.
    fn count_arrival(&mut self, tag: u16, op: u8) {
        let stats = self.stats.queues.get(usize::from(self.number));
        let (Some(slot), Some(stats)) = (self.tags.get_mut(usize::from(tag)), stats) else {
            return;
        };
        stats.requests.add(1);
        (slot.op, slot.len, slot.busy, slot.came_at) = (op, 0, true, 0);
        let sampled = self.until_timed == 0;
        if sampled {
            self.until_timed = TIMED_EVERY;
            let ended = stats.io.all_operations();
            let in_flight = stats.requests.get().wrapping_sub(ended);
            stats.io.depth_seen(in_flight);
        }
        self.until_timed -= 1;
        if sampled || !kind_of(op).is_sampled() {
            slot.came_at = cycles().max(1);
        }
    }

    /// Starts the request of a tag. Returns the result if the request has completed at once.
    fn start(&mut self, tag: u16, descriptor: IoDesc) -> Option<Result<(), IoError>> {
        let Some((operation, offset, len)) = operation(descriptor) else {
            return Some(Err(IoErrorKind::Unsupported.into()));
        };
        let slot = self.tags.get_mut(usize::from(tag))?;
        let mut request = Request {
            tag: u64::from(self.owner) << 48 | u64::from(tag),
            op: operation,
            offset,
            len,
            data: std::mem::take(&mut slot.data),
        };
        request.data.clear();
        if operation.has_data() {
            slot.len = request.len as u32;
            if !self.ring.data(tag, request.len, &mut request.data) {
                return Some(Err(IoErrorKind::Invalid.into()));
            }
        }
        let Some(completion) = self.volume.submit(request) else {
            self.in_flight += 1;
            return None;
        };
        match completion.result {
            Ok(()) => {
                slot.data = completion.data;
                Some(Ok(()))
            }
            Err(error) => {
                let failed = self.offer_again(tag, error, completion);
                self.in_flight += usize::from(failed.is_none());
                failed.map(Err)
            }
        }
    }

    /// Passes a failed request to the volume again, which may repeat it by its error policy.
    /// Returns `None` if it does, so that another completion follows.
    fn offer_again(&mut self, tag: u16, error: IoError, completion: Completion) -> Option<IoError> {
        let operation = self.ring.descriptor(tag).and_then(operation);
        let failed = match operation {
            // Deallocation is advisory, so a failure is ignored.
            None | Some((Op::Deallocate, ..)) => completion,
            Some((op, offset, len)) => {
                let request = Request {
                    tag: completion.tag,
                    op,
                    offset,
                    len,
                    data: completion.data,
                };
                self.volume.failed(request, error)?
            }
        };
        if let Some(slot) = self.tags.get_mut(usize::from(tag)) {
            slot.data = failed.data;
        }
        Some(failed.result.err().unwrap_or(error))
    }

    fn commit(&mut self, tag: u16, result: Result<(), IoError>) -> io::Result<()> {
        let slot = self.tags.get_mut(usize::from(tag));
        let stats = self.stats.queues.get(usize::from(self.number));
        let (Some(slot), Some(stats)) = (slot, stats) else {
            return Ok(());
        };
        // The list is reused, without its content.
        slot.data.clear();
        let result = match result {
            Ok(()) => {
                let bytes = u64::from(slot.len);
                match kind_of(slot.op) {
                    IoKind::Read => stats.io.bytes_read().add(bytes),
                    IoKind::Write => stats.io.bytes_written().add(bytes),
                    IoKind::Flush | IoKind::Other => {}
                }
                i32::try_from(slot.len).unwrap_or(i32::MAX)
            }
            Err(error) => {
                stats.io.failed(error.kind.failure());
                tracing::debug!(tag, op = slot.op, %error, "ublk: a request failed");
                -errno(error)
            }
        };
        let kind = kind_of(slot.op);
        if std::mem::take(&mut slot.busy) {
            stats.io.operations(kind).add(1);
        }
        let came_at = std::mem::take(&mut slot.came_at);
        self.ring.commit(tag, result)?;
        if came_at != 0 {
            stats.io.timed(kind, cycles().saturating_sub(came_at));
        }
        Ok(())
    }
}

/// Returns operation, offset and length in bytes of a request. `None` if it is unknown or out of
/// range.
fn operation(descriptor: IoDesc) -> Option<(Op, u64, u64)> {
    let has = |flag| descriptor.op_flags & flag != 0;
    let fua = has(uapi::IO_F_FUA);
    let op = match descriptor.op_flags as u8 {
        uapi::OP_READ => Op::Read,
        uapi::OP_WRITE => Op::Write { fua },
        uapi::OP_FLUSH => return Some((Op::Flush, 0, 0)),
        uapi::OP_DISCARD => Op::Deallocate,
        uapi::OP_WRITE_ZEROES => Op::WriteZeroes {
            deallocate: !has(uapi::IO_F_NOUNMAP),
            fua,
        },
        _ => return None,
    };
    let offset = descriptor.start_sector.checked_mul(512)?;
    Some((op, offset, u64::from(descriptor.nr_sectors) * 512))
}

/// Returns the kind as which the counters count a ublk operation.
fn kind_of(op: u8) -> IoKind {
    match op {
        uapi::OP_READ => IoKind::Read,
        uapi::OP_WRITE => IoKind::Write,
        uapi::OP_FLUSH => IoKind::Flush,
        _ => IoKind::Other,
    }
}

impl Frontend for Queue {
    type Error = UblkError;

    #[inline]
    fn poll(&mut self, _now: Instant, budget: &mut Budget) -> bool {
        let worked = match self.arrivals(budget) {
            Ok(worked) => worked,
            Err(error) => {
                self.fail(&error);
                true
            }
        };
        self.finish();
        worked
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if completion.tag & FLUSH_TAG == FLUSH_TAG {
            return self.flushed(&completion);
        }
        let tag = completion.tag as u16;
        let result = match completion.result {
            Ok(()) => {
                if let Some(slot) = self.tags.get_mut(usize::from(tag)) {
                    slot.data = completion.data;
                }
                Ok(())
            }
            Err(error) => match self.offer_again(tag, error, completion) {
                Some(error) => Err(error),
                None => {
                    self.in_flight += 1;
                    return;
                }
            },
        };
        if let Err(error) = self.commit(tag, result) {
            self.fail(&error);
        }
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.volume.poll(&mut |completion| out.push(completion));
    }

    fn update_volumes(&mut self) {
        self.volume.update();
    }

    /// Submits even without entries: the kernel may have requests that it delivers only in a call.
    #[inline]
    fn finish_round(&mut self) -> bool {
        if let Err(error) = self.ring.submit() {
            self.fail(&error);
        }
        false
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.volume.state().wake == Wake::Poll
    }

    /// Returns whether polling on may spare a wake-up, because requests arrive through shared
    /// memory.
    #[inline]
    fn keeps_window(&self) -> bool {
        self.end != QueuePhase::Ended
    }

    /// The ring is always armed: its descriptor is readable while it has entries.
    fn arm(&mut self) -> bool {
        if let Some(stats) = self.stats() {
            stats.sleeps.add(1);
        }
        self.ring.has_arrivals()
    }

    fn deadline(&self) -> Option<Instant> {
        self.volume.state().wake.deadline(Instant::now)
    }

    fn is_pinning(&self) -> bool {
        self.pinned.is_pinning()
    }

    fn pin(&mut self, pace: &mut PinPace) {
        pace.step(&mut self.pinned);
    }

    /// Does nothing: the disk makes the kernel end all tags, and then all data is made durable.
    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        self.end == QueuePhase::Ended && self.in_flight == 0
    }

    fn close(&mut self) -> Result<(), UblkError> {
        self.life.0.clean.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.is_drained()
    }
}

/// Converts an error to one of the few that the block layer distinguishes (`blk_errors` in
/// `block/blk-core.c`).
fn errno(error: IoError) -> i32 {
    match error.kind {
        IoErrorKind::NoSpace => libc::ENOSPC,
        IoErrorKind::Unsupported => libc::EOPNOTSUPP,
        IoErrorKind::Busy => libc::EAGAIN,
        IoErrorKind::MediaRead => libc::ENODATA,
        IoErrorKind::Unreachable => libc::ENOLINK,
        _ => libc::EIO,
    }
}
