//! Runs seeds of the simulation, and replays those that fail.
#![forbid(unsafe_code)]

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use output::outln;
use simulation::{Plan, STEPS, format_steps, parse_steps, run, shrink};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Simulate a host with its disks and guests
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Run seeds until one fails
    Run {
        /// First seed; taken from the clock by default
        #[arg(long)]
        first: Option<u64>,
        /// Maximum number of seeds
        #[arg(long, default_value_t = u64::MAX)]
        seeds: u64,
        /// Maximum time in seconds
        #[arg(long, default_value_t = u64::MAX)]
        seconds: u64,
        /// Steps of each seed
        #[arg(long, default_value_t = STEPS)]
        steps: u32,
        /// Go on after failures, and only count them
        #[arg(long)]
        go_on: bool,
    },
    /// Run one seed and print its trace
    Replay {
        /// Seed of the run
        seed: u64,
        /// Steps of the run, for example 0-7,9; all by default
        #[arg(long)]
        steps: Option<String>,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.command {
        Action::Run {
            first,
            seeds,
            seconds,
            steps,
            go_on,
        } => {
            std::panic::set_hook(Box::new(|_| {}));
            let seconds = Duration::from_secs(seconds);
            run_seeds(first, seeds, seconds, steps, go_on)
        }
        Action::Replay { seed, steps } => {
            let mut plan = Plan::new(seed, STEPS);
            if let Some(steps) = steps {
                plan.steps = parse_steps(&steps)?;
            }
            let report = run(&plan, true);
            outln!("{}", report.trace.trim_end());
            match report.failure {
                Some(failure) => bail!("seed {seed}: {failure}"),
                None => Ok(()),
            }
        }
    }
}

fn run_seeds(
    first: Option<u64>,
    seeds: u64,
    time: Duration,
    steps: u32,
    go_on: bool,
) -> Result<()> {
    let first = first.unwrap_or_else(|| {
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        since.as_secs() << 20
    });
    outln!("seeds from {first} on, {steps} steps each");
    let start = Instant::now();
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    let (mut done, mut commands, mut failed) = (0, 0, 0);
    let mut fewest = u64::MAX;
    while done < seeds && start.elapsed() < time {
        let plan = Plan::new(first.wrapping_add(done), steps);
        let report = run(&plan, false);
        done += 1;
        commands += report.commands;
        fewest = fewest.min(report.commands);
        for (name, count) in report.counts {
            *counts.entry(name).or_default() += count;
        }
        if let Some(failure) = report.failure {
            failed += 1;
            outln!("seed {}: {failure}", plan.seed);
            if !go_on {
                let smaller = shrink(&plan, 2000);
                let steps = format_steps(&smaller.steps);
                outln!(
                    "after {done} seeds; {} of {} steps suffice:",
                    smaller.steps.len(),
                    plan.steps.len()
                );
                outln!(
                    "cargo run -p simulation -- replay {} --steps {steps}",
                    plan.seed
                );
                break;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    for (name, count) in &counts {
        outln!("{count:>12}  {name}");
    }
    outln!("{commands:>12}  I/O commands of model guests, {fewest} at least in a seed");
    outln!(
        "{done} seeds in {seconds:.1} s: {:.1} per second",
        done as f64 / seconds
    );
    if failed > 0 {
        bail!("{failed} seeds failed");
    }
    Ok(())
}
