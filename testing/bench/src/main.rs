//! Benchmark suites that measure `vnvme` and compare it with further programs, and their report.
//!
//! `vnvme-bench TARGET --against PROGRAM` compares vnvme with one program ([`suite::against`]).
//! `vnvme-bench --suite NAME`, or `vnvme bench --suite NAME`, which runs this program if it lies
//! beside it. [`suite`] runs jobs of the load generator (crate `load`) against `vnvme serve`
//! processes, interleaved and repeated. [`results`] saves the figures. [`report`] shows them beside
//! those of the documents that this project follows, [`compare`] beside those of another day.
//!
//! This program uses servers as processes: their sockets, their configuration and their control
//! socket. It does not access the inside of the measured program, and has no unsafe code.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A suite fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![forbid(unsafe_code)]

mod compare;
mod distance;
mod report;
mod results;
mod suite;

use anyhow::{Context, Result, bail};
use clap::Parser;
use output::OutputError;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use suite::{Program, against};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Suites of measurements: vnvme beside what it is compared with.
#[derive(Parser)]
#[command(name = "vnvme-bench", version, max_term_width = 120)]
struct Options {
    /// Log filter for standard error: error, warn, info, debug, trace, or per crate like
    /// "warn,driver=trace"
    #[arg(long, env = "VNVME_LOG", default_value = "warn", value_name = "FILTER")]
    log: Targets,
    /// Suite to run: limit, vhost, doorbell, file, image, rbd, scale, mediate, share, tcp,
    /// processes, cost, or all
    #[arg(
        long,
        value_enum,
        required_unless_present_any = ["report", "keep", "compare"],
        value_name = "NAME"
    )]
    suite: Option<suite::Name>,
    /// Runs of each case; the result is the median
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), value_name = "N")]
    runs: u32,
    /// Measuring time of each case in seconds [default: at most 1]
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    runtime: Option<Duration>,
    /// Time to run each case before measuring begins, in seconds
    #[arg(long, default_value = "0.25", value_parser = seconds, value_name = "SECONDS")]
    ramp: Duration,
    /// Run only the cases with these words. Suite file: randread, randwrite; tmpfs, disk; 1, 8, 32;
    /// bare, waiting, beside, plain, vnvme, pinned. Suite image: filled, chain, empty, overlay,
    /// copy; randread, randwrite; 1, 8, 32. Suite rbd: randread, randwrite; 1, 32. Suite scale:
    /// load, crowd, tail. Suite doorbell: polling, batched, sleeping, "sleeping batched",
    /// interrupt. Suite tcp: 1, 32, 128; plain, digests. Suite vhost: null, read, write; 1, 4, 32,
    /// 128. A dimension without a word is run in full; the results of the suite then contain
    /// nothing else
    #[arg(long, value_delimiter = ',', requires = "suite", value_name = "LIST")]
    only: Vec<String>,
    /// Memory of queues and data in suites
    #[arg(
        long,
        value_enum,
        default_value_t,
        requires = "suite",
        value_name = "PLACE"
    )]
    memory: suite::Choice,
    /// Write the report of the existing results
    #[arg(long)]
    report: bool,
    /// Add results of another program to the report, from files in the same format
    #[arg(long, value_name = "FILE", requires = "report")]
    add: Vec<PathBuf>,
    /// Keep the medians of the existing results for a later --compare, in a file of DIR named after
    /// this machine's processors
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Show differences from kept results: a file of --keep, its DIR, or another results.json.
    /// Compared before --keep if both are given
    #[arg(long, value_name = "FILE|DIR")]
    compare: Option<PathBuf>,
    /// Directory of results.json and report.html
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    output: PathBuf,
    /// Ceilings of the suite cost; results above them are an error [default:
    /// testing/bench/ceilings.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    ceilings: Option<PathBuf>,
    /// Second program, for example an older vnvme, to measure in turn with the first in the suites
    /// limit, vhost, doorbell and scale; their reports have the quotients
    #[arg(long, requires = "suite", value_name = "PATH")]
    beside: Option<PathBuf>,
    /// Further argument for `vnvme serve` of the --beside program, by default the measured one:
    /// --beside-arg=--keeper=off
    #[arg(
        long,
        requires = "suite",
        value_name = "ARG",
        allow_hyphen_values = true
    )]
    beside_arg: Vec<String>,
    /// Further argument for `vnvme serve` of the measured program
    #[arg(
        long,
        requires = "suite",
        value_name = "ARG",
        allow_hyphen_values = true
    )]
    serve_arg: Vec<String>,
    /// qemu-storage-daemon for the suites image and rbd [default: that of the system]
    #[arg(long, requires = "suite", value_name = "PATH")]
    qsd: Option<PathBuf>,
    /// Two images of a Ceph cluster, created alike, for the suite rbd; their data is lost. The
    /// first is for vnvme, the second for qemu-storage-daemon (package qemu-block-extra)
    #[arg(
        long,
        requires = "suite",
        value_delimiter = ',',
        value_name = "URL,URL"
    )]
    rbd: Vec<String>,
    /// Program to measure [default: the vnvme beside this program]
    #[arg(long, env = "VNVME_BIN", value_name = "PATH")]
    vnvme: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration> {
    match Duration::try_from_secs_f64(text.parse()?) {
        Ok(duration) if duration < Duration::from_secs(1_000_000) => Ok(duration),
        _ => bail!("a number of seconds, less than a million"),
    }
}

impl Options {
    /// Returns the absolute path of the program to measure.
    fn vnvme(&self) -> Result<Program> {
        let path = match &self.vnvme {
            Some(path) => path.clone(),
            None => {
                let own = std::env::current_exe().context("the program's own path")?;
                own.with_file_name("vnvme")
            }
        };
        let path = path.canonicalize().with_context(|| {
            let path = path.display();
            format!("{path}: the suites measure the vnvme beside them, or that of --vnvme")
        })?;
        Ok(Program {
            path,
            args: self.serve_arg.clone(),
        })
    }

    /// Returns the absolute path of the program to compare with, if there is one.
    fn beside(&self) -> Result<Option<Program>> {
        let path = match &self.beside {
            Some(path) => {
                let found = path.canonicalize();
                found.with_context(|| format!("--beside {}", path.display()))?
            }
            None if self.beside_arg.is_empty() => return Ok(None),
            None => self.vnvme()?.path,
        };
        Ok(Some(Program {
            path,
            args: self.beside_arg.clone(),
        }))
    }

    fn ceilings(&self) -> Option<PathBuf> {
        let usual = || PathBuf::from("testing/bench/ceilings.toml");
        self.ceilings
            .clone()
            .or_else(|| Some(usual()).filter(|path| path.exists()))
    }

    /// Runs the selected suites, and writes the report.
    fn run(self) -> Result<()> {
        let mut verdict = Ok(());
        if let Some(name) = self.suite {
            name.check_only(&self.only)?;
            let plan = suite::Plan {
                vnvme: self.vnvme()?,
                beside: self.beside()?,
                qsd: self.qsd.clone(),
                rbd: self.rbd.clone(),
                only: self.only.clone(),
                runtime: self.runtime.unwrap_or_default(),
                ramp: self.ramp,
                runs: self.runs,
                output: self.output.clone(),
                ceilings: self.ceilings(),
                memory: suite::place(self.memory)?,
            };
            verdict = suite::run(name, self.runtime, &plan);
        }
        let only = self.suite.and_then(suite::Name::only);
        if self.report || self.suite.is_some() {
            report::write(&self.output, &self.add, only)?;
        }
        if let Some(kept) = &self.compare {
            compare::compare(&self.output, kept, only)?;
        }
        if let Some(folder) = &self.keep {
            compare::keep(&self.output, folder)?;
        }
        verdict
    }
}

fn main() -> ExitCode {
    let is_comparison = against::is_wanted(std::env::args().skip(1));
    let (log, run): (_, Box<dyn FnOnce() -> Result<()>>) = if is_comparison {
        let options = against::Options::parse();
        (options.log.clone(), Box::new(|| options.run()))
    } else {
        let options = Options::parse();
        (options.log.clone(), Box::new(|| options.run()))
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    tracing_subscriber::registry()
        .with(tracing_subscriber::Layer::with_filter(lines, log))
        .init();
    let Err(error) = run() else {
        return ExitCode::SUCCESS;
    };
    // A message about a closed output would not be read.
    let closed = error.downcast_ref::<OutputError>();
    if closed.is_some_and(OutputError::is_closed) {
        return output::end_quietly();
    }
    let _ = writeln!(std::io::stderr(), "vnvme-bench: {error:#}");
    ExitCode::FAILURE
}
