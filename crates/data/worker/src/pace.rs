//! A loop's record of work and sleep, and the decision whether it continues to poll.

use crate::{IdleWindow, Window};
use std::time::{Duration, Instant};

/// Time by which a nap shortens the polling window: about the processor time that it costs.
const NAP_COUNTS: Duration = Duration::from_micros(10);

/// Record of a loop's work and sleep, from which the polling [`Window`] adapts.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    window: Window,
    last_work: Instant,
    slept: bool,
}

impl Pace {
    /// Creates the record of a loop that begins to poll at `now`; `asked` is the configured window.
    pub fn new(asked: IdleWindow, now: Instant) -> Self {
        Self {
            window: Window::new(asked),
            last_work: now,
            slept: false,
        }
    }

    /// Records a round with work. The first one after a sleep reports the length of the pause to
    /// the window.
    #[inline]
    pub fn worked(&mut self, now: Instant) {
        if std::mem::take(&mut self.slept) {
            self.window
                .woken(now.saturating_duration_since(self.last_work));
        }
        self.last_work = now;
    }

    /// Excludes a gap from the window: the thread had no processor, so nothing was polled.
    pub fn gap(&mut self, gap: Duration, now: Instant) {
        self.last_work = (self.last_work + gap).min(now);
    }

    /// Records a short pause of the loop from `before` to `now`.
    pub fn napped(&mut self, before: Instant, now: Instant) {
        let uncounted = now.saturating_duration_since(before);
        let uncounted = uncounted.saturating_sub(NAP_COUNTS);
        self.last_work = (self.last_work + uncounted).min(now);
    }

    /// Records that the loop has slept in the kernel.
    pub fn slept(&mut self) {
        self.slept = true;
    }

    /// Returns whether the loop continues to poll, because the window since the last work has not
    /// passed.
    #[inline]
    pub fn polls(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_work) < self.window.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn short_sleep_extends_window_over_next_pause() {
        let start = Instant::now();
        let mut pace = Pace::new(IdleWindow::Adaptive, start);
        assert!(pace.polls(start + us(19)) && !pace.polls(start + us(20)));
        pace.slept();
        pace.worked(start + us(200));
        assert!(pace.polls(start + us(399)), "{pace:?}");
        // Only the first work after a sleep measures a pause.
        pace.worked(start + us(5000));
        assert!(pace.polls(start + us(5399)), "{pace:?}");
        // Several long pauses shrink the window.
        for pause in 1..10 {
            pace.slept();
            pace.worked(start + us(pause * 900_000));
        }
        assert!(!pace.polls(start + us(9 * 900_000 + 200)), "{pace:?}");
    }

    #[test]
    fn time_without_cpu_is_not_part_of_window() {
        let start = Instant::now();
        let mut pace = Pace::new(IdleWindow::Fixed(us(50)), start);
        pace.gap(us(3000), start + us(3040));
        assert!(pace.polls(start + us(3049)), "{pace:?}");
        assert!(!pace.polls(start + us(3050)), "{pace:?}");
        // The time of the last work never exceeds the clock.
        pace.worked(start + us(4000));
        pace.gap(us(200), start + us(4100));
        assert!(!pace.polls(start + us(4150)), "{pace:?}");
    }

    #[test]
    fn nap_counts_as_ten_microseconds_of_polling() {
        let start = Instant::now();
        let mut pace = Pace::new(IdleWindow::Fixed(us(50)), start);
        let mut now = start;
        for _ in 0..4 {
            pace.napped(now, now + us(60));
            now += us(60);
            assert!(pace.polls(now), "{pace:?}");
        }
        pace.napped(now, now + us(60));
        assert!(!pace.polls(now + us(60)), "{pace:?}");
    }

    #[test]
    fn zero_window_disables_polling() {
        let start = Instant::now();
        let mut pace = Pace::new(IdleWindow::Fixed(Duration::ZERO), start);
        assert!(!pace.polls(start));
        pace.slept();
        pace.worked(start + us(100));
        assert!(!pace.polls(start + us(100)));
    }
}
