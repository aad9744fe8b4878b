//! Limits on requests and bytes per second.
//!
//! A [`LimitVolume`] passes requests on as long as there are tokens for them. The rest wait in its
//! queue, in order, and [`VolumeQueue::state`] limits the worker's sleep. Limits belong to the
//! volume, not to the queue: several workers draw from the same buckets, which are atomic numbers
//! and can be changed at any time through the [`LimitHandle`].
//!
//! A volume without limits ([`LimitVolume::dormant`]) has the queues of the inner volume until the
//! first limit is set ([`OpenQueue::update`]).

mod bucket;

use crate::clock::{Clock, SystemClock};
use crate::traits::DormantLayer;
use crate::{
    Allocation, AtomicWrites, Completion, FastPath, Info, Io, IoError, IoErrorKind, Op, OpenQueue,
    QueueState, RangeCopy, Request, Volume, VolumeError, VolumeQueue, Wake,
};
use bucket::{Bucket, PER_NANOSECOND};
use dma::{SegmentList, View};
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest sleep of a worker while requests wait, after which changed limits are noticed.
pub(crate) const MAX_SLEEP: Duration = Duration::from_millis(100);

/// Limits per second for reads, for writes, and for both together; 0: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    /// Limit for reads and writes together, per second; 0 for none.
    pub total: u64,
    /// Limit for reads, per second; 0 for none.
    pub read: u64,
    /// Limit for writes, zeroing and deallocation, per second; 0 for none.
    pub write: u64,
}

/// I/O limits of a volume: requests per second and bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoLimits {
    /// Limits in requests per second (IOPS).
    pub iops: Rates,
    /// Limits in bytes per second.
    pub bps: Rates,
    /// Burst allowance: after a pause, as much may be done at once as the limits allow in this
    /// time.
    pub burst: Duration,
}

impl Default for IoLimits {
    fn default() -> Self {
        Self {
            iops: Rates::default(),
            bps: Rates::default(),
            burst: Duration::from_millis(50),
        }
    }
}

/// Cost of a request under the limits: one request, and its bytes.
#[derive(Debug, Clone, Copy)]
struct Cost {
    write: bool,
    bytes: u64,
}

#[derive(Debug)]
struct LimitState {
    clock: Arc<dyn Clock>,
    /// Time from which the times of the token buckets count.
    epoch: Instant,
    /// Whether any bucket has a limit.
    limited: AtomicBool,
    /// Whether the volume was opened with limits, or has had any since.
    is_configured: AtomicBool,
    /// Burst in units of time.
    burst: AtomicU64,
    /// Token buckets for requests and for bytes; each for all requests, for reads and for writes.
    buckets: [[Bucket; 3]; 2],
    /// Number of requests that had to wait for tokens.
    delayed: AtomicU64,
    /// Sum of the times in nanoseconds for which requests had to wait, without those that still
    /// wait.
    throttled: AtomicU64,
}

/// Handle to the limits of a volume. Any thread may read and change them while the volume is in
/// use.
#[derive(Debug, Clone)]
pub struct LimitHandle(Arc<LimitState>);

impl LimitHandle {
    fn new(limits: IoLimits, clock: Arc<dyn Clock>) -> Self {
        let handle = Self(Arc::new(LimitState {
            epoch: clock.now(),
            clock,
            limited: AtomicBool::new(false),
            is_configured: AtomicBool::new(false),
            burst: AtomicU64::new(0),
            buckets: Default::default(),
            delayed: AtomicU64::new(0),
            throttled: AtomicU64::new(0),
        }));
        handle.store(limits);
        handle
    }

    /// Changes the limits, for waiting requests, too. A sleeping worker notices within a tenth of a
    /// second. Queues without limits notice the first ones by [`OpenQueue::update`].
    pub fn set(&self, limits: IoLimits) {
        self.store(limits);
        self.0.is_configured.store(true, Ordering::Relaxed);
    }

    /// Returns whether the volume was opened with limits, or has had any since.
    pub fn is_configured(&self) -> bool {
        self.0.is_configured.load(Ordering::Relaxed)
    }

    fn store(&self, limits: IoLimits) {
        let shared = &*self.0;
        let mut any = false;
        for (buckets, rates) in shared.buckets.iter().zip([limits.iops, limits.bps]) {
            let rates = [rates.total, rates.read, rates.write];
            for (bucket, rate) in buckets.iter().zip(rates) {
                bucket.set(rate);
                any |= rate > 0;
            }
        }
        shared.burst.store(units(limits.burst), Ordering::Relaxed);
        shared.limited.store(any, Ordering::Release);
    }

    /// Returns whether there is any limit.
    pub fn is_limited(&self) -> bool {
        self.0.limited()
    }

    /// Returns the current limits.
    pub fn get(&self) -> IoLimits {
        let rates = |[total, read, write]: &[Bucket; 3]| Rates {
            total: total.rate(),
            read: read.rate(),
            write: write.rate(),
        };
        let [iops, bps] = &self.0.buckets;
        let burst = self.0.burst.load(Ordering::Relaxed) / PER_NANOSECOND;
        IoLimits {
            iops: rates(iops),
            bps: rates(bps),
            burst: Duration::from_nanos(burst),
        }
    }

    /// Returns the number of requests that had to wait so far.
    pub fn delayed(&self) -> u64 {
        self.0.delayed.load(Ordering::Relaxed)
    }

    /// Returns the total time for which requests have waited, without requests that still wait.
    pub fn throttled(&self) -> Duration {
        Duration::from_nanos(self.0.throttled.load(Ordering::Relaxed))
    }
}

fn units(time: Duration) -> u64 {
    let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    nanoseconds.saturating_mul(PER_NANOSECOND)
}

impl LimitState {
    fn limited(&self) -> bool {
        self.limited.load(Ordering::Acquire)
    }

    fn now(&self) -> u64 {
        units(self.clock.now().saturating_duration_since(self.epoch))
    }

    /// Returns the buckets that a request draws from, and the number of tokens for each.
    fn buckets(&self, cost: Cost) -> impl Iterator<Item = (&Bucket, u64)> {
        let tokens = [1, cost.bytes];
        let own = if cost.write { 2 } else { 1 };
        let pairs = self.buckets.iter().zip(tokens);
        pairs.flat_map(move |(buckets, tokens)| {
            let used = buckets.iter().enumerate();
            used.filter(move |(i, _)| *i == 0 || *i == own)
                .map(move |(_, bucket)| (bucket, tokens))
        })
    }

    /// Returns the time from which a request of this cost may pass all its buckets.
    fn ready(&self, cost: Cost) -> u64 {
        let burst = self.burst.load(Ordering::Relaxed);
        let each = self.buckets(cost).map(|(bucket, _)| bucket.ready(burst));
        each.max().unwrap_or(0)
    }

    /// Takes the tokens of a request, if all of its buckets have them. Returns whether the request
    /// may pass.
    fn take(&self, now: u64, cost: Cost) -> bool {
        if self.ready(cost) > now {
            return false;
        }
        for (bucket, tokens) in self.buckets(cost) {
            bucket.take(now, tokens);
        }
        true
    }

    /// Adds a wait that began at `since` to the total waiting time.
    fn waited(&self, since: u64) {
        let nanoseconds = self.now().saturating_sub(since) / PER_NANOSECOND;
        self.throttled.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn instant(&self, units: u64) -> Option<Instant> {
        // A bit late rather than early: early means to find that it may not pass yet.
        self.epoch
            .checked_add(Duration::from_nanos(units.div_ceil(PER_NANOSECOND)))
    }
}

/// A wrapper that limits the requests and bytes per second of a volume.
#[derive(Debug)]
pub struct LimitVolume {
    volume: Arc<dyn Volume>,
    handle: LimitHandle,
    /// Whether queues are those of the inner volume while there are no limits.
    is_dormant: bool,
}

impl LimitVolume {
    /// Creates a volume that passes requests on to `volume` within these limits.
    pub fn new(volume: Arc<dyn Volume>, limits: IoLimits) -> Self {
        Self::with_clock(volume, limits, Arc::new(SystemClock))
    }

    /// Wraps `volume` without limits. The wrapper costs nothing until limits are set.
    pub fn dormant(volume: Arc<dyn Volume>) -> Self {
        Self {
            volume,
            handle: LimitHandle::new(IoLimits::default(), Arc::new(SystemClock)),
            is_dormant: true,
        }
    }

    /// Creates the volume with another clock, for tests.
    pub fn with_clock(volume: Arc<dyn Volume>, limits: IoLimits, clock: Arc<dyn Clock>) -> Self {
        let handle = LimitHandle::new(limits, clock);
        handle.set(limits);
        Self {
            volume,
            handle,
            is_dormant: false,
        }
    }

    /// Returns the handle for changing the limits while the volume is in use.
    pub fn handle(&self) -> LimitHandle {
        self.handle.clone()
    }
}

impl Volume for LimitVolume {
    fn info(&self) -> Info {
        self.volume.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let queue = self.volume.open(io)?;
        let layer = LimitLayer {
            shared: self.handle.0.clone(),
            unlimited: io.ending(),
            zeroes_move_data: !self.volume.info().write_zeroes,
        };
        Ok(if self.is_dormant {
            queue.with_layer(layer)
        } else {
            Box::new(layer).wrap(queue)
        })
    }

    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }

    /// Returns the promise of the inner volume. Limits delay requests but never split them.
    fn atomic_writes(&self) -> AtomicWrites {
        self.volume.atomic_writes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }

    fn allocation(&self, offset: u64, len: u64) -> Option<(Allocation, u64)> {
        self.volume.allocation(offset, len)
    }

    fn limits(&self) -> Option<LimitHandle> {
        Some(self.handle())
    }
}

/// Parts of a [`LimitQueue`] before there are limits.
struct LimitLayer {
    shared: Arc<LimitState>,
    unlimited: Rc<Cell<bool>>,
    zeroes_move_data: bool,
}

impl DormantLayer for LimitLayer {
    fn is_needed(&self) -> bool {
        self.shared.limited()
    }

    fn wrap(self: Box<Self>, queue: OpenQueue) -> OpenQueue {
        let Self {
            shared,
            unlimited,
            zeroes_move_data,
        } = *self;
        OpenQueue::with_fast_path(LimitQueue {
            queue,
            shared,
            unlimited,
            zeroes_move_data,
            waiting: Default::default(),
            aborted: Vec::new(),
            writes_first: false,
        })
    }
}

/// A request that waits for tokens.
struct DelayedRequest {
    /// Time at which the wait began, in the buckets' unit of time.
    since: u64,
    request: Request,
}

/// Queue of one worker into a [`LimitVolume`].
struct LimitQueue {
    queue: OpenQueue,
    shared: Arc<LimitState>,
    /// Whether the process is ending, so that waiting requests pass without tokens.
    unlimited: Rc<Cell<bool>>,
    /// Whether zeroing costs the volume as much as writing, so that it is charged by length.
    zeroes_move_data: bool,
    /// Requests that wait for tokens: reads, and requests of all other kinds.
    waiting: [VecDeque<DelayedRequest>; 2],
    aborted: Vec<Request>,
    /// Whether writes pass first when reads and writes wait for the same tokens.
    writes_first: bool,
}

impl LimitQueue {
    fn cost(&self, request: &Request) -> Cost {
        let bytes = match request.op {
            Op::Read | Op::Write { .. } => request.len,
            Op::WriteZeroes { .. } if self.zeroes_move_data => request.len,
            _ => 0,
        };
        Cost {
            write: request.op.changes(),
            bytes,
        }
    }

    fn free(&self) -> bool {
        self.unlimited.get() || !self.shared.limited()
    }

    /// Starts the waiting requests for which tokens are available. Returns the number of
    /// completions passed to `done`.
    fn let_through(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = 0;
        loop {
            let order = [self.writes_first, !self.writes_first].map(usize::from);
            let now = self.shared.now();
            let free = self.free();
            let passes = |class: &usize| {
                let front = self.waiting.get(*class).and_then(VecDeque::front);
                front.is_some_and(|next| free || self.shared.take(now, self.cost(&next.request)))
            };
            let Some(class) = order.into_iter().find(passes) else {
                return count;
            };
            self.writes_first = class == 0;
            let next = self.waiting.get_mut(class).and_then(VecDeque::pop_front);
            let submit = |next: DelayedRequest| {
                self.shared.waited(next.since);
                self.queue.submit(next.request)
            };
            if let Some(completion) = next.and_then(submit) {
                count += 1;
                done(completion);
            }
        }
    }

    fn is_waiting(&self) -> bool {
        self.waiting.iter().any(|waiting| !waiting.is_empty())
    }

    /// Returns when tokens for the next waiting request are available.
    fn next_pass(&self) -> Wake {
        if !self.is_waiting() {
            return Wake::Event;
        }
        let fronts = self.waiting.iter().filter_map(VecDeque::front);
        let free = self.free();
        let nap = units(MAX_SLEEP).saturating_add(self.shared.now());
        let ready = fronts.filter_map(|next| {
            let ready = if free {
                0
            } else {
                self.shared.ready(self.cost(&next.request))
            };
            self.shared.instant(ready.min(nap))
        });
        ready.min().map_or(Wake::Event, Wake::At)
    }
}

impl VolumeQueue for LimitQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        // A flush covers only writes that have completed, so it need not wait for the rest.
        if request.op == Op::Flush {
            return self.queue.submit(request);
        }
        if !self.is_waiting()
            && (self.free() || self.shared.take(self.shared.now(), self.cost(&request)))
        {
            return self.queue.submit(request);
        }
        self.shared.delayed.fetch_add(1, Ordering::Relaxed);
        let class = usize::from(request.op.changes());
        if let Some(waiting) = self.waiting.get_mut(class) {
            let since = self.shared.now();
            waiting.push_back(DelayedRequest { since, request });
        }
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        // A share below the limits has its place in this queue's own queue.
        self.queue.update();
        let mut count = self.queue.poll(done);
        for request in self.aborted.drain(..) {
            count += 1;
            done(request.complete(Err(IoErrorKind::Aborted.into())));
        }
        if self.is_waiting() {
            count += self.let_through(done);
        }
        count
    }

    fn state(&self) -> QueueState {
        let QueueState { in_flight, wake } = self.queue.state();
        QueueState {
            in_flight: in_flight + self.aborted.len(),
            wake: if self.aborted.is_empty() {
                wake.earlier(self.next_pass(), || self.shared.clock.now())
            } else {
                Wake::Poll
            },
        }
    }

    fn cancel(&mut self, tag: u64) {
        for waiting in &mut self.waiting {
            if let Some(index) = waiting.iter().position(|next| next.request.tag == tag)
                && let Some(next) = waiting.remove(index)
            {
                self.shared.waited(next.since);
                self.aborted.push(next.request);
                return;
            }
        }
        self.queue.cancel(tag);
    }
}

impl FastPath for LimitQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {
        self.queue.push();
    }

    /// Returns false: a request may have to wait for tokens, so each must be submitted.
    fn is_immediate(&self) -> bool {
        false
    }

    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }

    fn prefetches(&self) -> bool {
        self.queue.prefetches()
    }

    fn prefetch(&mut self, op: Op, offset: u64, len: u64) {
        self.queue.prefetch(op, offset, len);
    }

    /// Returns `None` while there are limits: a copy by the file system is not charged as a
    /// read, so the data has to be read.
    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        if self.free() && !self.is_waiting() {
            self.queue.range_copy()
        } else {
            None
        }
    }
}
