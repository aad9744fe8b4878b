//! The virtual clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Distance of the virtual clock's start from the real time. A deadline that some code computes
/// from the real time has thus always passed, however long a run takes.
const AHEAD: Duration = Duration::from_secs(1000 * 3600);

/// Clock that moves only when the scheduler says so. Clones show the same time.
#[derive(Clone, Debug)]
pub struct VirtualClock {
    epoch: Instant,
    ns: Arc<AtomicU64>,
}

impl VirtualClock {
    /// Creates a clock at time 0.
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            epoch: now.checked_add(AHEAD).unwrap_or(now),
            ns: Arc::default(),
        }
    }

    /// Returns the time since the clock's start.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.ns.load(Ordering::Relaxed))
    }

    /// Moves the clock.
    pub fn advance(&self, by: Duration) {
        let ns = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.ns.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Default for VirtualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl volume::Clock for VirtualClock {
    fn now(&self) -> Instant {
        self.epoch + self.elapsed()
    }
}
