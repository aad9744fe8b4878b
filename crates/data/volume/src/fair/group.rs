//! State of a group that is shared by all threads serving its slices: atomic counters and the list
//! of queues.

use super::tuner::Tuner;
use super::{DEFAULT_WEIGHT, MAX_WEIGHT};
use crate::clock::Clock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Minimum cost of a request in bytes. Smaller requests cost the device as much as this one.
pub(super) const MIN_COST: u64 = 4096;
/// Fraction bits of virtual time, for precision when dividing by weights. At weight 1, 64 bits hold
/// 2^54 bytes before the time wraps; only differences are compared.
const FRACTION: u32 = 10;
/// Maximum distance of a share's start tag ahead of the virtual time: the largest request at the
/// smallest weight.
const AHEAD: u64 = 1 << 48;
/// Time after which a thread with waiting requests that has not polled is no longer waited for.
const STALL_GRACE: Duration = Duration::from_micros(500);
/// Time for which a queue counts among those that share the device after its last request.
const ACTIVE_TIME: Duration = Duration::from_millis(10);

/// Wrapper that puts a value on cache lines of its own, so that threads do not share them by
/// accident.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// Returns the virtual time that a request of `cost` bytes takes for a share of this weight.
pub(super) fn time(cost: u64, weight: u32) -> u64 {
    (cost.min(1 << 40) << FRACTION) / u64::from(weight.max(1))
}

/// Returns the distance by which virtual time `a` is ahead of `b`; negative when it is behind.
fn ahead(a: u64, b: u64) -> i64 {
    a.wrapping_sub(b).cast_signed()
}

/// Share of one volume in a group: its weight and its start tag.
#[derive(Debug)]
pub(super) struct FairShare {
    weight: AtomicU32,
    /// Start tag: virtual time at which the next request of the share starts, which is the end of
    /// the previous one or later.
    start: AtomicU64,
}

impl FairShare {
    pub(super) fn new(weight: u32) -> Self {
        let share = Self {
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            start: AtomicU64::new(0),
        };
        share.set_weight(weight);
        share
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    pub(super) fn set_weight(&self, weight: u32) {
        self.weight
            .store(weight.clamp(1, MAX_WEIGHT), Ordering::Relaxed);
    }

    pub(super) fn start(&self) -> u64 {
        self.start.load(Ordering::Relaxed)
    }
}

/// Queue of one thread into a volume of the group, as seen by the other threads.
#[derive(Debug)]
pub(super) struct FlowEntry {
    pub(super) share: Arc<FairShare>,
    /// Last time at which the thread saw requests of the queue waiting for a device slot, in
    /// nanoseconds since the group's epoch; 0: none wait.
    waiting: AtomicU64,
    /// Last time at which the thread saw any requests of the queue, in nanoseconds since the epoch.
    busy: AtomicU64,
}

impl FlowEntry {
    /// Publishes the time at which the thread saw requests of the queue waiting; 0: none wait.
    pub(super) fn see_waiting(&self, now: u64) {
        self.waiting.store(now, Ordering::Relaxed);
    }

    /// Publishes the time at which the thread saw requests of the queue.
    pub(super) fn see_busy(&self, now: u64) {
        self.busy.store(now, Ordering::Relaxed);
    }

    /// Returns whether the queue has requests that wait for a slot of the device.
    fn is_waiting(&self, now: u64) -> bool {
        let waiting = self.waiting.load(Ordering::Relaxed);
        waiting != 0 && now.saturating_sub(waiting) <= STALL_GRACE.as_nanos() as u64
    }

    /// Returns whether the queue had any requests within the last 10 ms.
    pub(super) fn was_busy(&self, now: u64) -> bool {
        let busy = self.busy.load(Ordering::Relaxed);
        busy != 0 && now.saturating_sub(busy) <= ACTIVE_TIME.as_nanos() as u64
    }

    /// Returns whether the queue has precedence over a share with start tag `start` for the next
    /// slot.
    pub(super) fn goes_before(&self, start: u64, now: u64) -> bool {
        ahead(start, self.share.start()) > 0 && self.is_waiting(now)
    }
}

/// State of a group of volumes that share a device by weight; used by all threads.
#[derive(Debug)]
pub(super) struct Group {
    clock: Arc<dyn Clock>,
    epoch: Instant,
    /// Maximum number of requests that the group may have outstanding in the device.
    most: usize,
    /// Maximum number of requests outstanding in the device while several shares compete for it.
    depth: AtomicUsize,
    /// Number of requests that are outstanding in the device now.
    taken: CachePadded<AtomicUsize>,
    /// Virtual time of the group: the start tag of the request that was started last.
    now: CachePadded<AtomicU64>,
    /// Bytes started, a counter for the tuner. `lost` counts bytes of share that slices lost
    /// because they fell behind.
    work: CachePadded<AtomicU64>,
    requests: AtomicU64,
    lost: AtomicU64,
    /// Time at which the tuner is due to run next, in nanoseconds since the group's epoch.
    next_look: AtomicU64,
    tuner: Mutex<Tuner>,
    /// Counter that changes whenever a queue is added or removed, so that threads reread the list.
    generation: AtomicUsize,
    entries: Mutex<Vec<Arc<FlowEntry>>>,
}

/// Counters of a group that its tuner reads; they wrap around.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Figures {
    /// Sum of the costs in bytes of all requests that were started.
    pub(super) work: u64,
    pub(super) requests: u64,
    /// Bytes by which slices have fallen behind their share without catching up.
    pub(super) lost: u64,
}

impl Group {
    pub(super) fn new(most: usize, clock: Arc<dyn Clock>) -> Self {
        Self {
            epoch: clock.now(),
            clock,
            most,
            depth: AtomicUsize::new(most),
            taken: CachePadded::default(),
            now: CachePadded::default(),
            work: CachePadded::default(),
            requests: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            next_look: AtomicU64::new(0),
            tuner: Mutex::new(Tuner::new(most)),
            generation: AtomicUsize::new(0),
            entries: Mutex::default(),
        }
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed)
    }

    /// Returns the current time in nanoseconds since the epoch, never 0.
    pub(super) fn clock(&self) -> u64 {
        let elapsed = self.clock.now().saturating_duration_since(self.epoch);
        u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// Returns the current time by the group's clock.
    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Adds a thread's queue into a volume to the group.
    pub(super) fn enter(&self, share: Arc<FairShare>) -> Arc<FlowEntry> {
        let entry = Arc::new(FlowEntry {
            share,
            waiting: AtomicU64::new(0),
            busy: AtomicU64::new(0),
        });
        let mut entries = self.entries.lock().unpoisoned();
        entries.push(entry.clone());
        self.generation.fetch_add(1, Ordering::Release);
        entry
    }

    /// Removes a thread's queue. Threads that know it forget it when they next read the list.
    pub(super) fn leave(&self, entry: &Arc<FlowEntry>) {
        entry.see_waiting(0);
        let mut entries = self.entries.lock().unpoisoned();
        entries.retain(|other| !Arc::ptr_eq(other, entry));
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Returns all queues of the group if one was added or removed since `generation`, which is
    /// updated.
    pub(super) fn entries(&self, generation: &mut usize) -> Option<Vec<Arc<FlowEntry>>> {
        let newest = self.generation.load(Ordering::Acquire);
        if *generation == newest {
            return None;
        }
        *generation = newest;
        let entries = self.entries.lock().unpoisoned();
        Some(entries.clone())
    }

    /// Reserves room for one request in the device. Returns whether there was any. `alone`: no
    /// other queue competes, so the full depth may be used.
    pub(super) fn take(&self, alone: bool) -> bool {
        let depth = if alone { self.most } else { self.depth() };
        let one_more = |taken: usize| (taken < depth).then(|| taken + 1);
        self.taken
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
            .is_ok()
    }

    /// Releases `places` slots of the device, which completed requests or unused reservations held.
    pub(super) fn release(&self, places: usize) {
        if places > 0 {
            self.taken.0.fetch_sub(places, Ordering::Relaxed);
        }
    }

    /// Returns whether the device has room for another request. `alone`: no other share is active.
    pub(super) fn has_place(&self, alone: bool) -> bool {
        let depth = if alone { self.most } else { self.depth() };
        self.taken.0.load(Ordering::Relaxed) < depth
    }

    /// Updates the start tag of a share that has waiting requests again after a pause. The share
    /// starts at the virtual time, minus at most a full device of requests; a longer pause earns no
    /// credit. `keeping_up`: the share was busy all the time, so the credit it forfeits here counts
    /// as lost to other shares.
    pub(super) fn begin(&self, share: &FairShare, keeping_up: bool) {
        let weight = share.weight();
        let full = time(MIN_COST * self.most as u64, weight);
        let earliest = self.now.0.load(Ordering::Relaxed).wrapping_sub(full);
        let mut lost = 0;
        let clamp = |start: u64| {
            let ahead = ahead(start, earliest);
            if (0..=AHEAD.cast_signed()).contains(&ahead) {
                return None;
            }
            lost = ahead.unsigned_abs().min(full);
            Some(earliest)
        };
        let moved = share
            .start
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, clamp)
            .is_ok();
        if moved && keeping_up {
            let bytes = (lost >> FRACTION).saturating_mul(weight.into());
            self.lost.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Charges a share for its next request, which costs `cost` bytes, and advances the virtual
    /// time.
    pub(super) fn charge(&self, share: &FairShare, cost: u64) {
        let time = time(cost, share.weight());
        let start = share.start.fetch_add(time, Ordering::Relaxed);
        let later = |now: u64| (ahead(start, now) > 0).then_some(start);
        let _ = self
            .now
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
        self.work.0.fetch_add(cost, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs the tuner of the queue depth if it is due and no other thread is running it.
    pub(super) fn tune(&self, now: u64) {
        if now < self.next_look.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut tuner) = self.tuner.try_lock() else {
            return;
        };
        let figures = Figures {
            work: self.work.0.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
        };
        let (depth, next) = tuner.look(now, figures);
        self.depth
            .store(depth.clamp(1, self.most), Ordering::Relaxed);
        self.next_look.store(next, Ordering::Relaxed);
    }
}
