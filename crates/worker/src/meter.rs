//! How busy a worker is.

use std::time::{Duration, Instant};

/// Measures how busy a worker is, by the clock that it reads now and then: time in which it polled
/// without finding anything is not busy, and that is known from rounds in a row that did nothing.
#[derive(Debug)]
pub(crate) struct Meter {
    last: Instant,
    /// Rounds without work since then.
    idle: u32,
    rounds: u32,
    /// Nanoseconds of such a round.
    cost: f64,
    busy: Duration,
    polling: Duration,
}

/// What the time was spent with since the clock was read before, and how much it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spent {
    /// There was no round.
    Nothing,
    /// Rounds that found nothing, in all of them so long so far.
    Polling(Duration),
    /// Work, and some such rounds.
    Working { busy: Duration, polling: Duration },
}

impl Meter {
    pub fn new(now: Instant) -> Self {
        Meter {
            last: now,
            idle: 0,
            rounds: 0,
            cost: f64::INFINITY,
            busy: Duration::ZERO,
            polling: Duration::ZERO,
        }
    }

    /// A round has ended.
    #[inline]
    pub fn round(&mut self, worked: bool) {
        self.rounds += 1;
        self.idle += u32::from(!worked);
    }

    /// The clock was read, after these rounds.
    pub fn tick(&mut self, now: Instant) -> Spent {
        let mut spent = Spent::Nothing;
        let passed = now.saturating_duration_since(self.last);
        let nanos = passed.as_nanos() as f64;
        if self.rounds > 0 && self.idle == self.rounds {
            let sample = nanos / f64::from(self.idle);
            // What interrupts such rounds makes them longer, never shorter.
            self.cost = if sample < self.cost {
                sample
            } else {
                self.cost + (sample - self.cost) / 64.0
            };
            self.polling += passed;
            spent = Spent::Polling(self.polling);
        } else if self.rounds > 0 {
            let cost = if self.cost.is_finite() {
                self.cost
            } else {
                0.0
            };
            let busy = (nanos - f64::from(self.idle) * cost).max(0.0);
            let busy = Duration::from_nanos(busy as u64).min(passed);
            self.busy += busy;
            self.polling += passed - busy;
            spent = Spent::Working {
                busy: self.busy,
                polling: self.polling,
            };
        }
        self.skip(now);
        spent
    }

    /// It slept until now.
    pub fn skip(&mut self, now: Instant) {
        self.last = now;
        self.idle = 0;
        self.rounds = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_without_work_are_not_busy() {
        let start = Instant::now();
        let at = |micros: u64| start + Duration::from_micros(micros);
        let mut meter = Meter::new(start);
        // Ten rounds without work in a microsecond.
        (0..10).for_each(|_| meter.round(false));
        let ns = Duration::from_nanos;
        assert_eq!(meter.tick(at(1)), Spent::Polling(ns(1000)));
        // Half of ten rounds took the rest of two microseconds.
        (0..10).for_each(|i| meter.round(i % 2 == 0));
        let (busy, polling) = (ns(1500), ns(1500));
        assert_eq!(meter.tick(at(3)), Spent::Working { busy, polling });
        meter.skip(at(1000));
        assert_eq!(meter.tick(at(1000)), Spent::Nothing);
        (0..10).for_each(|_| meter.round(true));
        let busy = ns(3500);
        assert_eq!(meter.tick(at(1002)), Spent::Working { busy, polling });
    }
}
