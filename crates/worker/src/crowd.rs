//! Whether others want the processor that a loop polls on.
//!
//! A loop that polls while others want its processor keeps it from them, and one of them may be the
//! guest that it polls for; and when something comes it has used its time up and waits for its
//! turn. Such a loop does better with short naps.
//!
//! It shows by gaps between two looks at the clock. A virtual machine's host makes gaps, too, which
//! naps do nothing about: in those the thread's own time goes on, as the system counts it.

use std::time::{Duration, Instant};

/// Between two looks at the clock of a loop that finds nothing: more than this is a gap.
pub(crate) const GAP: Duration = Duration::from_micros(100);
/// How long others are taken to want the processor after they had it.
const LASTS: Duration = Duration::from_millis(20);

/// What a loop knows of others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crowd {
    /// The end of the last gap, and the thread's own time then.
    mark: Option<(Instant, Duration)>,
    until: Instant,
}

impl Crowd {
    /// Nobody has been seen.
    pub fn new(now: Instant) -> Self {
        Self {
            mark: None,
            until: now,
        }
    }

    /// A gap of length `gap` ends; the thread has had so much time of the processor. Two gaps tell,
    /// without sleep between them, whether others had it.
    pub fn gap(&mut self, gap: Duration, now: Instant, own: Duration) {
        if let Some((then, own_then)) = self.mark {
            let passed = now.saturating_duration_since(then);
            let without = passed.saturating_sub(own.saturating_sub(own_then));
            if without >= gap / 2 {
                self.until = now + LASTS;
            }
        }
        self.mark = Some((now, own));
    }

    /// The thread has slept.
    pub fn slept(&mut self) {
        self.mark = None;
    }

    /// Others want the processor.
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
    fn gaps_without_the_processor_are_others() {
        let start = Instant::now();
        let mut crowd = Crowd::new(start);
        crowd.gap(ms(3), start + ms(3), ms(0));
        assert!(!crowd.is_there(start + ms(3)), "one says nothing");
        // Three milliseconds of work, three without the processor.
        crowd.gap(ms(3), start + ms(9), ms(3));
        assert!(crowd.is_there(start + ms(9)) && crowd.is_there(start + ms(28)));
        assert!(!crowd.is_there(start + ms(29)));
    }

    #[test]
    fn the_hosts_gaps_are_not() {
        let start = Instant::now();
        let mut crowd = Crowd::new(start);
        for at in 1..10 {
            // The system has counted all of it.
            crowd.gap(ms(4), start + ms(at * 10), ms(at * 10));
            assert!(!crowd.is_there(start + ms(at * 10)));
        }
    }

    #[test]
    fn sleep_is_no_gap() {
        let start = Instant::now();
        let mut crowd = Crowd::new(start);
        crowd.gap(ms(1), start + ms(1), ms(1));
        crowd.slept();
        crowd.gap(ms(1), start + ms(1001), ms(2));
        assert!(!crowd.is_there(start + ms(1001)));
    }
}
