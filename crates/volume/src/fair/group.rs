//! State shared by all threads that serve slices of a group: atomic counters, and the list of
//! queues.

use super::tuner::Tuner;
use super::{DEFAULT_WEIGHT, MAX_WEIGHT};
use crate::clock::Clock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Cheapest request, in bytes: small ones cost the device as much as these.
pub(super) const LEAST: u64 = 4096;
/// Fraction bits of virtual time, so that weights divide it well. In 64 bits there is room for 2^54
/// bytes at weight 1 before it begins again, and then only differences are looked at.
const FRACTION: u32 = 10;
/// No slice's start lies further ahead of the virtual time than the largest request at the smallest
/// weight.
const AHEAD: u64 = 1 << 48;
/// A thread that has requests waiting, but was not seen for so long, is not waited for.
const GRACE: Duration = Duration::from_micros(500);
/// Queues with requests in this time count among those that share the device.
const LATELY: Duration = Duration::from_millis(10);

/// A number on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Alone<T>(T);

/// Virtual time that `cost` bytes take at a weight.
pub(super) fn time(cost: u64, weight: u32) -> u64 {
    (cost.min(1 << 40) << FRACTION) / u64::from(weight.max(1))
}

/// Returns the distance by which `a` is ahead of `b`; negative: behind.
fn ahead(a: u64, b: u64) -> i64 {
    a.wrapping_sub(b).cast_signed()
}

/// A volume's share.
#[derive(Debug)]
pub(super) struct FairShare {
    weight: AtomicU32,
    /// Virtual time at which its next request starts: its predecessor's end, or later.
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

/// The queue of one thread into a volume of the group, as the other threads see it.
#[derive(Debug)]
pub(super) struct FlowEntry {
    pub(super) share: Arc<FairShare>,
    /// When its thread was last seen with requests of it that wait for a place; 0: none wait.
    /// Nanoseconds since the group's epoch.
    waiting: AtomicU64,
    /// When it was last seen with requests at all.
    busy: AtomicU64,
}

impl FlowEntry {
    /// Publishes the time at which the thread saw waiting requests of the queue; 0: none wait.
    pub(super) fn see_waiting(&self, now: u64) {
        self.waiting.store(now, Ordering::Relaxed);
    }

    /// Publishes the time at which the thread saw requests of the queue.
    pub(super) fn see_busy(&self, now: u64) {
        self.busy.store(now, Ordering::Relaxed);
    }

    /// Returns whether the queue has requests that wait for a place.
    fn is_waiting(&self, now: u64) -> bool {
        let waiting = self.waiting.load(Ordering::Relaxed);
        waiting != 0 && now.saturating_sub(waiting) <= GRACE.as_nanos() as u64
    }

    /// Returns whether the queue had requests lately.
    pub(super) fn was_busy(&self, now: u64) -> bool {
        let busy = self.busy.load(Ordering::Relaxed);
        busy != 0 && now.saturating_sub(busy) <= LATELY.as_nanos() as u64
    }

    /// Returns whether the queue is to get a place before a queue with this start.
    pub(super) fn goes_before(&self, start: u64, now: u64) -> bool {
        ahead(start, self.share.start()) > 0 && self.is_waiting(now)
    }
}

/// The state of a group.
#[derive(Debug)]
pub(super) struct Group {
    clock: Arc<dyn Clock>,
    epoch: Instant,
    /// Places at most.
    most: usize,
    /// Places while several want them.
    depth: AtomicUsize,
    /// Places that are taken.
    taken: Alone<AtomicUsize>,
    /// Virtual time: the start of the request that was started last.
    now: Alone<AtomicU64>,
    /// Bytes started, and virtual time that slices lost because they could not keep up: the tuner's
    /// figures.
    work: Alone<AtomicU64>,
    requests: AtomicU64,
    lost: AtomicU64,
    /// When the tuner has to be called next, in nanoseconds since the epoch.
    next_look: AtomicU64,
    tuner: Mutex<Tuner>,
    /// Changes when a queue enters or leaves.
    generation: AtomicUsize,
    entries: Mutex<Vec<Arc<FlowEntry>>>,
}

/// Counters for the tuner; they wrap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Figures {
    /// Bytes of the requests that were started.
    pub(super) work: u64,
    pub(super) requests: u64,
    /// Bytes that slices were behind by, and will not be made up for.
    pub(super) lost: u64,
}

impl Group {
    pub(super) fn new(most: usize, clock: Arc<dyn Clock>) -> Self {
        Self {
            epoch: clock.now(),
            clock,
            most,
            depth: AtomicUsize::new(most),
            taken: Alone::default(),
            now: Alone::default(),
            work: Alone::default(),
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

    /// Nanoseconds since the epoch, never 0.
    pub(super) fn clock(&self) -> u64 {
        let elapsed = self.clock.now().saturating_duration_since(self.epoch);
        u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// The clock's time.
    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Enters a thread's queue into a volume.
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

    /// A thread's queue leaves. Threads that have seen it forget it at the next look.
    pub(super) fn leave(&self, entry: &Arc<FlowEntry>) {
        entry.see_waiting(0);
        let mut entries = self.entries.lock().unpoisoned();
        entries.retain(|other| !Arc::ptr_eq(other, entry));
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Returns all entries if a queue was added or removed since `generation`.
    pub(super) fn entries(&self, generation: &mut usize) -> Option<Vec<Arc<FlowEntry>>> {
        let newest = self.generation.load(Ordering::Acquire);
        if *generation == newest {
            return None;
        }
        *generation = newest;
        let entries = self.entries.lock().unpoisoned();
        Some(entries.clone())
    }

    /// Takes a place, if there is one.
    pub(super) fn take(&self, alone: bool) -> bool {
        let depth = if alone { self.most } else { self.depth() };
        let one_more = |taken: usize| (taken < depth).then(|| taken + 1);
        self.taken
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
            .is_ok()
    }

    /// Releases places.
    pub(super) fn release(&self, places: usize) {
        if places > 0 {
            self.taken.0.fetch_sub(places, Ordering::Relaxed);
        }
    }

    /// There is a place.
    pub(super) fn has_place(&self, alone: bool) -> bool {
        let depth = if alone { self.most } else { self.depth() };
        self.taken.0.load(Ordering::Relaxed) < depth
    }

    /// Starts a share that had no waiting requests and has one again. It begins at the virtual
    /// time, or a device full of requests before it. It saves nothing else up. `keeping_up`: the
    /// share was busy all the time, so that the virtual time that it loses here was taken by the
    /// other shares.
    pub(super) fn begin(&self, share: &FairShare, keeping_up: bool) {
        let weight = share.weight();
        let full = time(LEAST * self.most as u64, weight);
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

    /// A share's next request starts, which costs so much.
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

    /// Looks at how the device does, when it is time for that and no other thread does so.
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
