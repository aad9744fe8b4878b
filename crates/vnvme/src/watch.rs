//! Workers that stand still: a line in the log, and counters for `vnvme stats`.

use crate::front::Handle;
use crate::peers::Peers;
use output::{OutputError, outln};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker::{Activity, Finding, Watchdog};

/// A worker that makes no round for so long is named.
const LIMIT: Duration = Duration::from_secs(1);

/// Looks at all workers, from the thread that keeps the time of the process.
pub struct Watch {
    peers: Arc<Peers>,
    watchdog: Watchdog,
}

impl Watch {
    /// Of all workers.
    pub fn new(peers: &Arc<Peers>) -> Self {
        let pulses = peers
            .handles()
            .iter()
            .map(|handle| (handle.pulse().clone(), handle.stalls().clone()));
        Self {
            watchdog: Watchdog::new(LIMIT, pulses, Instant::now()),
            peers: peers.clone(),
        }
    }

    /// Looks, and says what has changed.
    pub fn look(&mut self) {
        for finding in self.watchdog.look(Instant::now()) {
            match finding {
                Finding::Stuck { worker, time, .. } => tracing::warn!(
                    "worker-{worker} has made no round for {:.1} s: {}",
                    time.as_secs_f64(),
                    self.describe(worker)
                ),
                Finding::Recovered { worker, time } => tracing::warn!(
                    "worker-{worker} goes on after {:.1} s without a round",
                    time.as_secs_f64()
                ),
            }
        }
    }

    /// Whether a worker that is to end makes no round, for `limit`, or for `closing` if that is
    /// longer and it closes something. One that has not begun may wait for a file to be opened.
    pub fn is_stuck(&self, worker: usize, limit: Duration, closing: Duration) -> bool {
        let time = self.watchdog.stuck_for(worker, Instant::now());
        let handle = self.peers.handle(worker);
        match handle.map(|handle| handle.pulse().activity()) {
            None | Some(Activity::Starting) => true,
            Some(Activity::Closing(_)) => time >= limit.max(closing),
            Some(_) => time >= limit,
        }
    }

    /// What a worker is doing.
    pub fn describe(&self, worker: usize) -> String {
        self.peers.handle(worker).map_or_else(String::new, describe)
    }

    /// What a worker serves.
    pub fn names(&self, worker: usize) -> Vec<String> {
        self.peers
            .handle(worker)
            .map_or_else(Vec::new, Handle::names)
    }
}

/// What a worker is doing, for which client, and where its thread is.
fn describe(handle: &Handle) -> String {
    let pulse = handle.pulse();
    let activity = pulse.activity();
    let name = activity.owner().and_then(|owner| handle.name(owner));
    let of = name.map_or_else(String::new, |name| format!(" of {name}"));
    let thread = pulse.in_kernel();
    let thread = thread.map_or_else(String::new, |text| format!("; its thread is {text}"));
    format!("{activity}{of}{thread}")
}

/// Counters of one worker.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct WorkerCounters {
    /// Its thread.
    pub thread: String,
    /// Times that it made no round for a second or longer.
    pub stalls: u64,
    /// The longest of them in milliseconds.
    pub longest_stall_ms: u64,
    /// It stands still now, and has for so long, in milliseconds; 0: it does not.
    pub stalled_ms: u64,
    /// What it does, if it stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
}

impl WorkerCounters {
    /// Of all workers.
    pub fn of_all(peers: &Peers) -> Vec<Self> {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let all = peers.handles().iter().enumerate().map(|(index, handle)| {
            let stalls = handle.stalls();
            let now = stalls.now();
            Self {
                thread: format!("worker-{index}"),
                stalls: stalls.count(),
                longest_stall_ms: millis(stalls.longest()),
                stalled_ms: millis(now),
                doing: (!now.is_zero()).then(|| describe(handle)),
            }
        });
        all.collect()
    }

    /// Prints a line for people, if there is something to say.
    pub fn print(&self) -> Result<(), OutputError> {
        if self.stalls > 0 {
            let now = match &self.doing {
                Some(doing) => format!("   stands still for {} ms: {doing}", self.stalled_ms),
                None => String::new(),
            };
            outln!(
                "{}: stalls {}   longest {} ms{now}",
                self.thread,
                self.stalls,
                self.longest_stall_ms
            );
        }
        Ok(())
    }
}
