//! `make bench`, the part that needs a guest: suite `guest`.
//!
//! Usage: bench OUTPUT [--runtime SECONDS] [--runs N]. Writes figures in the form of `results.json`, for
//! `vnvme bench --report --add OUTPUT`.
#![forbid(unsafe_code)]

mod figures;
mod guest;
mod report;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
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

const USAGE: &str = "usage: bench OUTPUT [--runtime SECONDS] [--runs N]";

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
            _ if arg.starts_with('-') => bail!("{arg}: {USAGE}"),
            _ => options.output = arg.into(),
        }
    }
    ensure!(!options.output.as_os_str().is_empty(), "{USAGE}");
    Ok(options)
}

/// A failure leaves the figures so far, and its reason.
fn bench(options: &Options) -> Result<()> {
    let mut figures = Figures::new("guest");
    let verdict = guest::run(options, &mut figures);
    if let Err(error) = &verdict {
        figures.leave_out("the suite, or the rest of it", format!("{error:#}"));
    }
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let mut objects = vec![json!({
        "suite": "about",
        "commands": [format!("bench {command} (of the harness)")],
        "left_out": figures.left_out(),
    })];
    objects.extend(figures.rows());
    fs::write(&options.output, serde_json::to_string_pretty(&objects)?)
        .with_context(|| format!("{}", options.output.display()))?;
    verdict
}
