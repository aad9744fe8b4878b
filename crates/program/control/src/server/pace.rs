//! Rate limit of events.

use std::time::{Duration, Instant};

/// Rate limit: a token bucket that holds the events of one second.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    /// Time at which the bucket will be full again, or was last full; `None` for a full one.
    full: Option<Instant>,
}

impl Pace {
    /// Creates the limit for `rate` events per second, with a full bucket.
    pub(super) fn new(rate: u32) -> Self {
        Self {
            interval: Duration::from_secs(1) / rate.max(1),
            full: None,
        }
    }

    /// Returns the time at which the next event is permitted: `now`, or later.
    pub(super) fn next(&self, now: Instant) -> Instant {
        let due = self
            .full
            .and_then(|full| (full + self.interval).checked_sub(Duration::from_secs(1)));
        due.map_or(now, |due| due.max(now))
    }

    /// Counts an event at the time that [`Pace::next`] returns. Returns this time.
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
