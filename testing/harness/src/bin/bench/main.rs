//! `make bench`, the part that needs a guest: suite `guest`.
//!
//! Usage: bench OUTPUT [--runtime SECONDS] [--runs N]. Writes figures in the form of
//! `results.json`, for `vnvme-bench --report --add OUTPUT`.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![forbid(unsafe_code)]

mod figures;
mod guest;
mod report;

use std::fs;

use anyhow::{Context, Result};
use figures::Figures;
use harness::BenchOptions;
use serde_json::json;

fn main() {
    if let Err(error) = BenchOptions::parse("bench", 3, std::env::args().skip(1))
        .and_then(|options| bench(&options))
    {
        eprintln!("bench: {error:#}");
        std::process::exit(1);
    }
}

/// A failure leaves the figures so far, and its reason.
fn bench(options: &BenchOptions) -> Result<()> {
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
