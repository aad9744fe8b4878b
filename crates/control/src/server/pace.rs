//! Rate limit of events.

use std::time::{Duration, Instant};

/// A token bucket, with room for the events of one second.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    /// When the bucket is, or was, full again.
    full: Option<Instant>,
}

impl Pace {
    /// A full bucket of so many a second.
    pub(super) fn new(rate: u32) -> Self {
        Self {
            interval: Duration::from_secs(1) / rate.max(1),
            full: None,
        }
    }

    /// When the next may happen: `now`, or later.
    pub(super) fn next(&self, now: Instant) -> Instant {
        let due = self
            .full
            .and_then(|full| (full + self.interval).checked_sub(Duration::from_secs(1)));
        due.map_or(now, |due| due.max(now))
    }

    /// Takes a token at the time that [`Pace::next`] returns. Returns this time.
    pub(super) fn take(&mut self, now: Instant) -> Instant {
        let next = self.next(now);
        let full = self.full.map_or(now, |full| full.max(now));
        self.full = Some(full + self.interval);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_allows_burst_then_fixed_rate() {
        let now = Instant::now();
        let mut pace = Pace::new(10);
        for _ in 0..10 {
            assert_eq!(pace.take(now), now);
        }
        for more in 1..=5 {
            assert_eq!(pace.take(now), now + more * Duration::from_millis(100));
        }
        let later = now + Duration::from_secs(10);
        assert_eq!(pace.take(later), later);
    }
}
