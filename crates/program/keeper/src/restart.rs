//! Pauses between the end of a serving process and the start of the next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Number of restarts within [`RESTART_WINDOW`] without a pause; later ones follow after
/// [`RESTART_DELAY`]. Each costs some tens of milliseconds of a processor.
const MAX_RESTARTS: usize = 10;
const RESTART_WINDOW: Duration = Duration::from_secs(10);
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Number of processes in a row that never became ready and are followed without a pause. Each
/// later one follows after a pause twice as long as the one before. None is the last: the disks
/// have no other.
const MAX_QUICK_FAILURES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Pauses between restarts of the serving process, which grow with successive failures.
#[derive(Debug, Default)]
pub struct Pace {
    ends: VecDeque<Instant>,
    failures: u32,
}

impl Pace {
    /// Records the end of a process, and whether it was ready to serve. Returns the pause before
    /// the start of the next one.
    pub fn ended(&mut self, was_ready: bool, now: Instant) -> Duration {
        self.failures = if was_ready {
            0
        } else {
            self.failures.saturating_add(1)
        };
        while let Some(first) = self.ends.front()
            && now.duration_since(*first) >= RESTART_WINDOW
        {
            self.ends.pop_front();
        }
        self.ends.push_back(now);
        let pause = match self.ends.len() {
            ..=MAX_RESTARTS => Duration::ZERO,
            _ => RESTART_DELAY,
        };
        pause.max(self.pause_after_failures())
    }

    fn pause_after_failures(&self) -> Duration {
        let Some(doubled) = self.failures.checked_sub(MAX_QUICK_FAILURES) else {
            return Duration::ZERO;
        };
        // Longer than the longest pause by far.
        MAX_PAUSE.min(FIRST_PAUSE * (1 << doubled.min(16)))
    }

    /// Returns the number of processes in a row that ended before they were ready.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_restarts_are_immediate_and_later_ones_delayed() {
        let mut pace = Pace::default();
        let start = Instant::now();
        for _ in 0..MAX_RESTARTS {
            assert_eq!(pace.ended(true, start), Duration::ZERO);
        }
        let second = |n| start + Duration::from_secs(n);
        assert_eq!(pace.ended(true, second(1)), RESTART_DELAY);
        assert_eq!(pace.ended(true, second(9)), RESTART_DELAY);
        // Only the last two are recent then.
        assert_eq!(pace.ended(true, second(10)), Duration::ZERO);
        // The memory of it is bounded by the pause.
        for n in 11..1000 {
            pace.ended(true, second(n));
            assert!(pace.ends.len() <= MAX_RESTARTS + 10);
        }
    }

    #[test]
    fn restart_pauses_grow_up_to_limit() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        let mut before = Duration::ZERO;
        for failure in 1..100 {
            let pause = pace.ended(false, now);
            assert_eq!(pause.is_zero(), failure < MAX_QUICK_FAILURES, "{failure}");
            assert!(pause >= before && pause <= MAX_PAUSE, "{failure}");
            (before, now) = (pause, now + pause);
        }
        assert_eq!(before, MAX_PAUSE);
        // A process that was ready resets the count.
        assert_eq!(pace.ended(true, now + RESTART_WINDOW), Duration::ZERO);
        assert_eq!(pace.ended(false, now + RESTART_WINDOW), Duration::ZERO);
    }
}
