//! `vnvme top`: live display of a running daemon's disks in the terminal.
//!
//! Every second (`--interval`) the program requests a snapshot from the daemon. [`rates`] computes
//! the changes between two snapshots, [`recent`] adds latencies of earlier intervals,
//! [`mod@screen`] formats the lines, and [`terminal`] displays them.

mod rates;
mod recent;
mod screen;
mod terminal;

use crate::cli::target::DaemonTarget;
use anyhow::{Context, Result};
use clap::Args;
use metrics::Snapshot;
use output::outln;
use rates::Rates;
use recent::Recent;
use screen::{Choices, Sort, screen};
use signal_hook::low_level::emulate_default_handler;
use std::time::{Duration, Instant};
use terminal::{Input, Terminal};
use volume::parse_duration;

/// Width in columns of a screen that is printed once.
const WIDTH: usize = 80;

/// The command line of `vnvme top`.
#[derive(Args)]
pub struct TopArgs {
    #[command(flatten)]
    target: DaemonTarget,
    /// Print one screen with the activity of one interval, then exit; with --json print its two
    /// snapshots
    #[arg(long)]
    once: bool,
    /// Sort disks by this column
    #[arg(long, value_enum, default_value_t)]
    sort: Sort,
    /// Show only disks whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Time between two refreshes, 100ms to 1m
    #[arg(long, value_parser = interval, default_value = "1s", value_name = "DURATION")]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, &'static str> {
    let range = Duration::from_millis(100)..=Duration::from_secs(60);
    match parse_duration(text)? {
        time if range.contains(&time) => Ok(time),
        _ => Err("not between 100ms and 1m"),
    }
}

impl TopArgs {
    fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.target.client()?.stats()?.measured)
    }

    /// Displays the disks until the user quits.
    pub fn run(self) -> Result<()> {
        let mut before = self.snapshot()?;
        let mut recent = Recent::default();
        // Latencies of earlier commands are included until there are enough newer ones.
        recent.widen(&mut Rates::between(&Snapshot::default(), &before));
        let mut between = |before: &Snapshot, now: &Snapshot| {
            let mut rates = Rates::between(before, now);
            recent.widen(&mut rates);
            rates
        };
        if self.once || self.target.is_json() {
            std::thread::sleep(self.interval);
            let now = self.snapshot()?;
            return self.target.print(&[&before, &now], |_| {
                let choices = self.choices();
                for line in screen(&between(&before, &now), &choices, WIDTH, None) {
                    outln!("{}", line.text);
                }
                Ok(())
            });
        }
        let mut terminal = Terminal::open().context(
            "vnvme top needs a terminal; use --once to print one screen, or --json for its data",
        )?;
        let (mut choices, mut rates) = (self.choices(), Rates::default());
        let mut next = Instant::now() + self.interval.min(Duration::from_millis(300));
        loop {
            let (width, height) = terminal.size();
            terminal.draw(&screen(&rates, &choices, width, Some(height)))?;
            match terminal.wait(next)? {
                Input::Keys(keys) => {
                    for key in keys {
                        if choices.press(key, &rates) {
                            return Ok(());
                        }
                    }
                }
                Input::End(signal) => {
                    drop(terminal);
                    // Dies of the signal as without a handler, which the parent can distinguish.
                    return Ok(emulate_default_handler(signal)?);
                }
            }
            if Instant::now() >= next {
                let now = self.snapshot()?;
                rates = between(&before, &now);
                before = now;
                next = Instant::now() + self.interval;
            }
        }
    }

    fn choices(&self) -> Choices {
        Choices::new(self.sort, self.filter.clone())
    }
}
