//! Slots that own requests while the kernel works on them.
//!
//! The one rule that makes this safe: whatever an entry in the ring points to (the request's
//! segments, the bounce buffer, the I/O vectors, the zero buffer, the file) belongs to a slot, and
//! a slot is emptied only when the kernel has posted the completion of its one operation. Nothing
//! is freed while the kernel may still write to it, not even when queues are dropped:
//! [`RingCore::finish`] waits.
#![allow(unsafe_code)]

mod durable;
mod pin;
mod stream;

#[cfg(test)]
pub(super) use pin::why_not_pinned;

use super::burst::Burst;
use super::entry::{self, FileTarget, Sources, Transfer};
use super::fixed::FixedTable;
use super::inline::{self, Inline};
use super::job::{Continuation, KernelOp, RingJob};
use super::pool::BouncePool;
use super::registered::RegisteredRing;
use super::ring::RingFile;
use super::setup::Mode;
use super::{IoCounters, IoOptions, IoStats, MAX_CAPACITY};
use crate::{Completion, IoError, IoErrorKind, Op, Request};
use dma::{Buffer, SegmentList};
use durable::Durable;
use io_uring::{IoUring, opcode, squeue};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::{STREAM, Streams};

/// Maximum number of files in the kernel's table of registered files. Further files are used by
/// descriptor.
const REGISTERED_FILES: u32 = 64;
/// `user_data` of ring operations that belong to no request slot.
const NO_SLOT: u64 = u64::MAX;
/// Bit in `user_data` that marks operations on files of a lane. No slot has so high a number, so
/// the fast path for ordinary completions rejects them without a check of its own.
const LANE: usize = 1 << 29;
/// Maximum number of kernel threads (io-wq) that execute blocking requests of this ring.
const KERNEL_THREADS: u32 = 256;
/// Number of consecutive failed system calls after which the ring is treated as broken.
const MAX_FAILURES: u32 = 1_000_000;

struct OpenFile {
    file: RingFile,
    /// Index of the file in the kernel's table of registered files, if it is registered.
    registered: Option<u32>,
    /// Number of request slots that work on the file.
    busy: usize,
    /// State that decides whether the kernel may execute requests of the file within the submitting
    /// system call.
    inline: Inline,
    /// Flushes and durable writes of the file, which share fsync calls.
    durable: Durable,
}

/// Completion of a request, as [`RingCore::reap`] returns it.
pub(super) enum ReapedCompletion {
    /// A request that ended successfully without further steps. The [`Completion`] is built only
    /// where it is returned, which saves a copy.
    Plain { tag: u64, data: SegmentList },
    /// A request that ended in any other way.
    Other(Completion),
}

impl OpenFile {
    /// Returns the slot number with the lane bit, which becomes the lower half of `user_data`.
    #[inline]
    fn place(&self, index: usize) -> usize {
        match self.file.lane {
            Some(_) => index | LANE,
            None => index,
        }
    }

    /// Returns the reference by which ring entries name the file: registered index or descriptor.
    #[inline]
    fn target(&self) -> FileTarget {
        match self.registered {
            Some(place) => FileTarget::Place(place),
            None => FileTarget::Descriptor(self.file.fd.as_raw_fd()),
        }
    }
}

/// Slot of a ring for one outstanding request.
#[derive(Default)]
struct RingSlot {
    job: Option<RingJob>,
    /// I/O vectors of the current operation, when they differ from the request's segments: the rest
    /// after part of the data has moved.
    vectors: Vec<libc::iovec>,
    /// Counter by which completions of earlier uses of the slot are recognised as stale.
    generation: u32,
}

pub(super) struct RingCore {
    /// Registration of the ring's descriptor. Declared before the ring, so that it is dropped
    /// first.
    registered: RegisteredRing,
    uring: IoUring,
    mode: Mode,
    slots: Vec<RingSlot>,
    free: Vec<u32>,
    /// Completions of requests that ended outside a poll; has capacity for all slots.
    ready: VecDeque<Completion>,
    /// Number of ring entries that were written and not yet submitted to the kernel.
    unsent: usize,
    /// Whether ring entries were written since the last system call.
    fresh: bool,
    /// Requests started while the device was idle, which are submitted together.
    burst: Burst,
    /// Whether the unsent entries include a request of an untrusted file, so that the next system
    /// call is measured.
    trying: bool,
    /// Duration of a system call, in cycles, above which files that may have caused it become
    /// suspects.
    slow: u64,
    /// Frequency of the processor's cycle counter, in cycles per second.
    cycles_per_second: f64,
    /// Whether unsent entries continue requests. They are submitted without waiting for the
    /// worker's call.
    urgent: bool,
    /// Whether the last system call failed unexpectedly. The error has been logged.
    troubled: bool,
    files: Vec<Option<OpenFile>>,
    streams: Streams,
    /// Unused indices in the kernel's table of registered files.
    places: Vec<u32>,
    bounce: BouncePool,
    zeroes: Option<Buffer>,
    fixed: FixedTable,
    /// Whether the kernel's table of fixed buffers exists. It is created when the first buffer is
    /// entered.
    has_table: bool,
    /// Whether the failure to pin memory was logged, so that it is logged only once.
    said_not_pinned: bool,
    counters: IoCounters,
    stats: Arc<IoStats>,
    /// Whether the counters have changed since they were last published to other threads.
    untold: bool,
}

impl RingCore {
    pub(super) fn new(
        uring: IoUring,
        mode: Mode,
        options: &IoOptions,
        stats: Arc<IoStats>,
    ) -> Self {
        let capacity = options.capacity.clamp(1, MAX_CAPACITY);
        let places = match uring.submitter().register_files_sparse(REGISTERED_FILES) {
            Ok(()) => (0..REGISTERED_FILES).rev().collect(),
            Err(error) => {
                tracing::debug!("io_uring: no registered files ({error}), using descriptors");
                Vec::new()
            }
        };
        // Requests that block have a thread of the kernel's each, up to a number: by default four
        // for each processor, and a slow file would have all of them, while a flush of another
        // waits. Zero leaves the number of the other kind.
        let mut threads = [KERNEL_THREADS.min(capacity), 0];
        if let Err(error) = uring.submitter().register_iowq_max_workers(&mut threads) {
            tracing::debug!("io_uring: the kernel chooses its number of threads ({error})");
        }
        let cycles_per_second = probes::cycles_per_second();
        let mut slots = Vec::new();
        slots.resize_with(capacity as usize, RingSlot::default);
        Self {
            registered: RegisteredRing::new(&uring),
            uring,
            mode,
            slots,
            free: (0..capacity).rev().collect(),
            ready: VecDeque::with_capacity(capacity as usize),
            unsent: 0,
            fresh: false,
            burst: Burst::default(),
            trying: false,
            slow: (inline::MAX_CALL_TIME.as_secs_f64() * cycles_per_second) as u64,
            cycles_per_second,
            urgent: false,
            troubled: false,
            files: Vec::new(),
            streams: Streams::new(cycles_per_second),
            places,
            bounce: BouncePool::new(options.bounce_bytes),
            zeroes: None,
            fixed: FixedTable::new(),
            has_table: false,
            said_not_pinned: false,
            counters: IoCounters::default(),
            stats,
            untold: false,
        }
    }

    /// Returns the maximum number of outstanding requests of the ring.
    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether the kernel is executing no operation of the ring.
    pub(super) fn is_idle(&self) -> bool {
        self.busy() == 0 && !self.streams.is_busy()
    }

    /// Returns the number of requests that the kernel is executing.
    pub(super) fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the ring's counters of requests and system calls.
    pub(super) fn counters(&self) -> IoCounters {
        self.counters
    }

    /// Returns the number of outstanding requests of the ring.
    pub(super) fn in_flight(&self) -> usize {
        self.busy() + self.ready.len()
    }

    /// Returns the number of requests for one file that the kernel is executing.
    pub(super) fn in_flight_of(&self, file: usize) -> usize {
        let open = self.files.get(file).and_then(Option::as_ref);
        open.map_or(0, |open| open.busy)
    }

    /// Lets the kernel execute requests of all files within the system call, however long that
    /// takes, for tests that count calls.
    #[cfg(test)]
    pub(super) fn trust(&mut self) {
        self.slow = u64::MAX;
        for open in self.files.iter_mut().flatten() {
            open.inline = Inline::always();
        }
    }

    /// Sends all data requests to kernel threads, as for files that have made the worker wait.
    #[cfg(test)]
    pub(super) fn distrust(&mut self) {
        for open in self.files.iter_mut().flatten() {
            open.inline = Inline::banned();
        }
    }

    /// Adds a file to the ring. Returns the index that names the file in later calls.
    pub(super) fn register(&mut self, file: RingFile) -> usize {
        let fd = file.fd.as_raw_fd();
        let registered = self.places.pop().filter(|&place| {
            let update = self.uring.submitter().register_files_update(place, &[fd]);
            if let Err(error) = &update {
                tracing::debug!("io_uring: file not registered ({error}), using its descriptor");
            }
            update.is_ok()
        });
        let open = OpenFile {
            inline: match self.mode {
                Mode::Polled => Inline::always(),
                _ => Inline::new(),
            },
            file,
            registered,
            busy: 0,
            durable: Durable::default(),
        };
        let mut places = self.files.iter_mut().enumerate();
        if let Some((index, place)) = places.find(|(_, place)| place.is_none()) {
            *place = Some(open);
            return index;
        }
        self.files.push(Some(open));
        self.files.len() - 1
    }

    /// Removes a file from the ring, after [`RingCore::finish`] has waited for its requests.
    pub(super) fn unregister(&mut self, file: usize) {
        let Some(open) = self.files.get_mut(file).and_then(Option::take) else {
            return;
        };
        if let Some(place) = open.registered
            && self
                .uring
                .submitter()
                .register_files_update(place, &[-1])
                .is_ok()
        {
            self.places.push(place);
        }
    }

    /// Starts a request. Returns its completion when it cannot be started.
    #[inline(never)]
    pub(super) fn begin(&mut self, file: usize, request: Request) -> Option<Completion> {
        let Some(open) = self.files.get_mut(file).and_then(Option::as_mut) else {
            return Some(request.complete(Err(IoErrorKind::Gone.into())));
        };
        let Some(index) = self.free.pop() else {
            return Some(request.complete(Err(IoErrorKind::Busy.into())));
        };
        let reachable = !request.op.has_data() || open.file.reaches(&request);
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return Some(request.complete(Err(IoErrorKind::Busy.into())));
        };
        slot.generation = slot.generation.wrapping_add(1);
        slot.job = Some(RingJob::new(request, file, reachable, &open.file.abilities));
        open.busy += 1;
        match self.operate(index as usize) {
            Ok(()) => {
                self.counters.requests += 1;
                None
            }
            Err(kind) => self.end(index as usize, Err(kind.into())),
        }
    }

    /// Starts a read or write of all of `data` like [`RingCore::begin`]. Fast path for a single
    /// memory segment that the kernel can use directly. The arguments arrive in registers and are
    /// stored at once.
    #[inline]
    pub(super) fn begin_transfer(
        &mut self,
        file: usize,
        tag: u64,
        op: Op,
        offset: u64,
        data: SegmentList,
    ) -> Option<Completion> {
        let len = data.len_bytes();
        let open = self.files.get_mut(file).and_then(Option::as_mut);
        if let Some(open) = open
            && let &[piece] = data.segments()
            && open.file.takes(&piece)
            && !matches!(op, Op::Write { fua: true })
            && open.inline.is_trusted()
            && let Some(bytes) = entry::in_one(len)
            && let Some(&index) = self.free.last()
            && let Some(slot) = self.slots.get_mut(index as usize)
            && slot.job.is_none()
        {
            let generation = slot.generation.wrapping_add(1);
            let place = self.fixed.find(piece.as_ptr().addr(), piece.len());
            let transfer = Transfer {
                at: piece.as_ptr(),
                bytes,
                offset,
                op,
                place,
            };
            let entry = transfer
                .entry(open.target())
                .user_data(name(index as usize, generation));
            // SAFETY: the entry points to the memory of `data`, which the slot has from here on
            // until the completion has been seen; see the module's documentation.
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                self.free.pop();
                slot.generation = generation;
                // The kernel can be handed the memory as it is.
                let request = Request::transfer(tag, op, offset, data);
                slot.job = Some(RingJob::at(KernelOp::Data, request, file));
                open.busy += 1;
                self.counters.requests += 1;
                self.counters.operations += 1;
                self.counters.fixed += u64::from(place.is_some());
                self.unsent += 1;
                self.fresh = true;
                return None;
            }
        }
        self.begin(file, Request::transfer(tag, op, offset, data))
    }

    /// Writes the ring entry for the next operation of the request in slot `index`.
    fn operate(&mut self, index: usize) -> Result<(), IoErrorKind> {
        let RingSlot {
            job,
            vectors,
            generation,
        } = self.slots.get_mut(index).ok_or(IoErrorKind::Gone)?;
        let job = job.as_mut().ok_or(IoErrorKind::Gone)?;
        let open = self
            .files
            .get_mut(job.file)
            .and_then(Option::as_mut)
            .ok_or(IoErrorKind::Gone)?;
        let target = open.target();
        let user_data = name(open.place(index), *generation);
        // All other operations are given to the kernel's threads by the kernel itself.
        if !open.durable.admit(index as u32, job) {
            // The operation starts later, with similar ones.
            return Ok(());
        }
        let moves = !matches!(
            job.step,
            KernelOp::Punch | KernelOp::ZeroRange | KernelOp::Sync
        );
        let mut threaded = false;
        if moves && !open.inline.is_trusted() {
            // A request in each call, of any file: then the file that made the thread wait is
            // known.
            threaded = self.trying || !open.inline.admit(Instant::now());
            self.trying |= !threaded;
        }
        let sources = Sources {
            bounce: &mut self.bounce,
            zeroes: &mut self.zeroes,
            fixed: (!threaded).then_some(&self.fixed),
            counters: &mut self.counters,
        };
        let mut entry = entry::entry(job, vectors, target, sources)?.user_data(user_data);
        if threaded {
            entry = entry.flags(squeue::Flags::ASYNC);
        }
        self.push(&entry)?;
        self.counters.operations += 1;
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> Result<(), IoErrorKind> {
        for _ in 0..2 {
            // SAFETY: everything that the entry points to belongs to a slot (or to the ring: the
            // zero buffer, which lives as long) and stays there until the completion has been seen;
            // see the module's documentation.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                self.unsent += 1;
                self.fresh = true;
                return Ok(());
            }
            // The ring is full only when cancellations were added to a request in every slot.
            self.send();
        }
        Err(IoErrorKind::Busy)
    }

    /// Submits the unsent ring entries. Returns whether none is left.
    #[inline]
    pub(super) fn send(&mut self) -> bool {
        self.unsent == 0 || self.send_now()
    }

    fn send_now(&mut self) -> bool {
        if self.fresh || self.mode != Mode::Polled {
            self.enter();
        } else {
            // The kernel's thread knows of them, and looks once more before it sleeps.
            self.sent(Ok(()));
        }
        self.unsent == 0
    }

    /// Submits the first requests of a burst early if the device is idle. With submission-queue
    /// polling, the kernel takes entries anyway.
    pub(super) fn start_burst(&mut self) {
        if self.burst.started(self.busy(), self.unsent) && self.mode != Mode::Polled {
            self.send();
        }
    }

    /// Submits the unsent ring entries if the device is idle.
    #[inline]
    pub(super) fn push_idle(&mut self) {
        if self.unsent > 0 && self.unsent == self.busy() && self.mode != Mode::Polled {
            self.send_now();
            self.tell();
        }
    }

    /// Publishes the counters for other threads. Separate from the system call itself,
    /// because a guest that waits for its completions has priority.
    #[inline]
    pub(super) fn tell(&mut self) {
        if std::mem::take(&mut self.untold) {
            self.stats.publish(&self.counters);
        }
    }

    /// Ends the burst, after all available requests have been started.
    pub(super) fn end_burst(&mut self) {
        self.burst.ended(self.busy());
    }

    /// Makes one system call, which submits entries and lets the kernel run its deferred work.
    pub(super) fn enter(&mut self) {
        let events = self.kernel_has_work();
        self.enter_for(events);
    }

    /// Makes one system call like [`RingCore::enter`]; `events` is whether the kernel has deferred
    /// completions to process.
    pub(super) fn enter_for(&mut self, events: bool) {
        self.count_batch();
        let result = if self.mode == Mode::Polled {
            // The kernel's thread that polls takes entries by itself while it is awake.
            self.counters.system_calls += u64::from(self.needs_call());
            self.uring.submit().map(drop)
        } else {
            self.counters.system_calls += 1;
            self.timed_enter(events)
        };
        self.sent(result);
    }

    /// Makes one system call and measures its duration; see [`inline`].
    #[inline]
    fn timed_enter(&mut self, events: bool) -> io::Result<()> {
        if self.trying {
            return self.measured_enter(events);
        }
        let before = probes::cycles();
        let result = self.registered.enter(self.unsent as u32, events);
        let took = probes::cycles().wrapping_sub(before);
        if took > self.slow {
            self.suspect(took);
        }
        result
    }

    /// Makes one system call that submits a request of an untrusted file, and records whether it
    /// blocked this thread.
    #[cold]
    #[inline(never)]
    fn measured_enter(&mut self, events: bool) -> io::Result<()> {
        self.trying = false;
        let (before, slept) = (probes::cycles(), inline::sleeps());
        let result = self.registered.enter(self.unsent as u32, events);
        let took = probes::cycles().wrapping_sub(before);
        let waited = took > self.slow && inline::sleeps() > slept;
        let waited = waited.then(|| self.duration(took));
        let now = Instant::now();
        for open in self.files.iter_mut().flatten() {
            open.inline.measured(waited, now);
        }
        result
    }

    fn duration(&self, cycles: u64) -> Duration {
        Duration::try_from_secs_f64(cycles as f64 / self.cycles_per_second).unwrap_or(Duration::MAX)
    }

    /// Stops trusting all files with requests in flight, after a system call that took `took`
    /// cycles.
    #[cold]
    #[inline(never)]
    fn suspect(&mut self, took: u64) {
        // Without requests in it, it was not a submission that took so long.
        if self.unsent == 0 {
            return;
        }
        let (took, now) = (self.duration(took), Instant::now());
        let suspicious = |open: &&mut OpenFile| open.busy > 0 && open.inline.is_trusted();
        let alone = self.files.iter_mut().flatten().filter(suspicious).count() == 1;
        for open in self.files.iter_mut().flatten().filter(suspicious) {
            open.inline.suspect(took, alone, now);
        }
    }

    /// Counts the ring entries written since the last system call as one batch.
    fn count_batch(&mut self) {
        self.counters.batches += u64::from(std::mem::take(&mut self.fresh));
    }

    /// Returns whether the kernel's submission thread needs a system call: to wake it, or to flush
    /// overflown completions.
    fn needs_call(&mut self) -> bool {
        // The order in which the thread's sleep is looked for is the ring's own business: this only
        // counts.
        let submission = self.uring.submission();
        submission.need_wakeup() || submission.cq_overflow()
    }

    /// Counts the ring entries that are still unsent after an attempt to submit them, and logs the
    /// error of the attempt.
    fn sent(&mut self, result: io::Result<()>) {
        self.unsent = self.uring.submission().len();
        self.urgent &= self.unsent > 0;
        self.untold = true;
        match result {
            Ok(()) => self.troubled = false,
            Err(error) => match error.raw_os_error() {
                // For now: interrupted, short of memory, completions to be taken first. The next
                // call tries again.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ if self.troubled => {}
                _ => {
                    self.troubled = true;
                    tracing::error!("io_uring: submission failed: {error}");
                }
            },
        }
    }

    /// Returns whether the kernel needs a system call to post further completions.
    #[inline]
    pub(super) fn kernel_has_work(&mut self) -> bool {
        let submission = self.uring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    /// Lets the kernel run the completion work that it defers in [`Mode::Deferred`].
    pub(super) fn run_deferred(&mut self) {
        if self.mode != Mode::Deferred {
            return;
        }
        self.counters.system_calls += 1;
        let result = self.registered.enter(0, true);
        self.sent(result);
    }

    /// Returns whether the event descriptor is signalled even while the worker polls.
    pub(super) fn always_signals(&self) -> bool {
        self.mode != Mode::Deferred
    }

    /// Switches the signalling of the event descriptor on or off in [`Mode::Deferred`]. In other
    /// modes it always signals: only with deferred work does a system call before sleeping order
    /// this store before the kernel's look at the flag.
    pub(super) fn signal(&mut self, on: bool) {
        if !self.always_signals() {
            let completion = self.uring.completion();
            if on {
                completion.enable_eventfd();
            } else {
                completion.disable_eventfd();
            }
        }
    }

    /// Returns whether the completion queue has entries, which can be read without a system call.
    #[inline]
    pub(super) fn has_arrivals(&mut self) -> bool {
        !self.ready.is_empty() || !self.uring.completion().is_empty()
    }

    /// Returns whether the worker can only wait: no completion has arrived, no request has to be
    /// continued, and the kernel has no deferred work.
    #[inline]
    pub(super) fn is_quiet(&mut self) -> bool {
        !self.has_arrivals() && !self.urgent && !self.kernel_has_work()
    }

    /// Submits operations that continue requests, without waiting for the worker's call.
    pub(super) fn send_urgent(&mut self) {
        if self.urgent {
            self.send();
        }
    }

    /// Returns the next request that has completed, if any.
    #[inline(always)]
    pub(super) fn reap(&mut self) -> Option<ReapedCompletion> {
        if !self.ready.is_empty() {
            return self.ready.pop_front().map(ReapedCompletion::Other);
        }
        loop {
            let (user_data, result) = self.posted()?;
            if let Some((tag, data)) = self.plain_end(user_data, result) {
                return Some(ReapedCompletion::Plain { tag, data });
            }
            if let Some(completion) = self.answer(user_data, result) {
                return Some(ReapedCompletion::Other(completion));
            }
        }
    }

    /// Returns the user data and the result of the next completion queue entry, if any.
    fn posted(&mut self) -> Option<(u64, i32)> {
        let entry = self.uring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// Ends the request of a successful, complete operation, and returns its tag and data. Returns
    /// `None` for all other results, which [`RingCore::answer`] handles.
    #[inline(always)]
    fn plain_end(&mut self, user_data: u64, answer: i32) -> Option<(u64, SegmentList)> {
        let index = user_data as u32 as usize;
        let slot = self.slots.get_mut(index)?;
        if user_data == NO_SLOT || name(index, slot.generation) != user_data {
            return None;
        }
        let job = slot.job.as_mut().filter(|job| job.is_done_by(answer))?;
        let (tag, file) = (job.request.tag, job.file);
        let data = std::mem::take(&mut job.request.data);
        // The job has no bounce buffer, and its data is taken: nothing is left to be dropped.
        std::mem::forget(slot.job.take());
        self.vacate(index, file);
        Some((tag, data))
    }

    /// Processes the result of an operation. Returns the request's completion, or `None` when it
    /// continues with another operation.
    #[inline(never)]
    fn answer(&mut self, user_data: u64, answer: i32) -> Option<Completion> {
        let place = user_data as u32 as usize;
        if place & STREAM != 0 {
            self.streams.answered(user_data, answer);
            return None;
        }
        let index = place & !LANE;
        let slot = self.slots.get_mut(index)?;
        if name(place, slot.generation) != user_data {
            return None;
        }
        let job = slot.job.as_mut()?;
        let next = match self.files.get_mut(job.file).and_then(Option::as_mut) {
            Some(open) => {
                open.durable.answered(job);
                job.advance(answer, open.file.unit(), &open.file.abilities)
            }
            None => Continuation::Done(Err(IoErrorKind::Gone.into())),
        };
        match next {
            Continuation::Done(result) => self.end_later(index, result),
            Continuation::Again => {
                self.counters.continued += 1;
                match self.operate(index) {
                    Ok(()) => {
                        // Set only now: a call that made room for the operation has sent earlier
                        // urgent entries.
                        self.urgent = true;
                        None
                    }
                    Err(kind) => self.end_later(index, Err(kind.into())),
                }
            }
        }
    }

    /// Ends a request after the call that started it. Returns `None` when its file belongs to a
    /// lane, which then holds the completion.
    fn end_later(&mut self, index: usize, result: Result<(), IoError>) -> Option<Completion> {
        let file = self.slots.get(index)?.job.as_ref()?.file;
        let completion = self.end(index, result)?;
        let open = self.files.get(file).and_then(Option::as_ref);
        match open.and_then(|open| open.file.lane.as_deref()) {
            Some(lane) => {
                lane.put(completion);
                None
            }
            None => Some(completion),
        }
    }

    /// Frees a slot, and returns the completion of its request.
    #[inline(never)]
    fn end(&mut self, index: usize, result: Result<(), IoError>) -> Option<Completion> {
        let mut job = self.slots.get_mut(index)?.job.take()?;
        if let Some(buffer) = job.bounce.take() {
            self.bounce.put(buffer);
        }
        self.vacate(index, job.file);
        if job.step == KernelOp::Sync {
            self.synced(index as u32, job.file, result);
        }
        Some(job.request.complete(result))
    }

    /// Marks slot `index` as free, after a request for `file`.
    #[inline]
    fn vacate(&mut self, index: usize, file: usize) {
        self.free.push(index as u32);
        if let Some(open) = self.files.get_mut(file).and_then(Option::as_mut) {
            open.busy -= 1;
        }
    }

    /// Asks the kernel to cancel the request with this tag, if it is outstanding.
    pub(super) fn cancel_tag(&mut self, file: usize, tag: u64) {
        let found = self.slots.iter().position(|slot| {
            let job = slot.job.as_ref();
            job.is_some_and(|job| job.file == file && job.request.tag == tag)
        });
        if let Some(index) = found {
            self.cancel(index);
        }
    }

    fn cancel(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let Some(job) = slot.job.as_mut() else { return };
        if std::mem::replace(&mut job.cancelled, true) {
            return;
        }
        let open = self.files.get(job.file).and_then(Option::as_ref);
        let place = open.map_or(index, |open| open.place(index));
        let target = name(place, slot.generation);
        // Without room for the cancellation, the request ends by itself.
        let _ = self.push(&opcode::AsyncCancel::new(target).build().user_data(NO_SLOT));
    }

    /// Cancels the requests of a file (or of all files), and waits until the kernel has completed
    /// them.
    pub(super) fn finish(&mut self, file: Option<usize>) {
        let concerns = |slot: &RingSlot| {
            slot.job
                .as_ref()
                .is_some_and(|job| file.is_none_or(|file| job.file == file))
        };
        for index in 0..self.slots.len() {
            if self.slots.get(index).is_some_and(concerns) {
                self.cancel(index);
            }
        }
        let mut failures = 0;
        while self.slots.iter().any(concerns) {
            self.count_batch();
            self.counters.system_calls += 1;
            let result = self.uring.submitter().submit_and_wait(1);
            failures = if result.is_ok() { 0 } else { failures + 1 };
            self.sent(result.map(drop));
            while let Some((user_data, result)) = self.posted() {
                if let Some(completion) = self.answer(user_data, result) {
                    self.ready.push_back(completion);
                }
            }
            if failures > MAX_FAILURES {
                // The kernel neither finishes nor waits. Memory that it may still write to must
                // never be used for anything else, so it is leaked.
                tracing::error!("io_uring: requests do not end; leaking their memory");
                for slot in self.slots.iter_mut().filter(|slot| concerns(slot)) {
                    std::mem::forget(slot.job.take());
                    std::mem::forget(std::mem::take(&mut slot.vectors));
                }
                // Nor may another process have the files: their locks stay.
                for open in self.files.iter().flatten().filter(|open| open.busy > 0) {
                    std::mem::forget(open.file.fd.clone());
                }
                std::mem::forget(self.zeroes.take());
            }
        }
    }
}

impl Drop for RingCore {
    fn drop(&mut self) {
        // Every queue closes its file, so nothing is left; but this is the last moment at which it
        // could be waited for.
        self.finish(None);
        self.finish_streams();
    }
}

/// Returns the `user_data` that identifies the operation of a slot in its present use.
fn name(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 32 | index as u64
}
