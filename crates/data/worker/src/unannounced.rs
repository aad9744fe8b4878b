//! Polling at intervals, for idle front-ends with unannounced commands
//! ([`Frontend::is_unannounced`]).
//!
//! A client that writes doorbells in shared memory wakes no thread. While such a front-end has
//! work, and for [`POLL_AFTER`] afterwards, the thread polls. Then it sleeps between two polls, for
//! a fraction of the idle time, so that a command waits for a small part of the pause before it.

use crate::Frontend;
use crate::worker_loop::Worker;
use std::time::{Duration, Instant};

/// Time for which the thread polls without sleep after the last work of such a front-end.
const POLL_AFTER: Duration = Duration::from_millis(10);
/// Fraction of the idle time after which the front-ends are polled again.
const IDLE_FRACTION: u32 = 16;

/// Default of [`Options::max_poll_interval`](crate::Options::max_poll_interval).
pub const DEFAULT_MAX_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// State of polling at intervals.
#[derive(Debug)]
pub(crate) struct IntervalPolling {
    /// Maximum interval; zero: the thread never sleeps.
    max: Duration,
    /// Time at which the last front-end of this kind became idle.
    idle_since: Instant,
    /// Time of the next poll, if the thread sleeps or has armed front-ends of this kind.
    next: Instant,
    /// Owner numbers of front-ends of this kind that were armed, so that rounds do not poll them.
    armed: Vec<u16>,
}

impl IntervalPolling {
    pub(crate) fn new(max: Duration, now: Instant) -> Self {
        Self {
            max,
            idle_since: now,
            next: now,
            armed: Vec::new(),
        }
    }

    /// Records that a front-end has become idle.
    pub(crate) fn became_idle(&mut self, now: Instant) {
        self.idle_since = now;
        self.next = now;
    }

    /// Records that a front-end is armed.
    pub(crate) fn armed(&mut self, owner: u16) {
        if !self.armed.contains(&owner) {
            self.armed.push(owner);
        }
    }

    /// Returns whether idle front-ends are polled without sleep.
    pub(crate) fn is_continuous(&self, now: Instant) -> bool {
        self.max.is_zero() || now.saturating_duration_since(self.idle_since) < POLL_AFTER
    }

    fn interval(&self, now: Instant) -> Duration {
        let idle = now.saturating_duration_since(self.idle_since);
        (idle / IDLE_FRACTION).min(self.max)
    }
}

impl<F: Frontend + 'static> Worker<F> {
    /// Returns whether the thread must not sleep because of unannounced commands.
    #[inline]
    pub(crate) fn polls_unannounced(&self) -> bool {
        self.of(self.run_queue.hot()).any(F::is_unannounced)
            || (self.awake().any(F::is_unannounced)
                && self.unannounced.is_continuous(self.turns.now))
    }

    /// Returns the time of the next poll, if there are front-ends with unannounced commands.
    pub(crate) fn next_interval_poll(&self) -> Option<Instant> {
        let any = !self.unannounced.armed.is_empty() || self.awake().any(F::is_unannounced);
        any.then_some(self.unannounced.next)
    }

    /// Polls the idle front-ends with unannounced commands, if that is due.
    pub(crate) fn poll_unannounced(&mut self) {
        let now = self.turns.now;
        if now < self.unannounced.next {
            return;
        }
        let mut place = self.run_queue.hot_count();
        while let Some(at) = self.run_queue.idle_at(place) {
            if self.of(std::iter::once(at)).any(F::is_unannounced) {
                self.visit(at);
            }
            place += 1;
        }
        let mut armed = std::mem::take(&mut self.unannounced.armed);
        armed.retain(|owner| {
            let at = usize::from(*owner);
            self.of(std::iter::once(at)).any(F::is_unannounced) && !self.visit(at)
        });
        self.unannounced.armed = armed;
        self.unannounced.next = now + self.unannounced.interval(now);
    }
}
