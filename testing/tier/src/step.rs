//! Steps: a command, its time and its result, and the results of the tests in it.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Time and result of one step of a tier.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Name of the step.
    pub step: String,
    /// Seconds that the step took.
    pub seconds: f64,
    /// Whether the step succeeded.
    pub passed: bool,
}

/// Result of one test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestResult {
    /// Test program and test, for example `vnvme::socket keeper::upgrade_is_short_pause`.
    pub test: String,
    /// Seconds that the last attempt took; absent where the runner does not measure them.
    pub seconds: Option<f64>,
    /// Outcome of the test over all attempts.
    pub outcome: TestOutcome,
    /// Output of each attempt of a flaky test, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logs: Vec<PathBuf>,
}

/// Outcome of a test over all its attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TestOutcome {
    /// The test passed at the first attempt.
    Passed,
    /// The test failed at each attempt.
    Failed,
    /// The test failed at first, and passed when repeated.
    Flaky,
}

impl Record {
    /// Makes the record of a step that has ended.
    pub fn new(step: &str, took: Duration, passed: bool) -> Record {
        Record {
            step: step.to_owned(),
            seconds: took.as_secs_f64(),
            passed,
        }
    }

    /// Appends the record and the results of the step's tests to the files of the tier.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn append(&self, directory: &Path, results: &[TestResult]) -> Result<()> {
        std::fs::create_dir_all(directory)?;
        let lines: Result<Vec<_>, _> = results.iter().map(serde_json::to_string).collect();
        add(&directory.join("tests"), &lines?)?;
        add(&directory.join("steps"), &[serde_json::to_string(self)?])
    }
}

fn add(path: &Path, lines: &[String]) -> Result<()> {
    let mut file = File::options().create(true).append(true).open(path)?;
    for line in lines {
        writeln!(file, "{line}")?;
    }
    Ok(())
}

/// Runs one command as a step. True when it succeeded.
///
/// # Errors
/// The command cannot be started, or its record cannot be written.
pub fn command(directory: &Path, name: &str, words: &[String]) -> Result<bool> {
    let (program, arguments) = words.split_first().context(crate::USAGE)?;
    println!("--- {name}: {}", words.join(" "));
    let began = Instant::now();
    let status = Command::new(program).args(arguments).status();
    let status = status.with_context(|| format!("starting {program}"))?;
    Record::new(name, began.elapsed(), status.success()).append(directory, &[])?;
    Ok(status.success())
}
