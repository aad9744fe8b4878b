//! Times at which to log that something is still waited for.

use std::time::{Duration, Instant};

/// Time until the first line; the next ones follow at growing intervals of up to a minute.
const FIRST: Duration = Duration::from_millis(200);
const MAX_INTERVAL: Duration = Duration::from_secs(60);

/// Timer of a wait, which also decides when log messages about the wait are due.
#[derive(Debug)]
pub struct WaitLog {
    began: Instant,
    /// Time of the next log message, counted from the beginning of the wait.
    next: Duration,
    said: bool,
}

impl Default for WaitLog {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            next: FIRST,
            said: false,
        }
    }
}

impl WaitLog {
    /// Returns the duration of the wait so far.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the duration of the wait so far if a log message is due, otherwise `None`.
    pub fn due(&mut self) -> Option<Duration> {
        let waited = self.elapsed();
        if waited < self.next {
            return None;
        }
        self.said = true;
        self.next = waited.saturating_add(waited.clamp(FIRST, MAX_INTERVAL));
        Some(waited)
    }

    /// Returns the time until the next log message is due.
    pub fn next(&self) -> Duration {
        self.next.saturating_sub(self.elapsed())
    }

    /// Returns the duration of the wait if a message has been logged: then its end should be
    /// logged, too.
    pub fn said(&self) -> Option<Duration> {
        self.said.then(|| self.elapsed())
    }
}
