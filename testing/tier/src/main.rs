//! Steps of a tier of tests (`make test`, `make test-guests`), with the time of each step, the
//! slowest tests and the tests that passed only when repeated.
//!
//! - `tier run TIER COMMAND...` runs a command, usually `make`, and prints the report at its end.
//! - `tier step NAME COMMAND...` runs one step of it.
//! - `tier tests NAME [--repeat] ARGUMENT...` runs tests as a step: by cargo-nextest where it is
//!   installed, else by `cargo test`, with the same arguments. With `--repeat`, a test that fails
//!   is run once more and counts as flaky when it passes then.
//! - `tier mutants --seed TEXT --draw N` applies N mutants of `testing/harness/mutants.toml`, one
//!   after the other, and runs the tests that must find them; `tier mutants NAME...` applies those.
//!
//! `target/tier/TIER` holds what the steps leave to the report, `target/test-times.json` the
//! report as data, and `target/tier/TIER.history` the flaky tests of the last ten runs.
#![forbid(unsafe_code)]

mod flaky;
mod junit;
mod libtest;
mod mutants;
mod report;
mod step;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::report::TierReport;
use crate::step::Record;

/// Environment variable that names the directory of the running tier.
const DIRECTORY: &str = "VNVME_TIER";

const USAGE: &str = "usage: tier run TIER COMMAND... | tier step NAME COMMAND... | tier tests NAME [--repeat] ARGUMENT... | tier mutants NAME... | tier mutants --seed TEXT --draw N";

fn main() -> Result<ExitCode> {
    let mut words = std::env::args().skip(1);
    let verb = words.next().context(USAGE)?;
    let all: Vec<String> = words.collect();
    let (name, words) = all.split_first().context(USAGE)?;
    let passed = match verb.as_str() {
        "run" => {
            raise_locked_memory();
            run(name, words)?
        }
        "step" => step::command(&directory(), name, words)?,
        "tests" => tests(&directory(), name, words)?,
        "mutants" => mutants::run(&target(), &all)?,
        _ => bail!(USAGE),
    };
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Raises the limit of locked memory where that is permitted. Linux counts the rings of all
/// programs that the tests run at the same time against one limit, that of the user.
fn raise_locked_memory() {
    let limit = Rlimit {
        current: None,
        maximum: None,
    };
    if let Err(error) = setrlimit(Resource::Memlock, limit) {
        eprintln!("the limit of locked memory stays as it is: {error}");
    }
}

/// The `target` directory of the workspace that the current directory is the root of.
fn target() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").filter(|name| !name.is_empty());
    named.map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

/// The directory of the running tier; a step that runs alone has one of its own.
fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY).map_or_else(|| target().join("tier/alone"), PathBuf::from)
}

/// Runs the command of a tier and prints the report. True when the command succeeded and no limit
/// of flaky tests was exceeded.
fn run(tier: &str, words: &[String]) -> Result<bool> {
    let (program, arguments) = words.split_first().context(USAGE)?;
    let directory = target().join("tier").join(tier);
    match std::fs::remove_dir_all(&directory) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("removing {}", directory.display()));
        }
        _ => std::fs::create_dir_all(&directory)?,
    }
    let directory = directory.canonicalize()?;
    let began = Instant::now();
    let status = Command::new(program)
        .args(arguments)
        .env(DIRECTORY, &directory)
        .status()
        .with_context(|| format!("starting {program}"))?;
    let report = TierReport::read(tier, &directory, began.elapsed(), status.success())?;
    print!("{report}");
    report.write(&target().join("test-times.json"))?;
    let history = target().join("tier").join(format!("{tier}.history"));
    let verdict = flaky::judge(&history, &report.flaky())?;
    for line in &verdict {
        println!("FLAKY: {line}");
    }
    Ok(status.success() && verdict.is_empty())
}

/// Runs tests as one step.
fn tests(directory: &Path, name: &str, words: &[String]) -> Result<bool> {
    let repeat = words.first().is_some_and(|word| word == "--repeat");
    let arguments = words.get(usize::from(repeat)..).unwrap_or_default();
    ensure!(!arguments.is_empty(), USAGE);
    let began = Instant::now();
    let (passed, results) = if nextest_is_installed() {
        junit::run(&target(), directory, name, repeat, arguments)?
    } else {
        libtest::run(directory, repeat, arguments)?
    };
    let record = Record::new(name, began.elapsed(), passed);
    record.append(directory, &results)?;
    Ok(passed)
}

fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Whether cargo-nextest can be used. `VNVME_RUNNER=cargo` leaves it out.
fn nextest_is_installed() -> bool {
    if std::env::var("VNVME_RUNNER").is_ok_and(|runner| runner == "cargo") {
        return false;
    }
    let version = cargo().args(["nextest", "--version"]).output();
    version.is_ok_and(|output| output.status.success())
}
