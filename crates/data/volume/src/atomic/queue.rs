//! A worker's queue into an [`AtomicVolume`](super::AtomicVolume).
//!
//! ```text
//! request -> waits for the journal to be read, for its units, for a slot
//!         -> all but a write that is promised: the volume below -> done
//!         -> a write that is promised: journal -> in place -> end of the entry -> done
//! ```

use super::journal::{HEAD, JournalEntry, SLOTS, slot_at, slot_len};
use super::locks::Hold;
use super::volume::{AtomicState, Orphan, PendingWrite, Recovery};
use crate::{
    AtomicWrites, Completion, Io, IoError, IoErrorKind, Lane, Op, OpenQueue, QueueState, Request,
    VolumeError, VolumeQueue, Wake,
};
use dma::{Buffer, SegmentList};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which a waiting request retries to lock its write units.
const RETRY_INTERVAL: Duration = Duration::from_micros(50);
const DURABLE: Op = Op::Write { fua: true };

/// Step of a job in an [`AtomicVolume`](super::AtomicVolume)'s queue: the operation that is
/// outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AtomicStep {
    /// The request itself, submitted to the lower volume without the journal.
    Plain,
    /// Write of the data and its description to the journal.
    Journal,
    /// Write of the data to its final place in the volume.
    InPlace,
    /// Removal of the entry from the journal after the data is in place.
    Retire,
    /// Read of a journal slot during recovery, to find out whether it holds an entry.
    Look,
}

/// Returns a write as its slot of the journal stores it: head and data.
fn entry_of(offset: u64, data: &[u8]) -> SegmentList {
    let mut buffer = Buffer::new((HEAD + (data.len() as u64).next_multiple_of(HEAD)) as usize);
    let head = JournalEntry::new(offset, data).to_bytes();
    for (to, from) in buffer.iter_mut().zip(head) {
        *to = from;
    }
    let rest = buffer.get_mut(HEAD as usize..).unwrap_or_default();
    for (to, from) in rest.iter_mut().zip(data) {
        *to = *from;
    }
    SegmentList::owned(buffer)
}

struct Job {
    step: AtomicStep,
    /// Caller's tag for the request; `None`: a job of this queue's own, such as recovery.
    tag: Option<u64>,
    offset: u64,
    /// Data segments of the request, which the completion returns to the caller.
    data: SegmentList,
    /// Memory with the head and the data of a journaled write, as its slot stores them.
    entry: SegmentList,
    /// Number of data bytes in `entry`, without the head.
    len: u64,
    slot: u32,
    hold: Hold,
    result: Result<(), IoError>,
    /// Request that begins when this pending write is done, or fails with it.
    follow: Option<Box<Request>>,
}

struct WaitingRequest {
    request: Request,
    hold: Hold,
    /// Pending write that has to be done first, and whose unit `hold` is for: offset and length.
    settles: Option<(u64, u64)>,
}

pub(super) struct AtomicQueue {
    shared: Arc<AtomicState>,
    /// Queue into the volume below. The queues are dropped before the lane, because dropping them
    /// completes outstanding requests.
    volume: Option<OpenQueue>,
    journal: Option<OpenQueue>,
    lane: Lane,
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
    waiting: Vec<WaitingRequest>,
    /// Completions that the next poll returns to the caller.
    ended: Vec<Completion>,
    /// Completions of the lower volume and the journal that are not processed yet.
    arrived: Vec<Completion>,
    /// Indices of jobs that have to retry their step because the ring had no room.
    again: Vec<usize>,
    /// Journal slot that this queue reads next during recovery; `None` if it does no recovery.
    reading: Option<u32>,
}

impl AtomicQueue {
    pub(super) fn new(shared: Arc<AtomicState>, io: &Io) -> Result<Self, VolumeError> {
        let lane = io.lane()?;
        Ok(Self {
            volume: Some(shared.volume.open(lane.io())?),
            journal: Some(shared.journal.open(lane.io())?),
            shared,
            lane,
            jobs: Vec::new(),
            free: Vec::new(),
            waiting: Vec::new(),
            ended: Vec::new(),
            arrived: Vec::new(),
            again: Vec::new(),
            reading: None,
        })
    }

    fn in_flight(&self) -> usize {
        self.jobs.len() - self.free.len()
    }

    /// Returns whether a request is a write that the volume promises to be atomic.
    fn is_promised(&self, request: &Request) -> bool {
        let promise = AtomicWrites::within(self.shared.unit.into(), 0, 0);
        matches!(request.op, Op::Write { .. }) && promise.covers(request.offset, request.len)
    }

    /// Returns the stripes that a request has to lock, and whether exclusively or shared.
    fn hold(&self, request: &Request) -> Hold {
        match request.op {
            Op::Flush => Hold::NOTHING,
            _ => {
                let owned = self.is_promised(request);
                self.shared.locks.hold(request.offset, request.len, owned)
            }
        }
    }

    /// Starts a request when its units and a journal slot are available; otherwise returns it.
    fn begin(&mut self, waiting: WaitingRequest) -> Result<(), WaitingRequest> {
        let WaitingRequest {
            request,
            mut hold,
            settles,
        } = waiting;
        let shared = self.shared.clone();
        if !shared.is_recovered() {
            if shared.has_failed() {
                self.refuse(request, hold, IoErrorKind::MediaRead);
                return Ok(());
            }
            return Err(WaitingRequest {
                request,
                hold,
                settles,
            });
        }
        if !shared.locks.take(&mut hold) {
            return Err(WaitingRequest {
                request,
                hold,
                settles,
            });
        }
        // Checked only with the units held: a request that broke the volume did so before it
        // released them.
        if request.op.changes() && request.op != Op::Flush && shared.is_broken() {
            self.refuse(request, hold, IoErrorKind::MediaWrite);
            return Ok(());
        }
        if let Some((offset, _)) = settles {
            self.settle(request, hold, offset);
            return Ok(());
        }
        let (offset, len) = (request.offset, request.len);
        if request.op.changes()
            && let Some(range) = shared.pending_in(offset, len)
        {
            return Err(self.wait_for(range, request, hold));
        }
        if !self.is_promised(&request) || shared.below.covers(offset, len) {
            self.start_plain(request, hold);
            return Ok(());
        }
        // A write that the volume would refuse must not enter the journal.
        if let Err(error) = request.check_info(&shared.volume.info()) {
            shared.locks.release(hold);
            self.ended.push(request.complete(Err(error)));
            return Ok(());
        }
        let Some(slot) = shared.take_slot() else {
            return Err(match shared.pending_in_full_journal() {
                Some(range) => self.wait_for(range, request, hold),
                None => WaitingRequest {
                    request,
                    hold,
                    settles: None,
                },
            });
        };
        let mut buffer = Buffer::new((HEAD + len.next_multiple_of(HEAD)) as usize);
        let data = buffer.get_mut(HEAD as usize..);
        let data = data.and_then(|data| data.get_mut(..len as usize));
        let entry = data.and_then(|data| {
            let whole = request.data.copy_to(0, data) as u64 == len;
            whole.then(|| JournalEntry::new(offset, data))
        });
        let Some(entry) = entry else {
            shared.free_slot(slot);
            self.refuse(request, hold, IoErrorKind::Memory);
            return Ok(());
        };
        for (to, from) in buffer.iter_mut().zip(entry.to_bytes()) {
            *to = from;
        }
        self.start(Job {
            step: AtomicStep::Journal,
            tag: Some(request.tag),
            offset,
            data: request.data,
            entry: SegmentList::owned(buffer),
            len,
            slot,
            hold,
            result: Ok(()),
            follow: None,
        });
        Ok(())
    }

    /// Gives a request's units back, so that it waits for the unit of a pending write instead.
    fn wait_for(&self, range: (u64, u64), request: Request, hold: Hold) -> WaitingRequest {
        let locks = &self.shared.locks;
        locks.release(hold);
        WaitingRequest {
            request,
            hold: locks.hold(range.0, range.1, true),
            settles: Some(range),
        }
    }

    /// Repeats the pending write at `offset`, whose unit is held, and then begins a request. If
    /// another queue has repeated the write meanwhile, the request begins at once.
    fn settle(&mut self, request: Request, hold: Hold, offset: u64) {
        let Some(write) = self.shared.take_pending(offset) else {
            self.shared.locks.release(hold);
            return self.wait(request);
        };
        self.start(Job {
            step: AtomicStep::InPlace,
            tag: None,
            offset,
            data: SegmentList::new(),
            entry: entry_of(offset, &write.data),
            len: write.data.len() as u64,
            slot: write.slot,
            hold,
            result: Ok(()),
            follow: Some(Box::new(request)),
        });
    }

    /// Lets a request begin at the next poll.
    fn wait(&mut self, request: Request) {
        let hold = self.hold(&request);
        self.waiting.push(WaitingRequest {
            request,
            hold,
            settles: None,
        });
    }

    fn refuse(&mut self, request: Request, hold: Hold, kind: IoErrorKind) {
        self.shared.locks.release(hold);
        self.ended.push(request.complete(Err(kind.into())));
    }

    fn place(&mut self, job: Job) -> usize {
        match self.free.pop() {
            Some(index) => {
                if let Some(place) = self.jobs.get_mut(index) {
                    *place = Some(job);
                }
                index
            }
            None => {
                self.jobs.push(Some(job));
                self.jobs.len() - 1
            }
        }
    }

    fn start_plain(&mut self, mut request: Request, hold: Hold) {
        let index = self.place(Job {
            step: AtomicStep::Plain,
            tag: Some(request.tag),
            offset: request.offset,
            data: SegmentList::new(),
            entry: SegmentList::new(),
            len: request.len,
            slot: 0,
            hold,
            result: Ok(()),
            follow: None,
        });
        request.tag = index as u64;
        let at_once = match &mut self.volume {
            Some(volume) => volume.submit(request),
            None => Some(request.complete(Err(IoErrorKind::Gone.into()))),
        };
        self.arrived.extend(at_once);
    }

    fn start(&mut self, job: Job) {
        let index = self.place(job);
        self.step(index);
    }

    /// Submits the operation that a job's current step requires.
    fn step(&mut self, index: usize) {
        let unit = self.shared.unit;
        let Some(job) = self.jobs.get(index).and_then(Option::as_ref) else {
            return;
        };
        let (tag, at) = (index as u64, slot_at(unit, job.slot));
        let mut part = SegmentList::new();
        let (queue, request) = match job.step {
            AtomicStep::Plain => return,
            AtomicStep::Journal => {
                job.entry.slice(0, job.entry.len_bytes(), &mut part);
                (&mut self.journal, Request::transfer(tag, DURABLE, at, part))
            }
            AtomicStep::InPlace => {
                job.entry.slice(HEAD, job.len, &mut part);
                let request = Request::transfer(tag, DURABLE, job.offset, part);
                (&mut self.volume, request)
            }
            AtomicStep::Retire => {
                let zeroes = SegmentList::owned(Buffer::new(HEAD as usize));
                (
                    &mut self.journal,
                    Request::transfer(tag, DURABLE, at, zeroes),
                )
            }
            AtomicStep::Look => {
                let all = SegmentList::owned(Buffer::new(slot_len(unit) as usize));
                (&mut self.journal, Request::transfer(tag, Op::Read, at, all))
            }
        };
        let at_once = match queue {
            Some(queue) => queue.submit(request),
            None => Some(request.complete(Err(IoErrorKind::Gone.into()))),
        };
        self.arrived.extend(at_once);
    }

    /// Moves a job to its next step after an operation has completed.
    fn advance(&mut self, done: Completion) {
        let index = done.tag as usize;
        let Some(job) = self.jobs.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        match (job.step, done.result) {
            (AtomicStep::Plain, result) => {
                // The range of a change contains no pending write.
                self.shared.add_pending(job.offset, &done.data);
                (job.data, job.result) = (done.data, result);
                self.end(index);
            }
            (_, Err(error)) if error.kind == IoErrorKind::Busy => self.again.push(index),
            (AtomicStep::Journal, Ok(())) => {
                job.step = AtomicStep::InPlace;
                self.step(index);
            }
            (AtomicStep::Journal, Err(error)) => {
                // The entry may be in the journal all the same: it is ended before anything else is
                // done.
                (job.step, job.result) = (AtomicStep::Retire, Err(error));
                self.step(index);
            }
            (AtomicStep::InPlace, Ok(())) => {
                job.step = AtomicStep::Retire;
                self.step(index);
            }
            (AtomicStep::Retire, Ok(())) => {
                let slot = job.slot;
                // The slot of an entry that was found when the journal was read has never been
                // taken.
                self.shared.free_slot(slot);
                self.end(index);
                self.read_on(slot);
            }
            (AtomicStep::InPlace, Err(mut error)) => {
                if error.errno == Errno::NOSPC.raw_os_error() {
                    // The write was a durable one, whose pages the kernel may forget. The journal
                    // has its data, so that repeating it is safe.
                    error.kind = IoErrorKind::NoSpace;
                }
                job.result = Err(error);
                let slot = job.slot;
                let mut data = vec![0; job.len as usize];
                job.entry.copy_to(HEAD, &mut data);
                let offset = job.offset;
                let write = PendingWrite { slot, offset, data };
                self.shared.postpone(write, error);
                self.end(index);
                self.read_on(slot);
            }
            (AtomicStep::Retire, Err(error)) => {
                job.result = Err(error);
                self.give_up(index, "an entry of the journal cannot be ended", error);
            }
            (AtomicStep::Look, Ok(())) => self.looked(index, &done.data),
            (AtomicStep::Look, Err(error)) => {
                self.give_up(index, "the journal cannot be read", error);
            }
        }
    }

    /// Ends a job that failed. Its journal slot is kept, for the recovery by a later opening.
    fn give_up(&mut self, index: usize, what: &str, error: IoError) {
        self.shared.breaks(what, error);
        if self.reading.take().is_some() {
            self.shared.set_recovery(Recovery::Failed);
        }
        self.end(index);
    }

    fn end(&mut self, index: usize) {
        let Some(job) = self.jobs.get_mut(index).and_then(Option::take) else {
            return;
        };
        self.free.push(index);
        self.shared.locks.release(job.hold);
        if let Some(tag) = job.tag {
            self.ended.push(Completion {
                tag,
                result: job.result,
                data: job.data,
            });
        }
        match (job.follow, job.result) {
            (None, _) => {}
            (Some(request), Ok(())) => self.wait(*request),
            (Some(request), Err(error)) => self.ended.push(request.complete(Err(error))),
        }
    }

    /// Processes a journal slot that recovery has read, or ends the recovery after the last one.
    fn look(&mut self, slot: u32) {
        if slot == SLOTS {
            self.reading = None;
            self.shared.set_recovery(Recovery::Done);
            return;
        }
        self.reading = Some(slot);
        self.start(Job {
            step: AtomicStep::Look,
            tag: None,
            offset: 0,
            data: SegmentList::new(),
            entry: SegmentList::new(),
            len: 0,
            slot,
            hold: Hold::NOTHING,
            result: Ok(()),
            follow: None,
        });
    }

    /// Starts to read the journal slot after `slot` for recovery.
    fn read_on(&mut self, slot: u32) {
        if self.reading == Some(slot) {
            self.look(slot + 1);
        }
    }

    fn looked(&mut self, index: usize, found: &SegmentList) {
        let Some(job) = self.jobs.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        let mut bytes = vec![0; found.len_bytes() as usize];
        found.copy_to(0, &mut bytes);
        match JournalEntry::of_slot(&bytes, self.shared.unit) {
            Some(entry) => {
                tracing::info!(
                    "{}: a write of {} bytes at {} is repeated from the journal",
                    self.shared.volume.info().description,
                    entry.len,
                    entry.offset
                );
                (job.offset, job.len) = (entry.offset, entry.len.into());
                job.entry = SegmentList::owned(Buffer::from_slice(&bytes));
                // The volume may have become shorter since.
                let end = entry.offset.saturating_add(entry.len.into());
                job.step = if end <= self.shared.volume.info().size {
                    AtomicStep::InPlace
                } else {
                    AtomicStep::Retire
                };
                self.step(index);
            }
            None => {
                let slot = job.slot;
                self.end(index);
                self.read_on(slot);
            }
        }
    }

    /// Takes over the journaled writes that dropped queues have left unfinished.
    fn adopt(&mut self) {
        while let Some(orphan) = self.shared.adopt() {
            self.start(Job {
                step: if orphan.in_journal {
                    AtomicStep::InPlace
                } else {
                    AtomicStep::Journal
                },
                tag: None,
                offset: orphan.offset,
                data: SegmentList::new(),
                entry: entry_of(orphan.offset, &orphan.data),
                len: orphan.data.len() as u64,
                slot: orphan.slot,
                hold: orphan.hold,
                result: Ok(()),
                follow: None,
            });
        }
    }

    /// Advances all jobs with completed operations, until no operation is left to process.
    fn go_on(&mut self) {
        while let Some(done) = self.arrived.pop() {
            self.advance(done);
        }
    }

    fn retry_waiting(&mut self) {
        for waiting in std::mem::take(&mut self.waiting) {
            if let Err(waiting) = self.begin(waiting) {
                self.waiting.push(waiting);
            }
        }
        self.go_on();
    }

    fn recover(&mut self) {
        if !self.shared.is_recovered() && self.shared.begin_recovery() {
            self.look(0);
            self.go_on();
        }
    }
}

impl VolumeQueue for AtomicQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.recover();
        let hold = self.hold(&request);
        let settles = None;
        if let Err(waiting) = self.begin(WaitingRequest {
            request,
            hold,
            settles,
        }) {
            self.waiting.push(waiting);
        }
        self.go_on();
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.recover();
        self.adopt();
        let arrived = &mut self.arrived;
        self.lane.poll(&mut |completion| arrived.push(completion));
        for queue in [&mut self.volume, &mut self.journal].into_iter().flatten() {
            queue.poll(&mut |completion| arrived.push(completion));
        }
        for index in std::mem::take(&mut self.again) {
            self.step(index);
        }
        self.go_on();
        if !self.waiting.is_empty() {
            self.retry_waiting();
        }
        let ended = std::mem::take(&mut self.ended);
        let count = ended.len();
        ended.into_iter().for_each(done);
        count
    }

    fn state(&self) -> QueueState {
        let mut wake = Wake::Event;
        if !self.ended.is_empty() || !self.arrived.is_empty() || self.lane.has_news() {
            wake = Wake::Poll;
        } else if !self.waiting.is_empty() || !self.again.is_empty() {
            wake = Wake::After(RETRY_INTERVAL);
        }
        for queue in [&self.volume, &self.journal].into_iter().flatten() {
            wake = wake.earlier(queue.state().wake, std::time::Instant::now);
        }
        QueueState {
            in_flight: self.in_flight() + self.ended.len(),
            wake,
        }
    }

    /// Cancels a request. A journaled write continues, because it has to complete before another
    /// request may use its unit.
    fn cancel(&mut self, tag: u64) {
        if let Some(at) = self.waiting.iter().position(|w| w.request.tag == tag) {
            let WaitingRequest { request, hold, .. } = self.waiting.remove(at);
            self.refuse(request, hold, IoErrorKind::Aborted);
            return;
        }
        let is_it = |job: &Job| job.tag == Some(tag) && job.step == AtomicStep::Plain;
        let mut jobs = self.jobs.iter();
        let index = jobs.position(|job| job.as_ref().is_some_and(is_it));
        if let (Some(index), Some(volume)) = (index, &mut self.volume) {
            volume.cancel(index as u64);
        }
    }
}

impl Drop for AtomicQueue {
    fn drop(&mut self) {
        // Waits for their outstanding requests.
        self.volume = None;
        self.journal = None;
        for WaitingRequest { hold, .. } in self.waiting.drain(..) {
            self.shared.locks.release(hold);
        }
        if self.reading.take().is_some() {
            self.shared.set_recovery(Recovery::Due);
        }
        for job in self.jobs.drain(..).flatten() {
            if matches!(job.step, AtomicStep::Plain | AtomicStep::Look) || job.hold == Hold::NOTHING
            {
                self.shared.locks.release(job.hold);
                continue;
            }
            // The progress of its last operation is unknown. The unit stays locked until another
            // queue ends the write, or the next opening does so from the journal.
            let mut data = vec![0; job.len as usize];
            job.entry.copy_to(HEAD, &mut data);
            self.shared.leave(Orphan {
                slot: job.slot,
                hold: job.hold,
                offset: job.offset,
                data,
                in_journal: matches!(job.step, AtomicStep::InPlace),
            });
        }
    }
}
