//! Time for which a loop continues to poll after its last work, before it sleeps.
//!
//! A short sleep is a mistake: it costs the host a register write and the loop a wake-up, which a
//! little more polling would have spared. A long sleep is right, and the polling before it was
//! wasted. The window therefore grows to cover observed pauses as long as they are short, and
//! shrinks when they are long. One long pause between short ones is no sign of the load: on a
//! contended machine the host or this thread may have waited for a processor. Only several long
//! pauses in a row shrink the window.

use std::str::FromStr;
use std::time::Duration;

/// Minimum polling window of [`IdleWindow::Adaptive`]: about the duration of a wake-up.
const MIN: Duration = Duration::from_micros(20);
/// Maximum polling window. Pauses that are longer are better slept through.
const MAX: Duration = Duration::from_millis(1);
/// Number of consecutive pauses longer than the window after which the window shrinks.
const LONG_IN_A_ROW: u32 = 4;

/// Configured polling window: how long a loop polls after its last work before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleWindow {
    /// From 20 microseconds to a millisecond, adapted to the load.
    #[default]
    Adaptive,
    /// Constant window. With zero the loop sleeps at once.
    Fixed(Duration),
}

/// Error for a text that is not a valid [`IdleWindow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"auto\" or a number of microseconds is wanted")]
pub struct WindowError;

impl FromStr for IdleWindow {
    type Err = WindowError;

    fn from_str(text: &str) -> Result<Self, WindowError> {
        if text == "auto" {
            return Ok(IdleWindow::Adaptive);
        }
        let micros = text.parse().map_err(|_| WindowError)?;
        Ok(IdleWindow::Fixed(Duration::from_micros(micros)))
    }
}

/// Polling window of a loop: how long it polls on after the last work.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    asked: IdleWindow,
    now: Duration,
    /// Number of pauses in a row that were too long to be polled through.
    long: u32,
}

impl Window {
    /// Creates a polling window; an adaptive one begins with the minimum.
    pub fn new(asked: IdleWindow) -> Self {
        let now = match asked {
            IdleWindow::Adaptive => MIN,
            IdleWindow::Fixed(window) => window,
        };
        Window {
            asked,
            now,
            long: 0,
        }
    }

    /// Returns the time for which polling continues after the last work.
    pub fn get(&self) -> Duration {
        self.now
    }

    /// Adapts the window to a sleep that ended with work, `pause` after the work before it.
    pub fn woken(&mut self, pause: Duration) {
        if self.asked != IdleWindow::Adaptive {
            return;
        }
        if pause <= MAX {
            self.long = 0;
            // Twice, since pauses are not all equal.
            self.now = self.now.max(pause * 2).min(MAX);
            return;
        }
        self.long += 1;
        if self.long >= LONG_IN_A_ROW {
            self.now = (self.now / 2).max(MIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn short_pauses_are_covered_by_polling() {
        let mut window = Window::new(IdleWindow::Adaptive);
        assert_eq!(window.get(), MIN);
        window.woken(us(250));
        assert!(window.get() >= us(250), "{window:?}");
        let wide = window.get();
        window.woken(us(30));
        assert_eq!(window.get(), wide, "a shorter one changes nothing");
        window.woken(us(900));
        assert_eq!(window.get(), MAX);
    }

    #[test]
    fn long_pauses_are_slept() {
        let mut window = Window::new(IdleWindow::Adaptive);
        window.woken(us(900));
        for _ in 0..10 {
            window.woken(us(100_000));
        }
        assert_eq!(window.get(), MIN);
    }

    #[test]
    fn few_long_pauses_do_not_change_window() {
        let mut window = Window::new(IdleWindow::Adaptive);
        window.woken(us(300));
        let wide = window.get();
        for _ in 0..10 {
            for _ in 1..LONG_IN_A_ROW {
                window.woken(us(5000));
            }
            assert_eq!(window.get(), wide);
            window.woken(us(300));
        }
        for _ in 0..LONG_IN_A_ROW {
            window.woken(us(5000));
        }
        assert!(window.get() < wide, "{window:?}");
    }

    #[test]
    fn fixed_window_stays_fixed() {
        for micros in [0, 50] {
            let mut window = Window::new(IdleWindow::Fixed(us(micros)));
            window.woken(us(100));
            window.woken(us(100_000));
            assert_eq!(window.get(), us(micros));
        }
    }

    #[test]
    fn idle_window_option_is_parsed() {
        assert_eq!("auto".parse(), Ok(IdleWindow::Adaptive));
        assert_eq!("50".parse(), Ok(IdleWindow::Fixed(us(50))));
        for bad in ["", "-1", "1ms", "always"] {
            assert!(bad.parse::<IdleWindow>().is_err(), "{bad}");
        }
    }
}
