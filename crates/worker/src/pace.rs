//! When a loop worked and slept, and whether it goes on polling.

use crate::{IdleWindow, Window};
use std::time::Instant;

/// A loop's account of its work and its sleep, which the [`Window`] follows.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    window: Window,
    last_work: Instant,
    slept: bool,
}

impl Pace {
    /// Of a loop that begins to poll at `now`.
    pub fn new(asked: IdleWindow, now: Instant) -> Self {
        Self {
            window: Window::new(asked),
            last_work: now,
            slept: false,
        }
    }

    /// A round found work. The first one after a sleep tells the window how long the pause was.
    #[inline]
    pub fn worked(&mut self, now: Instant) {
        if std::mem::take(&mut self.slept) {
            self.window
                .woken(now.saturating_duration_since(self.last_work));
        }
        self.last_work = now;
    }

    /// The loop was asleep in the kernel.
    pub fn slept(&mut self) {
        self.slept = true;
    }

    /// The loop goes on polling: the window since the last work has not passed.
    #[inline]
    pub fn polls(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_work) < self.window.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn a_short_sleep_makes_the_window_cover_the_next_pause() {
        let start = Instant::now();
        let mut pace = Pace::new(IdleWindow::Adaptive, start);
        assert!(pace.polls(start + us(19)) && !pace.polls(start + us(20)));
        pace.slept();
        pace.worked(start + us(200));
        assert!(pace.polls(start + us(399)), "{pace:?}");
        // Only the first work after a sleep measures a pause.
        pace.worked(start + us(5000));
        assert!(pace.polls(start + us(5399)), "{pace:?}");
        pace.slept();
        pace.worked(start + us(900_000));
        assert!(!pace.polls(start + us(900_200)), "{pace:?}");
    }

    #[test]
    fn no_window_means_no_polling() {
        let start = Instant::now();
        let mut pace = Pace::new(IdleWindow::Fixed(Duration::ZERO), start);
        assert!(!pace.polls(start));
        pace.slept();
        pace.worked(start + us(100));
        assert!(!pace.polls(start + us(100)));
    }
}
