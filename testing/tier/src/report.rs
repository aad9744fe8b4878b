//! The report at the end of a tier.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::step::{Record, TestOutcome, TestResult};

/// Number of slowest tests that the report names.
const SLOWEST: usize = 20;

/// Results of a tier of tests: its steps and its tests, as the report shows them.
#[derive(Debug, Serialize)]
pub struct TierReport {
    tier: String,
    seconds: f64,
    passed: bool,
    steps: Vec<Record>,
    /// Results of the tests, the slowest test first.
    tests: Vec<TestResult>,
}

impl TierReport {
    /// Reads the records that the steps of a tier have left in its directory.
    ///
    /// # Errors
    /// A record cannot be read.
    pub fn read(tier: &str, directory: &Path, took: Duration, passed: bool) -> Result<TierReport> {
        let mut tests: Vec<TestResult> = lines(&directory.join("tests"))?;
        tests.sort_by(|a, b| {
            b.seconds
                .unwrap_or(0.0)
                .total_cmp(&a.seconds.unwrap_or(0.0))
        });
        Ok(TierReport {
            tier: tier.to_owned(),
            seconds: took.as_secs_f64(),
            passed,
            steps: lines(&directory.join("steps"))?,
            tests,
        })
    }

    /// Names of the tests that passed only when repeated.
    pub fn flaky(&self) -> Vec<String> {
        let flaky = self
            .tests
            .iter()
            .filter(|t| t.outcome == TestOutcome::Flaky);
        flaky.map(|test| test.test.clone()).collect()
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, serde_json::to_string_pretty(self)?)
            .with_context(|| format!("writing {}", path.display()))
    }

    fn count(&self, outcome: TestOutcome) -> usize {
        self.tests.iter().filter(|t| t.outcome == outcome).count()
    }
}

/// Reads the records of a file, one a line; none where there is no file.
///
/// # Errors
/// The file cannot be read, or is not one of records.
pub fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    let parsed: Result<Vec<_>, _> = text.lines().map(serde_json::from_str).collect();
    parsed.with_context(|| format!("reading {}", path.display()))
}

impl Display for TierReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{}: the slowest tests", self.tier)?;
        for test in self.tests.iter().take(SLOWEST) {
            if let Some(seconds) = test.seconds {
                writeln!(f, "{seconds:9.1} s  {}", test.test)?;
            }
        }
        writeln!(f, "{}: steps", self.tier)?;
        for step in &self.steps {
            let failed = if step.passed { "" } else { "  FAILED" };
            writeln!(f, "{:9.1} s  {}{failed}", step.seconds, step.step)?;
        }
        writeln!(f, "{:9.1} s  together", self.seconds)?;
        for test in self
            .tests
            .iter()
            .filter(|t| t.outcome == TestOutcome::Failed)
        {
            writeln!(f, "FAILED: {}", test.test)?;
        }
        for test in self
            .tests
            .iter()
            .filter(|t| t.outcome == TestOutcome::Flaky)
        {
            writeln!(f, "FLAKY: {}", test.test)?;
            for log in &test.logs {
                writeln!(f, "       {}", log.display())?;
            }
        }
        let [passed, failed, flaky] =
            [TestOutcome::Passed, TestOutcome::Failed, TestOutcome::Flaky]
                .map(|outcome| self.count(outcome));
        writeln!(
            f,
            "{}: {} passed, {failed} failed, {flaky} flaky",
            self.tier,
            passed + flaky
        )?;
        // The result of the whole, in the form that runners of CI read.
        writeln!(f, "{} passed, {failed} failed", passed + flaky)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_names_slowest_tests_steps_and_flaky_logs() {
        let directory = tempfile::tempdir().unwrap();
        let result = |test: &str, seconds, outcome| TestResult {
            test: test.to_owned(),
            seconds: Some(seconds),
            outcome,
            logs: Vec::new(),
        };
        let mut flaky = result("a flaky", 3.0, TestOutcome::Flaky);
        flaky.logs.push("logs/1".into());
        let results = [result("a fast", 0.5, TestOutcome::Passed), flaky];
        let record = Record::new("unit tests", Duration::from_secs(4), true);
        record.append(directory.path(), &results).unwrap();
        let failed = result("b failed", 1.0, TestOutcome::Failed);
        let record = Record::new("guests", Duration::from_secs(2), false);
        record.append(directory.path(), &[failed]).unwrap();
        let report = TierReport::read("test", directory.path(), Duration::from_secs(6), false);
        let report = report.unwrap();
        assert_eq!(report.flaky(), ["a flaky"]);
        assert_eq!(
            report.to_string(),
            "\ntest: the slowest tests\n      3.0 s  a flaky\n      1.0 s  b failed\n      0.5 s  a fast
test: steps\n      4.0 s  unit tests\n      2.0 s  guests  FAILED\n      6.0 s  together
FAILED: b failed\nFLAKY: a flaky\n       logs/1
test: 2 passed, 1 failed, 1 flaky\n2 passed, 1 failed\n"
        );
    }
}
