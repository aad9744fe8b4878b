//! Measurement of the distance of the host's processor, by the time to load its submission queue
//! entries, and eviction of the entries' cache lines where that is faster.
//!
//! The host overwrites an entry one turn of the ring after it was fetched. If the host's processor
//! is far away, these stores dominate the cost of a command ([`dma::lines`]), and the cache lines
//! of each batch are evicted at once. For a nearby processor, eviction would be slower. The
//! measurement is repeated because virtual CPUs move between processors.

use dma::lines::Evict;
use std::num::NonZeroU64;

/// Minimum number of entries in a batch that is timed and evicted. With fewer entries the host
/// waits for each command, not for stores.
const MIN_COMMANDS: usize = 4;
/// Number of batches after which the load time of a batch is measured again.
const INTERVAL: u32 = 16;
/// Maximum time to load the entries of a batch from a nearby processor, in nanoseconds: base, and
/// time per entry. The values lie between those measured at a cache line round trip of 50 ns, where
/// eviction costs more than it saves, and at 115 ns.
const BESIDE: (u64, u64) = (40, 5);

pub(super) struct Distance {
    /// Cache line eviction of this processor; `None` when eviction gains nothing on it.
    lines: Option<Evict>,
    far: bool,
    until_timed: u32,
    /// Frequency of the cycle counter, in ticks per second.
    rate: f64,
}

impl Distance {
    pub fn new() -> Self {
        let lines = Evict::of_processor();
        Distance {
            lines,
            far: false,
            until_timed: 0,
            rate: lines.map_or(0.0, |_| probes::cycles_per_second()),
        }
    }

    /// Begins a batch of `entries` entries. Returns the value of the cycle counter if the batch is
    /// timed.
    #[inline(always)]
    pub fn begin(&mut self, entries: usize) -> Option<NonZeroU64> {
        if entries < MIN_COMMANDS || self.lines.is_none() {
            return None;
        }
        self.until_timed = self.until_timed.wrapping_sub(1);
        if self.until_timed.is_multiple_of(INTERVAL) {
            NonZeroU64::new(dma::lines::cycles_after_loads())
        } else {
            None
        }
    }

    /// Ends a batch of `entries` entries. Returns the eviction instruction if their cache lines
    /// should be evicted.
    #[inline(always)]
    pub fn end(&mut self, begun: Option<NonZeroU64>, entries: usize) -> Option<Evict> {
        if let Some(begun) = begun {
            let took = dma::lines::cycles_after_loads().saturating_sub(begun.get());
            self.far = self.is_far(took, entries);
        }
        self.lines.filter(|_| self.far && entries >= MIN_COMMANDS)
    }

    #[inline(never)]
    fn is_far(&self, took: u64, entries: usize) -> bool {
        let nanos = took as f64 * 1e9 / self.rate;
        let (all, each) = BESIDE;
        nanos > (all + each * entries as u64) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(far: bool) -> Distance {
        Distance {
            lines: Evict::of_processor(),
            far,
            until_timed: 1,
            rate: 2e9,
        }
    }

    #[test]
    fn batches_of_sixteen_are_timed() {
        let mut distance = of(false);
        let timed = |distance: &mut Distance| {
            let timed = (0..INTERVAL * 4).filter(|_| distance.begin(MIN_COMMANDS).is_some());
            timed.count()
        };
        let expected = if distance.lines.is_some() { 4 } else { 0 };
        assert_eq!(timed(&mut distance), expected);
        assert!((0..INTERVAL * 4).all(|_| distance.begin(MIN_COMMANDS - 1).is_none()));
        distance.lines = None;
        assert_eq!(timed(&mut distance), 0);
    }

    #[test]
    fn late_data_counts_as_far() {
        let distance = of(false);
        // Cycles of half a nanosecond.
        assert!(!distance.is_far(2 * (40 + 80), 16));
        assert!(distance.is_far(2 * (40 + 80) + 1, 16));
        assert!(distance.is_far(2 * 255, 4));
    }

    #[test]
    fn lines_are_evicted_after_late_batch() {
        let mut distance = of(true);
        let usable = distance.lines.is_some();
        assert_eq!(distance.end(None, MIN_COMMANDS).is_some(), usable);
        assert!(distance.end(None, MIN_COMMANDS - 1).is_none(), "too few");
        // Timed, and over at once.
        let now = NonZeroU64::new(u64::MAX);
        assert!(distance.end(now, MIN_COMMANDS).is_none());
        assert!(distance.end(None, MIN_COMMANDS).is_none());
        // Begun when the machine was.
        assert_eq!(
            distance.end(NonZeroU64::new(1), MIN_COMMANDS).is_some(),
            usable
        );
        assert_eq!(distance.end(None, MIN_COMMANDS).is_some(), usable);
    }
}
