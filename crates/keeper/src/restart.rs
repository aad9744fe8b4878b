//! How soon a serving process that has ended is followed by the next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many within [`WINDOW`] follow at once; later ones after [`PAUSE`]. Each costs some tens of
/// milliseconds of a processor.
const AT_ONCE: usize = 10;
const WINDOW: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);

/// After so many processes in a row that never became ready the keeper gives up.
pub const MOST_FAILURES: u32 = 10;

/// The pace of restarts.
#[derive(Debug, Default)]
pub struct Pace {
    ends: VecDeque<Instant>,
    failures: u32,
}

impl Pace {
    /// A process has ended that was ready to serve, or was not. After how long the next is to be
    /// started; `None`: none is.
    pub fn ended(&mut self, was_ready: bool, now: Instant) -> Option<Duration> {
        self.failures = match was_ready {
            true => 0,
            false => self.failures + 1,
        };
        if self.failures >= MOST_FAILURES {
            return None;
        }
        while let Some(first) = self.ends.front()
            && now.duration_since(*first) >= WINDOW
        {
            self.ends.pop_front();
        }
        self.ends.push_back(now);
        Some(match self.ends.len() {
            ..=AT_ONCE => Duration::ZERO,
            _ => PAUSE,
        })
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
            assert_eq!(pace.ended(true, start), Some(Duration::ZERO));
        }
        let second = |n| start + Duration::from_secs(n);
        assert_eq!(pace.ended(true, second(1)), Some(PAUSE));
        assert_eq!(pace.ended(true, second(9)), Some(PAUSE));
        // Only the last two are recent then.
        assert_eq!(pace.ended(true, second(10)), Some(Duration::ZERO));
        // The memory of it is bounded by the pause.
        for n in 11..1000 {
            assert!(pace.ended(true, second(n)).is_some());
            assert!(pace.ends.len() <= AT_ONCE + 10);
        }
    }

    #[test]
    fn it_is_given_up_when_none_becomes_ready() {
        let mut pace = Pace::default();
        let now = Instant::now();
        for _ in 1..MOST_FAILURES {
            assert!(pace.ended(false, now).is_some());
        }
        // One that was ready makes up for them.
        assert!(pace.ended(true, now).is_some());
        for _ in 1..MOST_FAILURES {
            assert!(pace.ended(false, now).is_some());
        }
        assert_eq!(pace.ended(false, now), None);
    }
}
