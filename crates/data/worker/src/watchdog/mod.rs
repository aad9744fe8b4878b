//! Detection of workers that make no progress, with their activity and the time since their last
//! round.
//!
//! A worker publishes its activity ([`Pulse`]): a plain store at each step of a round, and a beat
//! each time it reads the clock. A thread that calls [`Watchdog::look`] periodically finds workers
//! whose pulse does not beat. The watchdog stops and wakes nothing. Its report separates a stuck
//! worker from a fault of the guest, and the end of the process need not wait for such a worker.

mod activity;
mod kernel;
mod pulse;

pub use activity::Activity;
pub use pulse::Pulse;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number and duration of a worker's stalls. Only the watchdog writes them.
#[derive(Debug, Default)]
pub struct Stalls {
    count: AtomicU64,
    longest_ns: AtomicU64,
    now_ns: AtomicU64,
}

impl Stalls {
    /// Returns how many times the worker has made no progress for longer than the limit.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the duration of the worker's longest stall.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest_ns.load(Ordering::Relaxed))
    }

    /// Returns the duration of the present stall as of the last check; zero when there is none.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns.load(Ordering::Relaxed))
    }

    fn set(&self, count: u64, now: Duration) {
        let nanos = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        self.count.store(count, Ordering::Relaxed);
        self.now_ns.store(nanos, Ordering::Relaxed);
        self.longest_ns.fetch_max(nanos, Ordering::Relaxed);
    }
}

/// Result of a check by the watchdog. Times are as precise as checks are frequent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// The worker makes no progress. Each stall is reported once.
    Stuck {
        /// Index of the worker that makes no progress.
        worker: usize,
        /// Activity in which the worker is stuck.
        activity: Activity,
        /// Time for which the worker has made no progress.
        time: Duration,
    },
    /// The worker makes progress again.
    Recovered {
        /// Index of the worker that makes progress again.
        worker: usize,
        /// Time for which the worker had made no progress.
        time: Duration,
    },
}

/// Progress of a worker when the watchdog last checked it.
struct WatchedWorker {
    pulse: Arc<Pulse>,
    stalls: Arc<Stalls>,
    beats: u64,
    /// Time of the first check that found the present count of progress.
    since: Instant,
    /// Whether the present stall was reported.
    told: bool,
}

/// Watchdog that detects workers without progress. Another thread calls it.
pub struct Watchdog {
    limit: Duration,
    watched: Vec<WatchedWorker>,
    /// Time of the watchdog's last check.
    looked: Instant,
}

impl Watchdog {
    /// Creates a watchdog for workers that must each make progress within `limit`.
    pub fn new(
        limit: Duration,
        workers: impl IntoIterator<Item = (Arc<Pulse>, Arc<Stalls>)>,
        now: Instant,
    ) -> Self {
        let watched = workers.into_iter().map(|(pulse, stalls)| WatchedWorker {
            pulse,
            stalls,
            beats: 0,
            since: now,
            told: false,
        });
        Self {
            limit,
            watched: watched.collect(),
            looked: now,
        }
    }

    /// Checks all workers; to be called at least once within the limit.
    pub fn look(&mut self, now: Instant) -> Vec<Finding> {
        let mut findings = Vec::new();
        let pause = now.saturating_duration_since(self.looked);
        self.looked = now;
        // The whole process or its machine was suspended, which is no fault of a worker.
        let was_away = pause > 2 * self.limit;
        for (worker, watched) in self.watched.iter_mut().enumerate() {
            let activity = watched.pulse.activity();
            let beats = watched.pulse.beats();
            if was_away && !watched.told {
                watched.since = now;
            }
            let time = now.saturating_duration_since(watched.since);
            if beats != watched.beats || activity.may_last() {
                if std::mem::take(&mut watched.told) {
                    watched.stalls.set(watched.stalls.count(), time);
                    findings.push(Finding::Recovered { worker, time });
                }
                watched.stalls.set(watched.stalls.count(), Duration::ZERO);
                watched.beats = beats;
                watched.since = now;
            } else if time >= self.limit {
                let count = watched.stalls.count() + u64::from(!watched.told);
                watched.stalls.set(count, time);
                if !std::mem::replace(&mut watched.told, true) {
                    findings.push(Finding::Stuck {
                        worker,
                        activity,
                        time,
                    });
                }
            }
        }
        findings
    }

    /// Returns the time without progress of a worker, as of the last check.
    pub fn stuck_for(&self, worker: usize, now: Instant) -> Duration {
        self.watched.get(worker).map_or(Duration::ZERO, |watched| {
            now.saturating_duration_since(watched.since)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn watched() -> (Arc<Pulse>, Arc<Stalls>) {
        Default::default()
    }

    #[test]
    fn stalled_worker_is_reported_once_and_on_recovery() {
        let start = Instant::now();
        let (stuck, busy) = (watched(), watched());
        let mut watchdog = Watchdog::new(SECOND, [stuck.clone(), busy.clone()], start);
        for (pulse, _) in [&stuck, &busy] {
            pulse.enter(Activity::Round);
            pulse.beat();
        }
        assert_eq!(watchdog.look(start), []);
        stuck.0.enter(Activity::Polling(3));
        busy.0.beat();
        assert_eq!(watchdog.look(start + SECOND / 2), []);
        busy.0.beat();
        let finding = Finding::Stuck {
            worker: 0,
            activity: Activity::Polling(3),
            time: SECOND,
        };
        assert_eq!(watchdog.look(start + SECOND), [finding]);
        busy.0.beat();
        assert_eq!(watchdog.look(start + 2 * SECOND), [], "it was told");
        assert_eq!((stuck.1.count(), stuck.1.now()), (1, 2 * SECOND));
        assert_eq!(watchdog.stuck_for(0, start + 2 * SECOND), 2 * SECOND);
        stuck.0.beat();
        busy.0.beat();
        let time = 3 * SECOND;
        let finding = Finding::Recovered { worker: 0, time };
        assert_eq!(watchdog.look(start + time), [finding]);
        let stalls = &stuck.1;
        assert_eq!(
            (stalls.count(), stalls.longest(), stalls.now()),
            (1, time, Duration::ZERO)
        );
        assert_eq!(busy.1.count(), 0);
        assert_eq!(watchdog.stuck_for(0, start + time), Duration::ZERO);
    }

    #[test]
    fn sleep_of_any_length_is_not_reported() {
        let start = Instant::now();
        let sleeper = watched();
        let mut watchdog = Watchdog::new(SECOND, [sleeper.clone()], start);
        let mut now = start;
        for activity in [Activity::Starting, Activity::Asleep, Activity::Ended] {
            sleeper.0.enter(activity);
            for _ in 0..10 {
                now += SECOND;
                assert_eq!(watchdog.look(now), []);
            }
        }
        // The worker woke up just before the look.
        sleeper.0.enter(Activity::Socket(0));
        sleeper.0.beat();
        assert_eq!(watchdog.look(now + SECOND), []);
        assert_eq!(watchdog.look(now + 2 * SECOND).len(), 1, "there it is now");
    }

    #[test]
    fn worker_stopped_with_all_others_is_not_reported() {
        let start = Instant::now();
        let (busy, stuck) = (watched(), watched());
        let mut watchdog = Watchdog::new(SECOND, [busy.clone(), stuck.clone()], start);
        for (pulse, _) in [&busy, &stuck] {
            pulse.enter(Activity::Round);
        }
        let later = start + 100 * SECOND;
        assert_eq!(watchdog.look(later), []);
        busy.0.beat();
        let findings = watchdog.look(later + SECOND);
        assert!(
            matches!(findings[..], [Finding::Stuck { worker: 1, .. }]),
            "{findings:?}"
        );
    }
}
