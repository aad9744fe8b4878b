//! Pauses between the end of a serving process and the start of the next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Number of restarts within [`WINDOW`] without a pause; later ones follow after [`PAUSE`]. Each
/// costs some tens of milliseconds of a processor.
const AT_ONCE: usize = 10;
const WINDOW: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);

/// Number of processes in a row that never became ready and are followed without a pause. Each
/// later one follows after a pause twice as long as the one before. None is the last: the disks
/// have no other.
const FAILURES_AT_ONCE: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The pace of restarts.
#[derive(Debug, Default)]
pub struct Pace {
    ends: VecDeque<Instant>,
    failures: u32,
}

impl Pace {
    /// A process has ended that was ready to serve, or was not. Returns the pause after which the
    /// next is to be started.
    pub fn ended(&mut self, was_ready: bool, now: Instant) -> Duration {
        self.failures = match was_ready {
            true => 0,
            false => self.failures.saturating_add(1),
        };
        while let Some(first) = self.ends.front()
            && now.duration_since(*first) >= WINDOW
        {
            self.ends.pop_front();
        }
        self.ends.push_back(now);
        let pause = match self.ends.len() {
            ..=AT_ONCE => Duration::ZERO,
            _ => PAUSE,
        };
        pause.max(self.pause_after_failures())
    }

    fn pause_after_failures(&self) -> Duration {
        let Some(doubled) = self.failures.checked_sub(FAILURES_AT_ONCE) else {
            return Duration::ZERO;
        };
        // Longer than the longest pause by far.
        MAX_PAUSE.min(FIRST_PAUSE * (1 << doubled.min(16)))
    }

    /// Processes in a row that did not become ready.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_follow_at_once_and_many_after_a_pause() {
        let mut pace = Pace::default();
        let start = Instant::now();
        for _ in 0..AT_ONCE {
            assert_eq!(pace.ended(true, start), Duration::ZERO);
        }
        let second = |n| start + Duration::from_secs(n);
        assert_eq!(pace.ended(true, second(1)), PAUSE);
        assert_eq!(pace.ended(true, second(9)), PAUSE);
        // Only the last two are recent then.
        assert_eq!(pace.ended(true, second(10)), Duration::ZERO);
        // The memory of it is bounded by the pause.
        for n in 11..1000 {
            pace.ended(true, second(n));
            assert!(pace.ends.len() <= AT_ONCE + 10);
        }
    }

    #[test]
    fn failures_follow_after_growing_pauses_without_end() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        let mut before = Duration::ZERO;
        for failure in 1..100 {
            let pause = pace.ended(false, now);
            assert_eq!(pause.is_zero(), failure < FAILURES_AT_ONCE, "{failure}");
            assert!(pause >= before && pause <= MAX_PAUSE, "{failure}");
            (before, now) = (pause, now + pause);
        }
        assert_eq!(before, MAX_PAUSE);
        // A process that was ready resets the count.
        assert_eq!(pace.ended(true, now + WINDOW), Duration::ZERO);
        assert_eq!(pace.ended(false, now + WINDOW), Duration::ZERO);
    }
}
