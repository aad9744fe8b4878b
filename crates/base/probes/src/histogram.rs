//! A histogram of fixed size, written by one thread and read by any.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of linear steps in each power of two, for a precision of one sixteenth.
const STEPS: u64 = 16;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Maximum number of bits in a recorded value. Values of 2^40 and more are recorded as 2^40 - 1.
const TOP_BITS: u32 = 40;
const BUCKETS: usize = ((TOP_BITS - STEP_BITS + 1) * STEPS as u32) as usize;

/// A log-linear histogram with sixteen steps in each power of two up to 2^40. Recording is a few
/// plain loads and stores by the owning thread, without read-modify-write or allocation. Other
/// threads may read at any time, and may see a value that is being recorded in only some of the
/// figures.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    count: AtomicU64,
    total: AtomicU64,
    most: AtomicU64,
}

/// Summary of the values that a histogram has recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Number of recorded values.
    pub count: u64,
    /// Sum of the recorded values.
    pub total: u64,
    /// Average of the recorded values; 0 when there are none.
    pub average: f64,
    /// 50th percentile (median), at most a sixteenth too large.
    pub p50: u64,
    /// 90th percentile, at most a sixteenth too large.
    pub p90: u64,
    /// 99th percentile, at most a sixteenth too large.
    pub p99: u64,
    /// 99.9th percentile, at most a sixteenth too large.
    pub p999: u64,
    /// Largest recorded value.
    pub max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.summary().fmt(f)
    }
}

/// Returns the index of the bucket that counts a value.
#[inline]
fn bucket(value: u64) -> usize {
    if value < STEPS {
        return value as usize;
    }
    let value = value.min((1 << TOP_BITS) - 1);
    let shift = value.ilog2() - STEP_BITS;
    // The leading bit counts as one step range, so that ranges follow each other without a gap.
    (u64::from(shift) * STEPS + (value >> shift)) as usize
}

/// Returns the largest value that a bucket counts.
fn upper(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < 2 * STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    ((bucket % STEPS + STEPS + 1) << shift) - 1
}

/// Adds by a plain load and store, because there is only one writer.
#[inline]
fn add(to: &AtomicU64, value: u64) {
    let sum = to.load(Ordering::Relaxed).wrapping_add(value);
    to.store(sum, Ordering::Relaxed);
}

impl Histogram {
    /// Creates an empty histogram.
    pub const fn new() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            count: AtomicU64::new(0),
            total: AtomicU64::new(0),
            most: AtomicU64::new(0),
        }
    }

    /// Records a value. Only the owning thread may call this.
    #[inline]
    pub fn record(&self, value: u64) {
        self.record_many(value, 1);
    }

    /// Records the same value several times, for example the average of a batch. Only the owning
    /// thread may call this.
    #[inline]
    pub fn record_many(&self, value: u64, times: u64) {
        if let Some(bucket) = self.buckets.get(bucket(value)) {
            add(bucket, times);
        }
        add(&self.count, times);
        add(&self.total, value.wrapping_mul(times));
        if value > self.most.load(Ordering::Relaxed) {
            self.most.store(value, Ordering::Relaxed);
        }
    }

    /// Removes all recorded values. Only the owning thread may call this.
    pub fn clear(&self) {
        let all = [&self.count, &self.total, &self.most].into_iter();
        for cell in all.chain(&self.buckets) {
            cell.store(0, Ordering::Relaxed);
        }
    }

    /// Returns the sum of all recorded values.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the largest recorded value.
    pub fn max(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Returns the nonempty steps: the largest value of each step, at most a sixteenth above every
    /// value in it, and the number of values.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let all = self.buckets.iter().map(|b| b.load(Ordering::Relaxed));
        let used = all.enumerate().filter(|(_, count)| *count > 0);
        used.map(|(bucket, count)| (upper(bucket), count))
    }

    /// Returns a summary of the recorded values.
    pub fn summary(&self) -> Summary {
        let counts = self.buckets.iter().map(|b| b.load(Ordering::Relaxed));
        let sum: u64 = counts.clone().sum();
        let max = self.most.load(Ordering::Relaxed);
        let percentile = |share: f64| {
            let rank = (sum as f64 * share).ceil() as u64;
            let mut seen = 0;
            let found = counts.clone().position(|count| {
                seen += count;
                seen >= rank
            });
            found.map_or(0, upper).min(max)
        };
        let count = self.count.load(Ordering::Relaxed);
        let total = self.total.load(Ordering::Relaxed);
        Summary {
            count,
            total,
            average: if count == 0 {
                0.0
            } else {
                total as f64 / count as f64
            },
            p50: percentile(0.5),
            p90: percentile(0.9),
            p99: percentile(0.99),
            p999: percentile(0.999),
            max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_consecutive_and_hold_values() {
        let mut last = 0;
        for value in 0..100_000u64 {
            let bucket = bucket(value);
            assert!(bucket == last || bucket == last + 1, "{value}");
            assert!(upper(bucket) >= value && upper(bucket) <= value + value / 16);
            last = bucket;
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(upper(BUCKETS - 1), (1 << TOP_BITS) - 1);
    }

    #[test]
    fn percentiles_match_values() {
        let histogram = Histogram::new();
        assert_eq!(histogram.summary(), Summary::default());
        for value in 1..=1000 {
            histogram.record(value);
        }
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.total), (1000, 500_500));
        assert_eq!((histogram.total(), histogram.max()), (500_500, 1000));
        assert_eq!(histogram.counts().map(|(_, n)| n).sum::<u64>(), 1000);
        let small = histogram.counts().filter(|(upper, _)| *upper <= 31);
        assert_eq!(small.map(|(_, n)| n).sum::<u64>(), 31);
        assert_eq!((summary.average, summary.max), (500.5, 1000));
        for (found, value) in [
            (summary.p50, 500),
            (summary.p90, 900),
            (summary.p99, 990),
            (summary.p999, 999),
        ] {
            assert!(found >= value && found <= value + value / 16, "{summary:?}");
        }
        histogram.clear();
        assert_eq!(histogram.summary(), Summary::default());
    }
}
