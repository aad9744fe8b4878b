//! Tests run by cargo-nextest, whose JUnit report has the time and the attempts of each test.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use roxmltree::{Document, Node};

use crate::step::{TestOutcome, TestResult};

/// Runs tests; answers whether all passed, and the result of each.
///
/// # Errors
/// cargo cannot be started, or its report cannot be read.
pub fn run(
    target: &Path,
    directory: &Path,
    name: &str,
    repeat: bool,
    arguments: &[String],
) -> Result<(bool, Vec<TestResult>)> {
    println!("--- {name}: cargo nextest run {}", arguments.join(" "));
    let profile = std::env::var("NEXTEST_PROFILE").unwrap_or_else(|_| "default".to_owned());
    let file = target.join("nextest").join(profile).join("junit.xml");
    // A run that does not build leaves the report of an earlier one.
    let _ = fs::remove_file(&file);
    let mut command = crate::cargo();
    command.args(["nextest", "run", "--no-tests", "fail"]);
    if !repeat {
        command.args(["--retries", "0"]);
    }
    let status = command.args(arguments).status();
    let status = status.context("starting cargo nextest")?;
    let Ok(text) = fs::read_to_string(&file) else {
        return Ok((false, Vec::new()));
    };
    let results = results(&text, &directory.join("logs"));
    let results = results.with_context(|| format!("reading {}", file.display()))?;
    Ok((status.success(), results))
}

/// Results of the tests in a JUnit report. The output of each attempt of a flaky test is written
/// below `logs`.
fn results(text: &str, logs: &Path) -> Result<Vec<TestResult>> {
    let document = Document::parse(text)?;
    let cases = document
        .descendants()
        .filter(|n| n.has_tag_name("testcase"));
    cases.map(|case| result(case, logs)).collect()
}

fn result(case: Node<'_, '_>, logs: &Path) -> Result<TestResult> {
    let attribute = |name| case.attribute(name).unwrap_or_default();
    let test = format!("{} {}", attribute("classname"), attribute("name"));
    let has = |tag| case.children().any(|child| child.has_tag_name(tag));
    let outcome = if has("failure") || has("error") {
        TestOutcome::Failed
    } else if has("flakyFailure") || has("flakyError") {
        TestOutcome::Flaky
    } else {
        TestOutcome::Passed
    };
    let mut written = Vec::new();
    if outcome == TestOutcome::Flaky {
        fs::create_dir_all(logs)?;
        let failed = case.children();
        let failed =
            failed.filter(|n| n.has_tag_name("flakyFailure") || n.has_tag_name("flakyError"));
        for (attempt, node) in failed.chain([case]).enumerate() {
            written.push(write_log(logs, &test, attempt + 1, node)?);
        }
    }
    Ok(TestResult {
        seconds: attribute("time").parse().ok(),
        logs: written,
        outcome,
        test,
    })
}

/// Writes the output that a report holds of one attempt.
fn write_log(logs: &Path, test: &str, attempt: usize, node: Node<'_, '_>) -> Result<PathBuf> {
    let mut text = node.attribute("message").unwrap_or_default().to_owned();
    for output in node
        .children()
        .filter(|n| n.has_tag_name("system-out") || n.has_tag_name("system-err"))
    {
        text.push('\n');
        text.push_str(output.text().unwrap_or_default());
    }
    let name = test.replace([' ', '/'], "-").replace("::", "-");
    let path = logs.join(format!("{name}.{attempt}.log"));
    fs::write(&path, text)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="3">
  <testsuite name="a::it" tests="3">
    <testcase name="one" classname="a::it" time="1.5"></testcase>
    <testcase name="two::x" classname="a::it" time="2">
      <flakyFailure message="no luck" type="test failure">why<system-out>first</system-out></flakyFailure>
      <system-out>second</system-out>
    </testcase>
    <testcase name="three" classname="a::it" time="0.1">
      <failure type="test failure">why</failure>
    </testcase>
  </testsuite>
</testsuites>"#;

    #[test]
    fn nextest_report_has_outcomes_times_and_logs() {
        let directory = tempfile::tempdir().unwrap();
        let results = results(REPORT, directory.path()).unwrap();
        let outcomes: Vec<_> = results
            .iter()
            .map(|r| (r.test.as_str(), r.outcome))
            .collect();
        assert_eq!(
            outcomes,
            [
                ("a::it one", TestOutcome::Passed),
                ("a::it two::x", TestOutcome::Flaky),
                ("a::it three", TestOutcome::Failed)
            ]
        );
        assert_eq!(results[0].seconds, Some(1.5));
        let logs: Vec<_> = results[1]
            .logs
            .iter()
            .map(|p| fs::read_to_string(p).unwrap())
            .collect();
        assert_eq!(logs, ["no luck\nfirst", "\nsecond"]);
    }

    #[test]
    fn truncated_report_is_error() {
        let half = &REPORT[..REPORT.len() / 2];
        assert!(results(half, Path::new("/nonexistent")).is_err());
    }
}
