//! Figures measured by one queue, and their sum over queues.

use hdrhistogram::Histogram;
use std::time::Duration;

/// Maximum recorded latency in nanoseconds: one minute.
const MAX_LATENCY: u64 = 60_000_000_000;

/// Minimum time without a completed timed I/O that counts as a gap. With a target that answers
/// within microseconds, the thread then had no CPU.
pub const GAP: Duration = Duration::from_micros(250);

/// Counts and latencies of a job's I/Os in one direction.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Number of I/Os completed while measuring.
    pub ios: u64,
    /// Number of bytes of these I/Os.
    pub bytes: u64,
    /// Latencies of the timed I/Os in nanoseconds, from submission to the poll that found the
    /// completion.
    pub latency: Histogram<u64>,
    /// Sum of the latencies. Kept with the sum of squares, because the histogram does not provide
    /// the standard deviation.
    sum: f64,
    squares: f64,
}

impl Default for Flow {
    fn default() -> Self {
        // The bounds are constants that are right; the other way there is a histogram that grows.
        let latency = Histogram::new_with_bounds(1, MAX_LATENCY, 3)
            .or_else(|_| Histogram::new(2))
            .unwrap_or_else(|_| unreachable!("a histogram with two digits exists"));
        Self {
            ios: 0,
            bytes: 0,
            latency,
            sum: 0.0,
            squares: 0.0,
        }
    }
}

impl Flow {
    /// Records the latency of a timed I/O.
    #[inline]
    pub fn record(&mut self, nanos: u64) {
        self.latency.saturating_record(nanos.max(1));
        let nanos = nanos as f64;
        self.sum += nanos;
        self.squares += nanos * nanos;
    }

    /// Adds the figures of another queue.
    pub fn add(&mut self, other: &Flow) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.sum += other.sum;
        self.squares += other.squares;
        // Equal bounds: it cannot fail.
        let _ = self.latency.add(&other.latency);
    }

    /// Returns the mean latency in nanoseconds.
    pub fn mean(&self) -> f64 {
        let n = self.latency.len();
        if n == 0 { 0.0 } else { self.sum / n as f64 }
    }

    /// Returns the standard deviation of the latency in nanoseconds.
    pub fn deviation(&self) -> f64 {
        let n = self.latency.len();
        if n < 2 {
            return 0.0;
        }
        let mean = self.mean();
        (self.squares / n as f64 - mean * mean).max(0.0).sqrt()
    }

    /// Returns the latency in nanoseconds that `percent` percent of the timed I/Os do not exceed.
    pub fn percentile(&self, percent: f64) -> u64 {
        self.latency.value_at_percentile(percent)
    }
}

/// Figures measured by a job, or by one queue of it.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Figures of reads.
    pub read: Flow,
    /// Figures of writes.
    pub write: Flow,
    /// Figures of deallocations.
    pub trim: Flow,
    /// Duration of the measurement, without the ramp before it.
    pub elapsed: Duration,
    /// User-mode CPU time of this process's threads while measuring.
    pub user: Duration,
    /// Kernel-mode CPU time of this process's threads while measuring.
    pub system: Duration,
    /// Number of blocks that were read back and verified after the end.
    pub verified: u64,
    /// Number of I/Os started.
    pub submitted: u64,
    /// Number of notifications to the target, which shows how I/Os were batched.
    pub kicks: u64,
    /// Time while measuring that the queue's thread was runnable without a CPU; the maximum of all
    /// queues.
    pub waited: Duration,
    /// Sum of the gaps (see [`GAP`]) while measuring; the maximum of all queues. Meaningful for
    /// targets with I/Os much shorter than a gap.
    pub gaps: Duration,
}

impl Measured {
    /// Adds the figures of another queue that ran at the same time.
    pub fn add(&mut self, other: &Measured) {
        self.read.add(&other.read);
        self.write.add(&other.write);
        self.trim.add(&other.trim);
        self.elapsed = self.elapsed.max(other.elapsed);
        self.verified += other.verified;
        self.submitted += other.submitted;
        self.kicks += other.kicks;
        self.waited = self.waited.max(other.waited);
        self.gaps = self.gaps.max(other.gaps);
    }

    /// Adds the figures of the same job from another run.
    pub fn append(&mut self, other: &Measured) {
        let (elapsed, waited, gaps) = (self.elapsed, self.waited, self.gaps);
        self.add(other);
        self.elapsed = elapsed + other.elapsed;
        self.waited = waited + other.waited;
        self.gaps = gaps + other.gaps;
    }

    /// Returns the I/Os per second.
    pub fn iops(&self) -> f64 {
        self.rate(self.read.ios + self.write.ios + self.trim.ios)
    }

    /// Returns `count` per second of measuring time.
    pub fn rate(&self, count: u64) -> f64 {
        count as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns the average time of one I/O on one queue in nanoseconds, without gaps.
    pub fn nanos_outside_gaps(&self) -> f64 {
        let time = self.elapsed.saturating_sub(self.gaps).as_nanos() as f64;
        time / (self.read.ios + self.write.ios).max(1) as f64
    }

    /// Returns the share of the measuring time that was spent in gaps.
    pub fn gap_share(&self) -> f64 {
        self.gaps.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns the sum of all directions.
    pub fn both(&self) -> Flow {
        let mut both = self.read.clone();
        both.add(&self.write);
        both.add(&self.trim);
        both
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_results_add_up() {
        let mut all = Measured::default();
        for nanos in [100, 300] {
            let mut queue = Measured {
                elapsed: Duration::from_secs(2),
                ..Measured::default()
            };
            queue.read.ios = 10;
            queue.read.record(nanos);
            all.add(&queue);
        }
        assert_eq!(all.iops(), 10.0);
        let both = all.both();
        assert_eq!(both.mean(), 200.0);
        assert_eq!(both.deviation(), 100.0);
        assert_eq!(both.percentile(50.0), 100);
        assert_eq!(both.percentile(99.0), 300);
    }

    #[test]
    fn job_slices_are_appended() {
        let mut all = Measured::default();
        for ios in [10, 30] {
            let mut slice = Measured {
                elapsed: Duration::from_secs(1),
                ..Measured::default()
            };
            slice.write.ios = ios;
            all.append(&slice);
        }
        assert_eq!(all.elapsed, Duration::from_secs(2));
        assert_eq!(all.iops(), 20.0);
    }

    #[test]
    fn gap_time_is_not_counted() {
        let mut queue = Measured {
            elapsed: Duration::from_micros(1000),
            gaps: Duration::from_micros(600),
            ..Measured::default()
        };
        queue.read.ios = 3;
        queue.write.ios = 1;
        assert_eq!(queue.nanos_outside_gaps(), 100_000.0);
        assert_eq!(queue.gap_share(), 0.6);
        let nothing = Measured::default();
        assert_eq!(
            (nothing.nanos_outside_gaps(), nothing.gap_share()),
            (0.0, 0.0)
        );
        queue.append(&queue.clone());
        assert_eq!(queue.nanos_outside_gaps(), 100_000.0);
    }

    #[test]
    fn latencies_are_clamped_to_bounds() {
        let mut flow = Flow::default();
        flow.record(0);
        flow.record(u64::MAX / 4);
        assert_eq!(flow.latency.len(), 2);
        assert!(flow.percentile(100.0) >= MAX_LATENCY);
    }
}
