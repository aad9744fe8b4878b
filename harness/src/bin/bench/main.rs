//! `make bench`, the part that needs a guest: suites `guest` and `driver`.
//!
//! Usage: bench OUTPUT [--runtime SECONDS] [--runs N]. Writes figures in the form of `results.json`, for
//! `vnvme bench --report --add OUTPUT`.
#![forbid(unsafe_code)]

mod driver;
mod figures;
mod guest;
mod report;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use figures::Figures;
use serde_json::json;

/// How to measure.
pub struct Options {
    output: PathBuf,
    /// Of one run of one case, in seconds.
    pub runtime: u32,
    /// Runs of each case.
    pub runs: u32,
}

fn main() {
    if let Err(error) = options().and_then(|options| bench(&options)) {
        eprintln!("bench: {error:#}");
        std::process::exit(1);
    }
}

fn options() -> Result<Options> {
    let mut options = Options {
        output: PathBuf::new(),
        runtime: 3,
        runs: 3,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || -> Result<u32> {
            let value = args
                .next()
                .with_context(|| format!("{arg} wants a number"))?;
            Ok(value.parse::<u32>()?.max(1))
        };
        match arg.as_str() {
            "--runtime" => options.runtime = number()?,
            "--runs" => options.runs = number()?,
            _ => options.output = arg.into(),
        }
    }
    ensure!(
        !options.output.as_os_str().is_empty(),
        "usage: bench OUTPUT [--runtime SECONDS] [--runs N]"
    );
    Ok(options)
}

/// A suite that fails leaves the other one and its own figures so far.
fn bench(options: &Options) -> Result<()> {
    let mut failures = Vec::new();
    let mut suite = |name: &'static str, run: fn(&Options, &mut Figures) -> Result<()>| {
        let mut figures = Figures::new(name);
        if let Err(error) = run(options, &mut figures) {
            figures.leave_out("the suite, or the rest of it", format!("{error:#}"));
            failures.push(name);
        }
        figures
    };
    let suites = [suite("guest", guest::run), suite("driver", driver::run)];
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let left_out: Vec<_> = suites.iter().flat_map(Figures::left_out).collect();
    let mut objects = vec![json!({
        "suite": "about",
        "commands": [format!("bench {command} (of the harness)")],
        "left_out": left_out,
    })];
    objects.extend(suites.iter().flat_map(Figures::rows));
    fs::write(&options.output, serde_json::to_string_pretty(&objects)?)
        .with_context(|| format!("{}", options.output.display()))?;
    if failures.is_empty() {
        Ok(())
    } else {
        Err(anyhow!("not all was measured: {}", failures.join(", ")))
    }
}
