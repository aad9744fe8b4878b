//! How long a loop goes on polling after its last work, before it sleeps.
//!
//! A sleep that ends soon was a mistake: it cost the host a register write and the loop a wake-up,
//! and a little more polling would have spared both. A sleep that lasts was right, and the polling
//! before it was wasted. So the window grows to cover the pauses that are seen, as long as they are
//! short, and shrinks when they are not. One long pause between short ones says nothing of the
//! load: on a machine whose processors are wanted by others, the host or this thread was kept
//! waiting. So several in a row are needed.

use std::str::FromStr;
use std::time::Duration;

/// The shortest window of [`IdleWindow::Adaptive`]: as long as a wake-up takes, about.
const MIN: Duration = Duration::from_micros(20);
/// The longest: pauses beyond it are slept through.
const MAX: Duration = Duration::from_millis(1);
/// So many pauses in a row that are longer make the window smaller.
const LONG_IN_A_ROW: u32 = 4;

/// What the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleWindow {
    /// From 20 microseconds to a millisecond, as the load has it.
    #[default]
    Adaptive,
    /// Always this long; zero: sleep at once.
    Fixed(Duration),
}

/// Text that is no [`IdleWindow`].
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

/// The window as it stands.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    asked: IdleWindow,
    now: Duration,
    /// Pauses that were too long to be polled through, since the last one that was not.
    long: u32,
}

impl Window {
    /// At first the shortest that may be chosen.
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

    /// Polling goes on for this long after the last work.
    pub fn get(&self) -> Duration {
        self.now
    }

    /// Work came after a sleep, `pause` after the work before it.
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
    fn short_pauses_are_polled_through() {
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
    fn long_pauses_are_slept_through() {
        let mut window = Window::new(IdleWindow::Adaptive);
        window.woken(us(900));
        for _ in 0..10 {
            window.woken(us(100_000));
        }
        assert_eq!(window.get(), MIN);
    }

    #[test]
    fn a_few_long_pauses_between_short_ones_change_nothing() {
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
    fn a_fixed_window_is_fixed() {
        for micros in [0, 50] {
            let mut window = Window::new(IdleWindow::Fixed(us(micros)));
            window.woken(us(100));
            window.woken(us(100_000));
            assert_eq!(window.get(), us(micros));
        }
    }

    #[test]
    fn what_users_write() {
        assert_eq!("auto".parse(), Ok(IdleWindow::Adaptive));
        assert_eq!("50".parse(), Ok(IdleWindow::Fixed(us(50))));
        for bad in ["", "-1", "1ms", "always"] {
            assert!(bad.parse::<IdleWindow>().is_err(), "{bad}");
        }
    }
}
