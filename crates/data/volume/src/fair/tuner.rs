//! Search for the smallest number of outstanding requests at which the device reaches full speed.
//!
//! Two depths are compared by trying them in turns, several times, so that other activity on the
//! machine affects both. The smaller one is kept if the device did nearly as much with it. A
//! smaller one is tried when slices lose part of their share: they had all their requests in the
//! device, and fell behind nevertheless. A larger one is tried now and then.

use super::group::Figures;
use std::time::Duration;

const fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// Order in which a comparison tries its two depths; `true` is the larger one.
const TURNS: [bool; 8] = [false, true, true, false, false, true, true, false];
/// Minimum duration of a trial in nanoseconds. [`SETTLE`] is that of the settling time before it.
const TRIAL: u64 = nanoseconds(Duration::from_millis(4));
const SETTLE: u64 = nanoseconds(Duration::from_millis(1));
/// Maximum duration in nanoseconds of a trial, and of the settling time before it.
const MAX_TRIAL: u64 = nanoseconds(Duration::from_millis(200));
/// Number of requests per device slot in a trial. The settling time takes one per slot.
const ROUNDS: u64 = 4;
/// Minimum throughput of the smaller depth, in percent of the larger one's, for keeping it.
const MIN_THROUGHPUT_PERCENT: u64 = 97;
/// Percentage of all transferred bytes above which the bytes that slices lose count as unfair.
const MAX_LOSS_PERCENT: u64 = 3;
/// Interval in nanoseconds between two checks of the bytes that slices lose.
const LOSS_CHECK_INTERVAL: u64 = nanoseconds(Duration::from_millis(10));
/// Initial pause after a comparison that changed nothing, and the longest pause after several of
/// them.
const MIN_PAUSE: u64 = nanoseconds(Duration::from_millis(250));
const MAX_PAUSE: u64 = nanoseconds(Duration::from_secs(2));

/// Returns the next smaller queue depth to try, at least 1.
fn smaller(depth: usize) -> usize {
    depth - depth.div_ceil(4).min(depth - 1)
}

/// Returns the next larger queue depth to try, at most `most`.
fn larger(depth: usize, most: usize) -> usize {
    (depth + depth.div_ceil(3)).min(most)
}

/// Schedule of the attempts to change the queue depth in one direction (up or down).
#[derive(Debug, Default)]
struct Direction {
    /// Earliest time of the next attempt, in nanoseconds since the group's epoch.
    at: u64,
    pause: u64,
}

impl Direction {
    /// Records an attempt to change the depth. The pause grows after each attempt that changed
    /// nothing.
    fn tried(&mut self, now: u64, changed: bool) {
        self.pause = if changed {
            0
        } else {
            (2 * self.pause).clamp(MIN_PAUSE, MAX_PAUSE)
        };
        self.at = now.saturating_add(self.pause);
    }
}

/// Comparison in progress of the throughput at two queue depths.
#[derive(Debug)]
struct Comparison {
    small: usize,
    large: usize,
    /// Whether the depth under test is larger than the present one.
    up: bool,
    turn: usize,
    /// Whether the trial is being measured; before that, the device settles at the trial's depth.
    measuring: bool,
    /// Start time of the current trial in nanoseconds, and the counters at that time.
    since: (u64, Figures),
    /// Bytes and nanoseconds measured so far, at the smaller and at the larger depth.
    done: [(u64, u64); 2],
}

/// Tuner of a group's queue depth: the number of requests to keep outstanding in the device.
#[derive(Debug)]
pub(super) struct Tuner {
    most: usize,
    depth: usize,
    comparison: Option<Comparison>,
    up: Direction,
    down: Direction,
    /// Time of the last check of lost bytes in nanoseconds, and the counters at that time.
    since: (u64, Figures),
    /// Time of the last call of [`Tuner::look`], in nanoseconds since the group's epoch.
    looked: u64,
}

impl Tuner {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            depth: most,
            comparison: None,
            up: Direction::default(),
            down: Direction::default(),
            since: (0, Figures::default()),
            looked: 0,
        }
    }

    /// Evaluates the counters. Returns the depth from now on, and the time of the next call.
    pub(super) fn look(&mut self, now: u64, figures: Figures) -> (usize, u64) {
        let mut next = now + SETTLE;
        let before = std::mem::replace(&mut self.looked, now);
        if now.saturating_sub(before) > MAX_TRIAL {
            // There was no other slice to share with meanwhile: the device's work in that time is
            // no measure of a depth.
            self.comparison = None;
        }
        if let Some(comparison) = self.comparison.take() {
            self.comparison = self.compare(comparison, now, figures);
        } else {
            self.rest(now, figures);
        }
        let depth = match &self.comparison {
            Some(comparison) if *TURNS.get(comparison.turn).unwrap_or(&true) => comparison.large,
            Some(comparison) => comparison.small,
            None => {
                next = now + LOSS_CHECK_INTERVAL;
                self.depth
            }
        };
        (depth, next)
    }

    /// Checks for lost bytes, and decides whether to begin a comparison of two depths.
    fn rest(&mut self, now: u64, figures: Figures) {
        let (then, before) = std::mem::replace(&mut self.since, (now, figures));
        let work = figures.work.wrapping_sub(before.work);
        let lost = figures.lost.wrapping_sub(before.lost);
        // No thread looked for a long time: there was no other slice to share with.
        if work == 0 || now.saturating_sub(then) > MAX_TRIAL {
            return;
        }
        let unfair = lost.saturating_mul(100) > work.saturating_mul(MAX_LOSS_PERCENT);
        let small = smaller(self.depth);
        let large = larger(self.depth, self.most);
        let pair = if unfair && now >= self.down.at && small < self.depth {
            Some((small, self.depth, false))
        } else if now >= self.up.at && large > self.depth {
            Some((self.depth, large, true))
        } else {
            None
        };
        self.comparison = pair.map(|(small, large, up)| Comparison {
            small,
            large,
            up,
            turn: 0,
            measuring: false,
            since: (now, figures),
            done: [(0, 0); 2],
        });
    }

    /// Performs the next step of the comparison in progress. Returns `None` at its end.
    fn compare(
        &mut self,
        mut comparison: Comparison,
        now: u64,
        figures: Figures,
    ) -> Option<Comparison> {
        let (then, before) = comparison.since;
        let (time, requests) = (
            now.saturating_sub(then),
            figures.requests.wrapping_sub(before.requests),
        );
        let places = comparison.large as u64;
        let (least, wanted) = if comparison.measuring {
            (TRIAL, ROUNDS * places)
        } else {
            (SETTLE, places)
        };
        if (time < least || requests < wanted) && time < MAX_TRIAL {
            return Some(comparison);
        }
        comparison.since = (now, figures);
        if !comparison.measuring {
            comparison.measuring = true;
            return Some(comparison);
        }
        comparison.measuring = false;
        let large = TURNS.get(comparison.turn).copied().unwrap_or(true);
        if let Some((work, elapsed)) = comparison.done.get_mut(usize::from(large)) {
            *work += figures.work.wrapping_sub(before.work);
            *elapsed += time;
        }
        comparison.turn += 1;
        if comparison.turn < TURNS.len() {
            return Some(comparison);
        }
        let [(small, small_time), (large, large_time)] = comparison.done;
        let scaled = |work: u64, time: u64| u128::from(work) * u128::from(time);
        let enough = scaled(small, large_time) * 100
            >= scaled(large, small_time) * u128::from(MIN_THROUGHPUT_PERCENT);
        self.depth = if enough {
            comparison.small
        } else {
            comparison.large
        };
        let direction = if comparison.up {
            &mut self.up
        } else {
            &mut self.down
        };
        direction.tried(now, enough != comparison.up);
        self.since = (now, figures);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the smallest depth that the tuner settles on, for a device which does more with 32
    /// places than with fewer, and whose slices lose much. The device is idle for some seconds
    /// after look number `pause`.
    fn smallest(pause: u32) -> usize {
        let mut tuner = Tuner::new(32);
        let (mut now, mut figures, mut smallest) = (0, Figures::default(), 32);
        for look in 0..1000 {
            let (depth, next) = tuner.look(now, figures);
            let rate = if depth == 32 { 12 } else { 10 };
            let work = (next - now) * rate / 10;
            figures.work += work;
            figures.lost += work / 10;
            figures.requests += 1000;
            now = next;
            if look == pause {
                now += nanoseconds(Duration::from_secs(5));
            }
            if tuner.comparison.is_none() {
                smallest = smallest.min(tuner.depth);
            }
        }
        smallest
    }

    #[test]
    fn pause_does_not_affect_tuning() {
        for look in 0..200 {
            assert_eq!(smallest(look), 32, "a pause after look {look}");
        }
    }
}
