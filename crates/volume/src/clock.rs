//! Source of the current time, which tests replace.

use std::fmt::Debug;
use std::time::Instant;

/// A source of time.
pub trait Clock: Send + Sync + Debug {
    /// Returns the current time.
    fn now(&self) -> Instant;
}

/// The system's monotonic clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
