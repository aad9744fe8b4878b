//! Operation of a queue: requests are fetched, started and answered, with one interrupt per batch.

use crate::chain::Walker;
use crate::depth::ClientDepth;
use crate::disk::Disk;
use crate::eventfd::Signal;
use crate::inflight::Tracker;
use crate::log::{DirtyLog, UsedRingLog};
use crate::plain::Group;
use crate::request::{Action, NoStatus, Parsed, VolumeOperation, parse};
use crate::ring::Ring;
use crate::stats::{QueueStats, Stats};
use crate::used::UsedEntries;
use crate::virtio::BlkStatus;
use dma::{DmaMap, SegmentList};
use probes::{Failure, IoKind, TIMED_EVERY, cycles};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use volume::{Budget, Completion, IoError, IoErrorKind, Op, Request};

/// Maximum number of requests that a round starts from one queue.
const REQUESTS_PER_ROUND: usize = 64;

/// Slot for an outstanding request of a queue.
#[derive(Debug)]
struct RequestSlot {
    busy: bool,
    head: u16,
    status_at: u64,
    /// Number of bytes written for the guest on success, without the status byte.
    written: u32,
    op: Option<Op>,
    offset: u64,
    kind: IoKind,
    /// Time at which the request was fetched, in cycles; 0 if its latency is not measured.
    fetched_at: u64,
    bytes: u64,
    /// Operations of the request that are left, to be executed one after the other.
    ranges: VecDeque<VolumeOperation>,
    /// Segment list, in the slot while the request is not at the volume; kept for its capacity.
    data: SegmentList,
}

impl Default for RequestSlot {
    fn default() -> Self {
        Self {
            busy: false,
            head: 0,
            status_at: 0,
            written: 0,
            op: None,
            offset: 0,
            kind: IoKind::Other,
            fetched_at: 0,
            bytes: 0,
            ranges: VecDeque::new(),
            data: SegmentList::default(),
        }
    }
}

/// Parameters of a queue that begins to run.
pub(crate) struct RunOptions {
    pub(crate) index: u16,
    pub(crate) size: u16,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    /// Index of the first entry of the available ring to fetch.
    pub(crate) next: u16,
    /// Record of outstanding requests, if the front-end uses inflight tracking.
    pub(crate) tracker: Option<Tracker>,
}

/// State of a queue that is running.
pub(crate) struct Run {
    pub(crate) index: u16,
    size: u16,
    event_idx: bool,
    pub(crate) indirect: bool,
    /// Virtqueue in guest memory; `None` while its memory is missing, and the queue is suspended.
    pub(crate) ring: Option<Ring>,
    pub(crate) next: u16,
    pub(crate) used: UsedEntries,
    armed: bool,
    /// Whether fetching has stopped because the guest has violated the protocol.
    broken: bool,
    /// Whether fetching has stopped because the front-end stops the queue.
    stopping: bool,
    /// Whether the virtqueue has requests for which there is no room.
    full: bool,
    slots: Vec<RequestSlot>,
    free: Vec<u16>,
    /// Head indices of requests of an earlier back-end, which are started first.
    again: VecDeque<u16>,
    /// Head index and length of requests that have completed while the queue was suspended.
    held: Vec<(u16, u32)>,
    walker: Walker,
    depth: ClientDepth,
    /// Dirty log of the guest's memory, if writes to it are logged.
    log: Option<Rc<DirtyLog>>,
    /// Copies of plain requests, valid within [`Run::answer`] only.
    pub(crate) groups: Box<[Group; 2]>,
    /// Number of requests to fetch before the next one with a latency measurement.
    pub(crate) until_timed: u32,
    stats: Arc<Stats>,
}

impl Run {
    /// Begins to work on a ring. With tracking, the requests of an earlier back-end are resumed,
    /// and `next` is derived from them.
    pub(crate) fn new(options: RunOptions, ring: Ring, stats: &Arc<Stats>) -> Run {
        let used_idx = ring.used_idx();
        let is_tracked = options.tracker.is_some();
        let mut run = Run {
            index: options.index,
            size: options.size,
            event_idx: options.event_idx,
            indirect: options.indirect,
            ring: Some(ring),
            next: options.next,
            used: UsedEntries::new(used_idx, options.tracker),
            armed: true,
            broken: false,
            stopping: false,
            full: false,
            slots: Vec::new(),
            free: (0..options.size).rev().collect(),
            again: VecDeque::new(),
            held: Vec::new(),
            walker: Walker::default(),
            depth: ClientDepth::default(),
            log: None,
            groups: Box::default(),
            until_timed: 0,
            stats: stats.clone(),
        };
        run.slots
            .resize_with(usize::from(run.size), RequestSlot::default);
        if is_tracked {
            run.again = run.used.recover().into();
            // The number cannot exceed the ring size, as each request was found once.
            run.next = used_idx.wrapping_add(run.again.len() as u16);
            if !run.again.is_empty() {
                let (queue, requests) = (run.index, run.again.len());
                stats.log.line("begun again", |left_out| {
                    tracing::info!(queue, requests, left_out, "begun again")
                });
            }
            stats.resubmitted.add(run.again.len() as u64);
        }
        run
    }

    /// Returns the index of the next entry of the available ring to fetch.
    pub(crate) fn next(&self) -> u16 {
        self.next
    }

    /// Returns the number of the queue's requests that are outstanding at the volume.
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Sets the dirty log of the guest's memory, and that of the used ring. Requests that are
    /// outstanding are logged when they complete.
    pub(crate) fn set_log(&mut self, log: Option<Rc<DirtyLog>>, used: Option<UsedRingLog>) {
        self.log = log;
        self.used.set_log(used);
    }

    /// Stops using guest memory, which is not written any more.
    pub(crate) fn abandon(&mut self) {
        self.stopping = true;
        self.ring = None;
        self.used.abandon();
        self.again.clear();
    }

    /// Handles a change of guest memory: the virtqueue's new memory, or `None` if it is missing.
    pub(crate) fn set_ring(&mut self, ring: Option<Ring>, map: &DmaMap) {
        self.ring = ring;
        if self.ring.is_some() {
            for (head, len) in std::mem::take(&mut self.held) {
                self.mark_data(head, len.saturating_sub(1), map);
                self.post(head, len);
            }
        }
    }

    pub(crate) fn generation(&self) -> Option<u64> {
        self.ring.as_ref().map(Ring::generation)
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.ring.as_ref().is_some_and(Ring::is_poisoned)
    }

    /// Stops the queue for good because of an error of the guest or its memory.
    pub(crate) fn breaks(&mut self, why: &dyn std::fmt::Display) {
        if !self.broken {
            self.broken = true;
            let queue = self.index;
            self.stats.line("broken queue", |left_out| {
                tracing::warn!(queue, left_out, "the guest has broken its queue: {why}");
            });
        }
    }

    /// Returns whether the guest has made requests that were not fetched, and there is room for
    /// them.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        let idle = self.stopping || self.broken || self.full;
        let ring = self.ring.as_ref().filter(|_| !idle);
        ring.is_some_and(|ring| ring.available_idx() != self.next)
    }

    /// Fetches and starts available requests, limited by a number and the budget, so that a flood
    /// leaves other queues their turns. Returns `true` when there were some.
    pub(crate) fn fetch(
        &mut self,
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
    ) -> bool {
        self.full = false;
        if self.stopping || self.broken {
            return false;
        }
        let Some(ring) = &self.ring else {
            return false;
        };
        let available = ring.available_idx();
        if available == self.next && self.again.is_empty() {
            return false;
        }
        self.fetch_until(available, disk, map, stats, budget)
    }

    /// Fetches and starts the requests before index `available` of the available ring. Returns
    /// `true` when there were some.
    #[inline(never)]
    fn fetch_until(
        &mut self,
        available: u16,
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
    ) -> bool {
        let waiting = available.wrapping_sub(self.next);
        if waiting > self.size {
            let (next, size) = (self.next, self.size);
            self.breaks(&format_args!(
                "available index {available}, next {next}, {size} entries"
            ));
            return false;
        }
        self.quiet();
        self.depth
            .see(available.wrapping_sub(self.used.published()));
        let mut worked = false;
        let waiting = usize::from(waiting) + self.again.len();
        let mut left = waiting.min(REQUESTS_PER_ROUND);
        while left > 0 {
            if disk.is_immediate() && self.again.is_empty() {
                let counts = (left as u16, self.depth.entries_to_publish());
                let answered = match self.log.clone() {
                    None => self.answer(counts, disk, map, stats, budget),
                    Some(log) => self.answer_logged(&log, counts, disk, map, stats, budget),
                };
                worked |= answered > 0;
                left -= usize::from(answered);
                if left == 0 || budget.is_spent() {
                    break;
                }
                if answered > 0 {
                    continue;
                }
            }
            left -= 1;
            if self.free.is_empty() || !disk.has_room() {
                self.full = true;
                break;
            }
            let Some(head) = self.take_head() else {
                break;
            };
            worked = true;
            stats.requests.add(1);
            budget.spend(1 + self.begin(head, disk, map, stats));
            if budget.is_spent() {
                break;
            }
        }
        worked
    }

    /// Returns the head index of the next request, if there is one.
    fn take_head(&mut self) -> Option<u16> {
        if let Some(head) = self.again.pop_front() {
            return Some(head);
        }
        crash::point!("vhost-blk.fetch.found");
        let head = self.ring.as_ref()?.available_head(self.next);
        if head >= self.size {
            let size = self.size;
            self.breaks(&format_args!("head {head} of {size} descriptors"));
            return None;
        }
        self.next = self.next.wrapping_add(1);
        self.used.begin(head);
        Some(head)
    }

    /// Parses a request and starts it. Returns the cost of its data in budget units.
    fn begin(&mut self, head: u16, disk: &mut Disk, map: &DmaMap, stats: &QueueStats) -> u32 {
        let (Some(index), Some(ring)) = (self.free.pop(), &self.ring) else {
            return 0;
        };
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return 0;
        };
        slot.busy = true;
        slot.head = head;
        slot.op = None;
        slot.bytes = 0;
        slot.written = 0;
        slot.ranges.clear();
        slot.kind = IoKind::Other;
        slot.fetched_at = 0;
        if self.until_timed == 0 {
            self.until_timed = TIMED_EVERY;
            slot.fetched_at = cycles().max(1);
            let in_flight = self.size.saturating_sub(self.free.len() as u16);
            stats.io.depth_seen(in_flight.into());
        }
        self.until_timed -= 1;
        let mut data = std::mem::take(&mut slot.data);
        data.clear();
        let parsed = match self.walker.walk(head, ring, self.size, self.indirect, map) {
            Ok(buffers) => parse(buffers, map, &disk.limits, &mut data, &mut slot.ranges),
            Err(error) => {
                tracing::debug!(queue = self.index, head, %error, "bad chain");
                Err(NoStatus)
            }
        };
        let ranges: u64 = slot.ranges.iter().map(|work| work.len).sum();
        let bytes = data.len_bytes().saturating_add(ranges);
        let units = Budget::units_of(bytes, data.segments().len());
        slot.data = data;
        let Ok(Parsed {
            action,
            status_at,
            writable,
        }) = parsed
        else {
            // Without a status byte the failure cannot be reported.
            stats.io.failed(Failure::Invalid);
            self.free_slot(index);
            self.post(head, 0);
            return units;
        };
        slot.status_at = status_at;
        slot.kind = kind_of(&action);
        if !slot.kind.is_sampled() {
            slot.fetched_at = cycles().max(1);
        }
        match action {
            Action::Work(work) => {
                if work.op == Op::Read {
                    // The length is bounded by `max_transfer`.
                    slot.written = writable as u32;
                }
                slot.ranges.push_back(work);
                self.go_on(index, disk, map, stats);
            }
            Action::Ranges => self.go_on(index, disk, map, stats),
            Action::Id => {
                slot.written = slot.data.copy_from(0, &disk.id) as u32;
                self.finish(index, Ok(()), map, stats);
            }
            Action::End(status) => {
                let result = match status {
                    BlkStatus::Ok => Ok(()),
                    status => Err((status, Failure::Invalid)),
                };
                self.finish(index, result, map, stats);
            }
        }
        units
    }

    /// Starts the remaining operations of a request, until the volume has one or all are done.
    fn go_on(&mut self, index: u16, disk: &mut Disk, map: &DmaMap, stats: &QueueStats) {
        loop {
            let Some(slot) = self.slots.get_mut(usize::from(index)) else {
                return;
            };
            let Some(VolumeOperation { op, offset, len }) = slot.ranges.pop_front() else {
                return self.finish(index, Ok(()), map, stats);
            };
            slot.op = Some(op);
            slot.offset = offset;
            slot.bytes = len;
            let request = Request {
                tag: tag(self.index, index),
                op,
                offset,
                len,
                data: std::mem::take(&mut slot.data),
            };
            crash::point!("vhost-blk.submit.before");
            let Some(completion) = disk.submit(request) else {
                crash::point!("vhost-blk.submit.submitted");
                return;
            };
            if !self.ended(index, completion, disk, map, stats) {
                return;
            }
        }
    }

    /// Handles the completion of an operation: starts the request's next one, or ends the request.
    pub(crate) fn complete(
        &mut self,
        index: u16,
        completion: Completion,
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
    ) {
        if self.ended(index, completion, disk, map, stats) {
            self.go_on(index, disk, map, stats);
        }
    }

    /// Handles the result of an operation; ends a request that has failed. Returns whether the
    /// request continues.
    fn ended(
        &mut self,
        index: u16,
        mut completion: Completion,
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
    ) -> bool {
        let slot = self.slots.get_mut(usize::from(index));
        let Some(slot) = slot.filter(|slot| slot.busy) else {
            return false;
        };
        // Deallocation is advice, and requests of a disconnected client have no recipient: no
        // retry.
        if let (Err(error), Some(op)) = (completion.result, slot.op)
            && op != Op::Deallocate
            && self.ring.is_some()
        {
            let request = Request {
                tag: completion.tag,
                op,
                offset: slot.offset,
                len: slot.bytes,
                data: completion.data,
            };
            match disk.failed(request, error) {
                Some(failed) => completion = failed,
                None => return false,
            }
        }
        slot.data = completion.data;
        let failure = match completion.result {
            Ok(()) => {
                match slot.op {
                    Some(Op::Read) => stats.io.bytes_read().add(slot.bytes),
                    Some(Op::Write { .. }) => stats.io.bytes_written().add(slot.bytes),
                    _ => {}
                }
                return true;
            }
            Err(error) => failed(self.index, slot.op.unwrap_or(Op::Flush), error),
        };
        slot.written = 0;
        self.finish(index, Err(failure), map, stats);
        false
    }

    /// Ends a request: writes its status byte and its used entry.
    fn finish(
        &mut self,
        index: u16,
        result: Result<(), (BlkStatus, Failure)>,
        map: &DmaMap,
        stats: &QueueStats,
    ) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return;
        };
        let status = match result {
            Ok(()) => BlkStatus::Ok,
            Err((status, failure)) => {
                stats.io.failed(failure);
                status
            }
        };
        stats.io.operations(slot.kind).add(1);
        let (kind, fetched_at) = (slot.kind, slot.fetched_at);
        let (head, status_at, written) = (slot.head, slot.status_at, slot.written);
        // The request has completed: its pin on the memory is released.
        slot.data.clear();
        self.free_slot(index);
        // The memory may have been removed meanwhile; then the front-end does not wait for the
        // status.
        let _ = map.write(status_at, &[status as u8]);
        crash::point!("vhost-blk.status.written");
        if let Some(log) = &self.log {
            log.mark(status_at, 1);
            self.mark_data(head, written, map);
        }
        self.post(head, written.saturating_add(1));
        if fetched_at != 0 {
            stats.io.timed(kind, cycles().saturating_sub(fetched_at));
        }
    }

    /// Marks the `written` bytes of a request's buffers. The chain is walked again, so that
    /// requests which began before the log need no record. Without the virtqueue's memory this
    /// waits for [`Run::set_ring`].
    #[cold]
    fn mark_data(&mut self, head: u16, written: u32, map: &DmaMap) {
        let (Some(log), Some(ring)) = (&self.log, &self.ring) else {
            return;
        };
        if written == 0 {
            return;
        }
        // A guest that has changed the chain meanwhile loses its own data.
        let walked = self.walker.walk(head, ring, self.size, self.indirect, map);
        let mut left = written;
        for buffer in walked.unwrap_or_default().iter().filter(|b| b.writable) {
            let len = buffer.len.min(left);
            log.mark(buffer.addr, len.into());
            left -= len;
        }
    }

    fn free_slot(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.busy = false;
            self.free.push(index);
        }
    }

    /// Writes an entry of the used ring, which [`Run::publish`] publishes.
    fn post(&mut self, head: u16, len: u32) {
        let Some(ring) = &self.ring else {
            if !self.stopping {
                self.held.push((head, len));
            }
            return;
        };
        self.used.post(ring, head, len);
    }

    /// Publishes the completed requests, and interrupts the guest if it wants an interrupt.
    #[inline]
    pub(crate) fn publish(&mut self, call: Option<&Signal>, stats: &QueueStats) {
        if let Some(ring) = &self.ring {
            self.used.signal(ring, self.event_idx, call, stats);
        }
    }

    /// Stops asking the guest to ring while polling. With EVENT_IDX the last armed event stays
    /// behind the guest's index, which passes it only once in 65,536 requests.
    #[inline]
    fn quiet(&mut self) {
        if std::mem::take(&mut self.armed)
            && !self.event_idx
            && let Some(ring) = &self.ring
        {
            ring.set_notify(false);
            let (offset, len) = ring.notify_field(false);
            self.used.mark(offset, len);
        }
    }

    /// Asks the guest to ring for its next request. Returns `true` when one has arrived meanwhile.
    pub(crate) fn arm(&mut self, stats: &QueueStats) -> bool {
        if self.stopping || self.broken || self.full {
            // Waiting requests depend on another event.
            return false;
        }
        let Some(ring) = &self.ring else {
            return false;
        };
        if self.event_idx {
            ring.set_available_event(self.next);
        } else {
            ring.set_notify(true);
        }
        let (offset, len) = ring.notify_field(self.event_idx);
        self.used.mark(offset, len);
        self.armed = true;
        stats.arms.add(1);
        // Either the guest sees that it must ring, or its request is seen here (2.7.10).
        fence(Ordering::SeqCst);
        ring.available_idx() != self.next
    }
}

/// Returns status and failure class of an operation that has failed at the volume.
#[cold]
pub(crate) fn failed(queue: u16, op: Op, error: IoError) -> (BlkStatus, Failure) {
    tracing::debug!(queue, ?op, %error, "request failed");
    let status = match error.kind {
        IoErrorKind::Unsupported => BlkStatus::Unsupported,
        _ => BlkStatus::IoErr,
    };
    (status, error.kind.failure())
}

/// Returns the kind as which the counters count an action.
fn kind_of(action: &Action) -> IoKind {
    match action {
        Action::Work(VolumeOperation { op: Op::Read, .. }) => IoKind::Read,
        Action::Work(VolumeOperation {
            op: Op::Write { .. },
            ..
        }) => IoKind::Write,
        Action::Work(VolumeOperation { op: Op::Flush, .. }) => IoKind::Flush,
        _ => IoKind::Other,
    }
}

/// Returns the tag of a request at the volume, made of queue index and slot index.
pub(crate) const fn tag(queue: u16, slot: u16) -> u64 {
    (queue as u64) << 16 | slot as u64
}

/// Returns the queue index and the slot index of a tag.
pub(crate) const fn untag(tag: u64) -> (u16, u16) {
    ((tag >> 16) as u16, tag as u16)
}
