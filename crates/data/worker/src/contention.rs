//! Detection of other threads that compete for the processor on which a loop polls.
//!
//! A polling loop keeps such threads from the processor, and one of them may run the guest that the
//! loop polls for. When work arrives, the loop has used up its time slice and waits for its turn.
//! Short naps serve such a loop better.
//!
//! Contention shows as gaps between two looks at the clock. A virtual machine's host causes gaps,
//! too, about which naps do nothing. In those gaps the thread's CPU time continues to grow.

use std::time::{Duration, Instant};

/// Shortest time between two readings of the clock by an idle loop that counts as a gap.
pub(crate) const GAP: Duration = Duration::from_micros(100);
/// Time after a pause of the thread for which its processor counts as contended.
const CONTENTION_TIME: Duration = Duration::from_millis(20);

/// Record of pauses in a polling loop, which show that other threads use its processor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuContention {
    /// End of the last pause and the thread's CPU time at that time; `None` after a sleep.
    mark: Option<(Instant, Duration)>,
    until: Instant,
}

impl CpuContention {
    /// Creates a record in which the processor is not contended.
    pub fn new(now: Instant) -> Self {
        Self {
            mark: None,
            until: now,
        }
    }

    /// Records the end of a gap of length `gap`; `own` is the thread's CPU time. Two gaps without
    /// sleep between them show whether other threads had the processor.
    pub fn gap(&mut self, gap: Duration, now: Instant, own: Duration) {
        if let Some((then, own_then)) = self.mark {
            let passed = now.saturating_duration_since(then);
            let without = passed.saturating_sub(own.saturating_sub(own_then));
            if without >= gap / 2 {
                self.until = now + CONTENTION_TIME;
            }
        }
        self.mark = Some((now, own));
    }

    /// Discards the last gap, because the thread has slept.
    pub fn slept(&mut self) {
        self.mark = None;
    }

    /// Returns whether other threads have recently competed for the processor.
    #[inline]
    pub fn is_there(&self, now: Instant) -> bool {
        now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn gaps_without_cpu_mean_other_processes() {
        let start = Instant::now();
        let mut crowd = CpuContention::new(start);
        crowd.gap(ms(3), start + ms(3), ms(0));
        assert!(!crowd.is_there(start + ms(3)), "one says nothing");
        // Three milliseconds of work, three without the processor.
        crowd.gap(ms(3), start + ms(9), ms(3));
        assert!(crowd.is_there(start + ms(9)) && crowd.is_there(start + ms(28)));
        assert!(!crowd.is_there(start + ms(29)));
    }

    #[test]
    fn gaps_of_host_do_not_count() {
        let start = Instant::now();
        let mut crowd = CpuContention::new(start);
        for at in 1..10 {
            // The system has counted all of the time as CPU time.
            crowd.gap(ms(4), start + ms(at * 10), ms(at * 10));
            assert!(!crowd.is_there(start + ms(at * 10)));
        }
    }

    #[test]
    fn sleep_does_not_count_as_gap() {
        let start = Instant::now();
        let mut crowd = CpuContention::new(start);
        crowd.gap(ms(1), start + ms(1), ms(1));
        crowd.slept();
        crowd.gap(ms(1), start + ms(1001), ms(2));
        assert!(!crowd.is_there(start + ms(1001)));
    }
}
