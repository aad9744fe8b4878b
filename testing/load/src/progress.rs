//! Progress display: a bar on a terminal, otherwise an occasional line.

use crate::Watch;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Interval of progress lines when standard error is not a terminal.
const LINES_APART: Duration = Duration::from_secs(10);

/// Progress display of one job, on standard error.
pub struct Progress {
    bar: ProgressBar,
    terminal: bool,
    runtime: Option<Duration>,
    last: (Instant, u64),
    rate: f64,
    said: Instant,
}

impl Progress {
    /// Creates the display of a job that measures for `runtime`, if known. `quiet`: show nothing.
    pub fn new(runtime: Option<Duration>, quiet: bool) -> Self {
        let terminal = !quiet && std::io::stderr().is_terminal();
        let target = if terminal {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        };
        let length = runtime.map_or(0, |r| r.as_millis() as u64);
        let bar = ProgressBar::with_draw_target(Some(length), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3}%  {msg}") {
            bar.set_style(style);
        }
        let now = Instant::now();
        Self {
            bar,
            terminal,
            runtime,
            last: (now, 0),
            rate: 0.0,
            said: if quiet {
                now + Duration::from_secs(1 << 30)
            } else {
                now
            },
        }
    }

    /// Removes the progress bar.
    pub fn end(self) {
        self.bar.finish_and_clear();
    }
}

impl Watch for Progress {
    fn tick(&mut self, ended: u64, elapsed: Duration) {
        let now = Instant::now();
        let (then, before) = self.last;
        let span = now - then;
        if span < Duration::from_millis(250) {
            return;
        }
        self.rate = ended.saturating_sub(before) as f64 / span.as_secs_f64();
        self.last = (now, ended);
        let text = || {
            if elapsed.is_zero() {
                format!("{} IOPS, ramping up", quantity(self.rate))
            } else {
                format!("{} IOPS", quantity(self.rate))
            }
        };
        if self.terminal {
            self.bar.set_position(elapsed.as_millis() as u64);
            self.bar.set_message(text());
        } else if now.saturating_duration_since(self.said) >= LINES_APART {
            self.said = now;
            let of = self
                .runtime
                .map_or(String::new(), |r| format!(" of {} s", r.as_secs_f64()));
            eprintln!("{:.0} s{of}: {}", elapsed.as_secs_f64(), text());
        }
    }
}

/// Formats a number with three digits and a letter: `1.23M`.
pub fn quantity(value: f64) -> String {
    let (scaled, letter) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e4 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let digits = match scaled {
        s if letter.is_empty() && s.fract() == 0.0 => 0,
        s if s >= 100.0 => 0,
        s if s >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{letter}")
}

/// Formats nanoseconds in a suitable unit.
pub fn nanos(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2} s", v / 1e9),
        v if v >= 1e6 => format!("{:.2} ms", v / 1e6),
        v if v >= 1e4 => format!("{:.1} us", v / 1e3),
        v if v >= 1e3 => format!("{:.2} us", v / 1e3),
        v => format!("{v:.0} ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_abbreviated() {
        for (value, text) in [
            (0.0, "0"),
            (0.02, "0.02"),
            (999.0, "999"),
            (9999.4, "9999"),
            (24_040.0, "24.0k"),
            (184_000.0, "184k"),
            (1.234e6, "1.23M"),
        ] {
            assert_eq!(quantity(value), text);
        }
        assert_eq!(nanos(550.2), "550 ns");
        assert_eq!(nanos(1380.0), "1.38 us");
    }
}
