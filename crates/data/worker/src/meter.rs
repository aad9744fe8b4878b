//! Measurement of a worker's load.

use std::time::{Duration, Instant};

/// Measures a worker's busy time from occasional readings of the clock. Time spent polling without
/// finding anything is not busy; consecutive rounds without work give its cost per round.
#[derive(Debug)]
pub(crate) struct Meter {
    last: Instant,
    /// Number of rounds without work since the time was last read.
    idle: u32,
    rounds: u32,
    /// Average duration of a round without work, in nanoseconds.
    cost: f64,
    busy: Duration,
    polling: Duration,
}

/// Use of the time since the previous reading of the clock, with totals up to now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimeUse {
    /// No round took place since the time was last read.
    Nothing,
    /// All rounds were without work. The value is the total polling time of the worker.
    Polling(Duration),
    /// At least one round had work. The values are total times of the worker.
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

    /// Counts a round; `worked` is whether it had work.
    #[inline]
    pub fn round(&mut self, worked: bool) {
        self.rounds += 1;
        self.idle += u32::from(!worked);
    }

    /// Attributes the time since the last call to the counted rounds.
    pub fn tick(&mut self, now: Instant) -> TimeUse {
        let mut spent = TimeUse::Nothing;
        let passed = now.saturating_duration_since(self.last);
        let nanos = passed.as_nanos() as f64;
        if self.rounds > 0 && self.idle == self.rounds {
            let sample = nanos / f64::from(self.idle);
            // Interruptions make rounds without work longer, never shorter.
            self.cost = if sample < self.cost {
                sample
            } else {
                self.cost + (sample - self.cost) / 64.0
            };
            self.polling += passed;
            spent = TimeUse::Polling(self.polling);
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
            spent = TimeUse::Working {
                busy: self.busy,
                polling: self.polling,
            };
        }
        self.skip(now);
        spent
    }

    /// Excludes a sleep that ends at `now` from the measured time.
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
        assert_eq!(meter.tick(at(1)), TimeUse::Polling(ns(1000)));
        // Half of ten rounds took the rest of two microseconds.
        (0..10).for_each(|i| meter.round(i % 2 == 0));
        let (busy, polling) = (ns(1500), ns(1500));
        assert_eq!(meter.tick(at(3)), TimeUse::Working { busy, polling });
        meter.skip(at(1000));
        assert_eq!(meter.tick(at(1000)), TimeUse::Nothing);
        (0..10).for_each(|_| meter.round(true));
        let busy = ns(3500);
        assert_eq!(meter.tick(at(1002)), TimeUse::Working { busy, polling });
    }
}
