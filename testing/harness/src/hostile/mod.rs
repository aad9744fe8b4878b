//! The hostile-client suite: attacks on a running daemon that serves a good neighbour on the same
//! worker, and their effects on it.
//!
//! ```text
//! suite --- the daemon: vnvme serve, default options, one worker
//!   |--- good neighbour  (good.sock)    reads, reads a register, writes what it wants to keep
//!   |--- honest client   (bad.sock)     keeps the worker busy with reads: the measure
//!   |--- attack          (any socket)   in its place; killed at the end
//!   `--- FUSE server                    for attacks that need files that hang
//! ```
//!
//! Each attack has a daemon of its own. `attacks` has their table, `measure` the sequence of each
//! test, `outcome` the bounds, `known` the failures that are accepted so far. The clients here
//! reach the daemon by its sockets only. `client` has those that break rules, `neighbour` the
//! well-behaved ones, by the project's own driver.

mod attacks;
mod child;
mod client;
mod known;
mod measure;
mod neighbour;
mod outcome;
mod report;
mod sampler;
mod schedule;
mod test_daemon;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use clap::Parser as _;
use serde_json::Value;
use sync::Unpoisoned;

use attacks::{ATTACKS, Attack};
use measure::AttackTimes;
use outcome::{AttackLimits, AttackOutcome};

/// A machine with other work may fail an attack once; a broken bound fails each time.
const MAX_ATTEMPTS: usize = 3;

/// Attacks a running daemon by hostile clients, and tells what became of a good neighbour
///
/// Prints a table with a line for each attack. The exit code is 1 when a bound does not hold that
/// is not known to fail.
#[derive(clap::Parser)]
#[command(name = "hostile")]
struct Options {
    /// Only this attack; may be given more than once
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Several seconds for each attack, and the bounds of the promise
    #[arg(long)]
    long: bool,
    /// List the attacks
    #[arg(long)]
    list: bool,
    /// Write the figures to this file, after each attack
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The program to attack [default: that of this build]
    #[arg(long, value_name = "PATH")]
    vnvme: Option<PathBuf>,
    /// Print a table of two files of figures, before and after a change
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"])]
    compare: Option<Vec<PathBuf>>,
    /// How often an attack that does not hold is tried; the best run counts
    #[arg(long, value_name = "N", default_value_t = MAX_ATTEMPTS)]
    tries: usize,
    /// Attacks tried beside each other, on a daemon each; one that does not hold there is tried
    /// again alone
    #[arg(long, value_name = "N", default_value_t = 1)]
    at_once: usize,
}

impl Options {
    fn attacks(&self) -> Result<Vec<&'static Attack>> {
        let is_meant = |name: &str| self.only.is_empty() || self.only.iter().any(|o| o == name);
        let attacks: Vec<_> = ATTACKS.iter().filter(|a| is_meant(a.name)).collect();
        ensure!(!attacks.is_empty(), "--only: no such attack; see --list");
        Ok(attacks)
    }
}

/// The program: the words after its name.
///
/// # Errors
/// Words that are not understood, or a machine that cannot run the suite at all.
pub fn main(words: &[String]) -> Result<ExitCode> {
    if let Some((first, rest)) = words.split_first()
        && first == child::WORD
    {
        child::main(rest)?;
        return Ok(ExitCode::SUCCESS);
    }
    let program = std::iter::once("hostile").chain(words.iter().map(String::as_str));
    let options = match Options::try_parse_from(program) {
        Ok(options) => options,
        // Help is a kind of error, too.
        Err(error) => {
            error.print()?;
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            return Ok(ExitCode::from(code));
        }
    };
    if options.list {
        for attack in ATTACKS {
            println!("{:24} {}", attack.name, attack.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some([before, after]) = options.compare.as_deref() {
        print!("{}", report::compare(before, after)?);
        return Ok(ExitCode::SUCCESS);
    }
    let program = match &options.vnvme {
        Some(path) => path.canonicalize().context("--vnvme")?,
        None => crate::daemon::program()?,
    };
    let (times, limits) = if options.long {
        (AttackTimes::LONG, AttackLimits::LONG)
    } else {
        (AttackTimes::SHORT, AttackLimits::SHORT)
    };
    run(&program, &options, times, limits)
}

fn run(
    program: &Path,
    options: &Options,
    times: AttackTimes,
    limits: AttackLimits,
) -> Result<ExitCode> {
    let mut all = Vec::new();
    let mut bad = Vec::new();
    println!("{}", report::HEAD);
    let attacks = options.attacks()?;
    let firsts = beside(program, &attacks, times, options.at_once);
    for (attack, first) in attacks.into_iter().zip(firsts) {
        let (outcome, mended) = best(program, attack, times, limits, options.tries, first)?;
        println!("{}", report::line(&outcome, limits));
        for note in &outcome.notes {
            println!("    {note}");
        }
        if let Some(why) = &outcome.skipped {
            testkit::skip(&format!("hostile::{}", attack.name), why);
        }
        let (new, _) = outcome.verdict(limits);
        if !new.is_empty() {
            bad.push(format!("{}: {}", attack.name, new.join(", ")));
        }
        if !mended.is_empty() && !options.long {
            bad.push(format!(
                "{}: {} hold now: take them from the list in known.rs",
                attack.name,
                mended.join(", ")
            ));
        }
        all.push(outcome.json(limits));
        if let Some(path) = &options.json {
            // After each: an attack may end this process, too.
            std::fs::write(
                path,
                serde_json::to_string_pretty(&Value::Array(all.clone()))?,
            )?;
        }
    }
    for known in known::KNOWN {
        println!(
            "does not hold yet: {}: {}: {}",
            known.attack,
            known.fails.join(", "),
            known.why
        );
    }
    for line in &bad {
        println!("FAILED {line}");
    }
    Ok(if bad.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs each attack once, `at_once` of them beside each other. `None` for an attack that could not
/// be measured there, and for all of them where only one is to run at once.
fn beside(
    program: &Path,
    attacks: &[&Attack],
    times: AttackTimes,
    at_once: usize,
) -> Vec<Option<AttackOutcome>> {
    let outcomes: Vec<Mutex<Option<AttackOutcome>>> =
        attacks.iter().map(|_| Mutex::default()).collect();
    let left = Mutex::new(attacks.iter().zip(&outcomes));
    let work = || {
        while let Some((attack, outcome)) = {
            let mut left = left.lock().unpoisoned();
            left.next()
        } {
            *outcome.lock().unpoisoned() = measure::run(program, attack, times).ok();
        }
    };
    if at_once > 1 {
        std::thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(work);
            }
        });
    }
    let outcomes = outcomes.into_iter();
    outcomes.map(|one| one.into_inner().unpoisoned()).collect()
}

/// Returns the best of a few runs, of which the first may have been made before, and the known
/// failures that showed in none of them.
fn best(
    program: &Path,
    attack: &Attack,
    times: AttackTimes,
    limits: AttackLimits,
    tries: usize,
    first: Option<AttackOutcome>,
) -> Result<(AttackOutcome, Vec<&'static str>)> {
    let mut best: Option<(usize, AttackOutcome)> = None;
    let mut mended = None;
    let alone = (0..tries.max(1)).map(|_| measure::run(program, attack, times));
    for outcome in first.map(Ok).into_iter().chain(alone) {
        let outcome = outcome?;
        let (new, holds) = outcome.verdict(limits);
        if best.as_ref().is_none_or(|(least, _)| new.len() < *least) {
            best = Some((new.len(), outcome));
        }
        let still = mended.get_or_insert_with(|| holds.clone());
        still.retain(|fail| holds.contains(fail));
        if still.is_empty() && best.as_ref().is_some_and(|(fails, _)| *fails == 0) {
            break;
        }
    }
    Ok((best.context("no run")?.1, mended.unwrap_or_default()))
}
