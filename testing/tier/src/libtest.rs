//! Tests run by `cargo test`, where cargo-nextest is not installed. The runner measures no times.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::step::{TestOutcome, TestResult};

/// Runs tests; answers whether all passed, and the result of each.
///
/// # Errors
/// cargo cannot be started, or a log cannot be written.
pub fn run(
    directory: &Path,
    repeat: bool,
    arguments: &[String],
) -> Result<(bool, Vec<TestResult>)> {
    let (passed, mut results, output) = cargo_test(arguments)?;
    let only_tests_failed = results.iter().any(|r| r.outcome == TestOutcome::Failed);
    if passed || !repeat || !only_tests_failed {
        return Ok((passed, results));
    }
    let logs = directory.join("logs");
    fs::create_dir_all(&logs)?;
    // Options of cargo; the names that the first run selected are replaced by the one test's.
    let options = arguments.split(|word| word == "--").next();
    let options = options.unwrap_or_default();
    for result in results
        .iter_mut()
        .filter(|r| r.outcome == TestOutcome::Failed)
    {
        let name = result.test.split(' ').next_back().unwrap_or_default();
        println!("--- once more: {name}");
        // An ignored test was asked for by an option that is not among those of cargo.
        let exact = ["--", "--include-ignored", "--exact", name].map(str::to_owned);
        let (_, repeated, again) = cargo_test(&[options, &exact].concat())?;
        let of_test = |one: &&TestResult| one.test == result.test;
        if repeated.iter().find(of_test).map(|one| one.outcome) == Some(TestOutcome::Passed) {
            result.outcome = TestOutcome::Flaky;
            for (attempt, text) in [(1, &output), (2, &again)] {
                let file = logs.join(format!("{}.{attempt}.log", name.replace("::", "-")));
                fs::write(&file, text)?;
                result.logs.push(file);
            }
        }
    }
    let passed = results.iter().all(|r| r.outcome != TestOutcome::Failed);
    Ok((passed, results))
}

/// Outcome of `cargo test`: whether it succeeded, the results, and everything that it printed.
fn cargo_test(arguments: &[String]) -> Result<(bool, Vec<TestResult>, String)> {
    println!("--- cargo test --no-fail-fast {}", arguments.join(" "));
    let mut command = crate::cargo();
    command.args(["test", "--no-fail-fast"]).args(arguments);
    // Both streams in the order in which they were written: cargo names each program on one.
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    command.stdin(Stdio::null());
    let mut child = command.spawn().context("starting cargo test")?;
    drop(command);
    let mut parser = Parser::default();
    let mut output = String::new();
    let mut lines = BufReader::new(reader);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        print!("{text}");
        output.push_str(&text);
        parser.line(text.trim_end());
        line.clear();
    }
    let status = child.wait()?;
    Ok((status.success(), parser.results, output))
}

/// Reads the lines of `cargo test`.
#[derive(Debug, Default)]
struct Parser {
    program: String,
    results: Vec<TestResult>,
}

impl Parser {
    fn line(&mut self, line: &str) {
        if let Some(program) = line.trim_start().strip_prefix("Running ") {
            program.clone_into(&mut self.program);
        }
        let Some((name, verdict)) = line
            .strip_prefix("test ")
            .and_then(|l| l.rsplit_once(" ... "))
        else {
            return;
        };
        let outcome = match verdict {
            "ok" => TestOutcome::Passed,
            "FAILED" => TestOutcome::Failed,
            _ => return,
        };
        self.results.push(TestResult {
            test: format!("{} {name}", self.program),
            seconds: None,
            outcome,
            logs: Vec::new(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_test_lines_are_parsed() {
        let mut parser = Parser::default();
        for line in [
            "     Running tests/it/main.rs (target/debug/deps/it-1)",
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "test a::d ... ignored, a process of another test",
            "test result: FAILED. 1 passed; 1 failed",
        ] {
            parser.line(line);
        }
        let of = |r: &TestResult| (r.test.clone(), r.outcome);
        let program = "tests/it/main.rs (target/debug/deps/it-1)";
        assert_eq!(
            parser.results.iter().map(of).collect::<Vec<_>>(),
            [
                (format!("{program} a::b"), TestOutcome::Passed),
                (format!("{program} a::c"), TestOutcome::Failed)
            ]
        );
    }
}
