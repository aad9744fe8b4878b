//! `vnvme top`: live display of a running daemon's disks in the terminal.
//!
//! Every second (`--interval`) the program requests a snapshot from the daemon. [`rates`] computes
//! the changes between two snapshots, [`recent`] adds latencies of earlier intervals,
//! [`mod@screen`] formats the lines, and [`terminal`] displays them.

mod board;
mod rates;
mod recent;
mod screen;
mod terminal;

use crate::cli::instances::{self, AllInstances, Answers, Unanswered};
use crate::cli::target::DaemonTarget;
use anyhow::{Context, Result};
use board::Board;
use clap::Args;
use control::Client;
use daemon::api::Instances;
use metrics::Snapshot;
use output::outln;
use rates::Rates;
use recent::Recent;
use screen::{Choices, Sort, clean, screen};
use serde::Serialize;
use signal_hook::low_level::emulate_default_handler;
use std::collections::BTreeMap;
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
    #[command(flatten)]
    all: AllInstances,
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

/// Rates of a process, from its last two snapshots.
struct Monitor {
    before: Snapshot,
    recent: Recent,
}

impl Monitor {
    fn new(first: Snapshot) -> Self {
        let mut recent = Recent::default();
        // Latencies of earlier commands are included until there are enough newer ones.
        recent.widen(&mut Rates::between(&Snapshot::default(), &first));
        Self {
            before: first,
            recent,
        }
    }

    /// Returns the rates since the last snapshot.
    fn advance(&mut self, now: Snapshot) -> Rates {
        let mut rates = Rates::between(&self.before, &now);
        self.recent.widen(&mut rates);
        self.before = now;
        rates
    }
}

/// Source of the rates that are shown.
enum Source<'a> {
    /// Source with a single process, which is asked at each refresh.
    One(&'a DaemonTarget, Box<Monitor>),
    /// All instances, which are asked in the background.
    All(&'a DaemonTarget, Board, BTreeMap<String, View>),
}

/// Latest state of an instance.
enum View {
    Answered(Box<(Monitor, Rates)>),
    Unanswered(String),
}

impl Source<'_> {
    fn refresh(&mut self) -> Result<Rates> {
        match self {
            Self::One(target, monitor) => Ok(monitor.advance(snapshot(target)?)),
            Self::All(target, board, views) => {
                let instances = Instances::find(target.socket.path()).found;
                views.retain(|name, _| instances.iter().any(|one| one.name == *name));
                for (name, arrived) in board.refresh(instances) {
                    let view = match (arrived, views.remove(&name)) {
                        (Ok(now), Some(View::Answered(mut view))) => {
                            view.1 = view.0.advance(now);
                            View::Answered(view)
                        }
                        (Ok(first), _) => {
                            let rates = Rates::between(&first, &first);
                            View::Answered(Box::new((Monitor::new(first), rates)))
                        }
                        (Err(unanswered), _) => View::Unanswered(reason(&unanswered)),
                    };
                    views.insert(name, view);
                }
                let mut all = Rates::default();
                for (name, view) in views {
                    match view {
                        View::Answered(view) => all.add(name, view.1.clone()),
                        View::Unanswered(reason) => all.unanswered.push(reason.clone()),
                    }
                }
                Ok(all)
            }
        }
    }
}

/// Formats an instance without an answer as a line.
fn reason(unanswered: &Unanswered) -> String {
    let Unanswered {
        instance, error, ..
    } = unanswered;
    clean(&format!("{instance} does not answer: {error}"))
}

fn snapshot(target: &DaemonTarget) -> Result<Snapshot> {
    Ok(target.client()?.stats()?.measured)
}

/// Snapshots of an instance at the ends of an interval.
#[derive(Serialize)]
struct InstanceSnapshots {
    instance: String,
    snapshots: [Snapshot; 2],
}

/// Output of `vnvme top --all --json`.
#[derive(Serialize)]
struct AllSnapshots {
    instances: Vec<InstanceSnapshots>,
    unanswered: Vec<Unanswered>,
}

impl TopArgs {
    /// Displays the disks until the user quits.
    pub fn run(self) -> Result<()> {
        match (self.once || self.target.is_json(), self.all.all) {
            (true, true) => self.print_all(),
            (true, false) => self.print_one(),
            (false, true) => {
                let found = instances::find(&self.target.socket)?;
                let board = Board::new(self.interval).context("thread \"ask\"")?;
                // The instances are asked from now on.
                board.refresh(found);
                self.display(Source::All(&self.target, board, BTreeMap::new()))
            }
            (false, false) => {
                let monitor = Monitor::new(snapshot(&self.target)?);
                self.display(Source::One(&self.target, Box::new(monitor)))
            }
        }
    }

    /// Prints one screen of one process.
    fn print_one(&self) -> Result<()> {
        let before = snapshot(&self.target)?;
        std::thread::sleep(self.interval);
        let now = snapshot(&self.target)?;
        self.target.print(&[before, now], |[before, now]| {
            let rates = Monitor::new(before.clone()).advance(now.clone());
            self.print_screen(&rates)
        })
    }

    /// Prints one screen of all instances.
    fn print_all(&self) -> Result<()> {
        let instances = instances::find(&self.target.socket)?;
        let ask = |client: &Client| Ok(client.stats()?.measured);
        let first = instances::ask_all(&instances, ask);
        let before: BTreeMap<String, Snapshot> = first.answers.into_iter().collect();
        std::thread::sleep(self.interval);
        // An instance that did not answer is not waited for again.
        let mut instances = instances;
        instances.retain(|instance| before.contains_key(&instance.name));
        let Answers {
            answers,
            unanswered,
        } = instances::ask_all(&instances, ask);
        let answers = answers.into_iter().filter_map(|(instance, now)| {
            let snapshots = [before.get(&instance)?.clone(), now];
            Some(InstanceSnapshots {
                instance,
                snapshots,
            })
        });
        let all = AllSnapshots {
            instances: answers.collect(),
            unanswered: [first.unanswered, unanswered].concat(),
        };
        self.target.print(&all, |all| {
            let mut rates = Rates::default();
            for one in &all.instances {
                let [before, now] = one.snapshots.clone();
                rates.add(&one.instance, Monitor::new(before).advance(now));
            }
            self.print_screen(&rates)
        })?;
        instances::check(&all.unanswered)
    }

    fn print_screen(&self, rates: &Rates) -> Result<()> {
        for line in screen(rates, &self.choices(), WIDTH, None) {
            outln!("{}", line.text);
        }
        Ok(())
    }

    fn display(&self, mut source: Source<'_>) -> Result<()> {
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
                rates = source.refresh()?;
                next = Instant::now() + self.interval;
            }
        }
    }

    fn choices(&self) -> Choices {
        Choices::new(self.sort, self.filter.clone())
    }
}
