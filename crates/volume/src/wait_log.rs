//! When to write a line about something that is waited for.

use std::time::{Duration, Instant};

/// The first line comes after so long, the next ones at growing intervals of up to a minute.
const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(60);

/// How long something is waited for, and when to say so: soon, and then ever more rarely.
#[derive(Debug)]
pub struct WaitLog {
    began: Instant,
    /// The next line is due, counted from the beginning.
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
    /// How long it has been waited.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// A line is due, which says that it has been waited for so long.
    pub fn due(&mut self) -> Option<Duration> {
        let waited = self.elapsed();
        if waited < self.next {
            return None;
        }
        self.said = true;
        self.next = waited.saturating_add(waited.clamp(FIRST, LONGEST));
        Some(waited)
    }

    /// How long it is until the next line is due.
    pub fn next(&self) -> Duration {
        self.next.saturating_sub(self.elapsed())
    }

    /// A line has been written: how long it has been waited by now. The end of it deserves one,
    /// too.
    pub fn said(&self) -> Option<Duration> {
        self.said.then(|| self.elapsed())
    }
}
