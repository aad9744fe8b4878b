//! Source of the current time, which tests replace.

use std::fmt::Debug;
use std::time::Instant;

/// Source of time, which tests replace by a clock of their own.
pub trait Clock: Send + Sync + Debug {
    /// Returns the current time.
    fn now(&self) -> Instant;
}

/// Monotonic clock of the system, the [`Clock`] outside tests.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
