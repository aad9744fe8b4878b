//! Detection of stuck workers: log messages, and counters for `vnvme stats`.

use crate::front::Handle;
use crate::serve::peers::Peers;
use control::api::WorkerCounters;
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker::{Activity, Finding, Watchdog};

/// Time without a round of its loop after which a worker is reported as stuck.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Watchdog that notices workers that make no progress. The timer thread calls it.
pub struct Watch {
    peers: Arc<Peers>,
    watchdog: Watchdog,
}

impl Watch {
    /// Creates the watchdog of all workers.
    pub fn new(peers: &Arc<Peers>) -> Self {
        let pulses = peers
            .handles()
            .iter()
            .map(|handle| (handle.pulse().clone(), handle.stalls().clone()));
        Self {
            watchdog: Watchdog::new(STALL_TIMEOUT, pulses, Instant::now()),
            peers: peers.clone(),
        }
    }

    /// Checks all workers, and logs when one becomes stuck or continues.
    pub fn look(&mut self) {
        for finding in self.watchdog.look(Instant::now()) {
            match finding {
                Finding::Stuck { worker, time, .. } => tracing::warn!(
                    "worker-{worker} has made no round for {:.1} s: {}",
                    time.as_secs_f64(),
                    self.describe(worker)
                ),
                Finding::Recovered { worker, time } => tracing::warn!(
                    "worker-{worker} continues after {:.1} s without a round",
                    time.as_secs_f64()
                ),
            }
        }
    }

    /// Returns whether a worker that must end has made no round for `limit`, or for `closing` if
    /// that is longer and it is closing something. A worker that has not started yet may be waiting
    /// for a file to open.
    pub fn is_stuck(&self, worker: usize, limit: Duration, closing: Duration) -> bool {
        let time = self.watchdog.stuck_for(worker, Instant::now());
        let handle = self.peers.handle(worker);
        match handle.map(|handle| handle.pulse().activity()) {
            None | Some(Activity::Starting) => true,
            Some(Activity::Closing(_)) => time >= limit.max(closing),
            Some(_) => time >= limit,
        }
    }

    /// Returns whether no worker has made a round for `limit`, so that the process is stuck.
    pub fn all_stuck(&self, limit: Duration) -> bool {
        let mut workers = 0..self.peers.count();
        workers.all(|worker| self.is_stuck(worker, limit, limit))
    }

    /// Returns a description of the work that a worker is doing, for the log.
    pub fn describe(&self, worker: usize) -> String {
        self.peers.handle(worker).map_or_else(String::new, describe)
    }

    /// Returns the names of the disks that a worker serves.
    pub fn names(&self, worker: usize) -> Vec<String> {
        self.peers
            .handle(worker)
            .map_or_else(Vec::new, Handle::names)
    }
}

/// Describes what a worker is doing: its client, and where its thread is in the kernel.
fn describe(handle: &Handle) -> String {
    let pulse = handle.pulse();
    let activity = pulse.activity();
    let name = activity.owner().and_then(|owner| handle.name(owner));
    let of = name.map_or_else(String::new, |name| format!(" of {name}"));
    let thread = pulse.in_kernel();
    let thread = thread.map_or_else(String::new, |text| format!("; its thread is {text}"));
    format!("{activity}{of}{thread}")
}

/// Returns the counters of all workers, for the management API.
pub fn counters(peers: &Peers) -> Vec<WorkerCounters> {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let all = peers.handles().iter().enumerate().map(|(index, handle)| {
        let stalls = handle.stalls();
        let now = stalls.now();
        WorkerCounters {
            thread: format!("worker-{index}"),
            stalls: stalls.count(),
            longest_stall_ms: millis(stalls.longest()),
            stalled_ms: millis(now),
            doing: (!now.is_zero()).then(|| describe(handle)),
        }
    });
    all.collect()
}
