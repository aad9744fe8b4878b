//! A failed test is run once more by `cargo test`, too.

use std::fs;

use serde_json::Value;

use crate::{Workspace, printed};

/// `flaky` passes from its second run on, `broken` and `ignored` never. The attribute is none that
/// the workspace's own list of ignored tests finds.
const TESTS: &str = r#"
#[test]
fn steady() {}

#[test]
fn flaky() {
    let mark = concat!(env!("CARGO_MANIFEST_DIR"), "/target/ran");
    assert!(std::fs::exists(mark).unwrap() || std::fs::write(mark, "").is_err(), "first run");
}

#[test]
fn broken() {
    panic!("as ever");
}

#[test]
#[cfg_attr(all(), ignore = "asked for by one test")]
fn ignored() {
    panic!("as ever");
}
"#;

/// Outcome and number of logs of each test, from the records of the step.
fn outcomes(workspace: &Workspace) -> Vec<(String, String, usize)> {
    let records = workspace.path().join("target/tier/alone/tests");
    let records = fs::read_to_string(records).unwrap();
    let outcome = |line: &str| {
        let record: Value = serde_json::from_str(line).unwrap();
        let test = record["test"].as_str().unwrap();
        let name = test.rsplit(' ').next().unwrap().to_owned();
        let logs = record["logs"].as_array().map_or(0, Vec::len);
        (name, record["outcome"].as_str().unwrap().to_owned(), logs)
    };
    let mut all: Vec<_> = records.lines().map(outcome).collect();
    all.sort_unstable();
    all
}

fn expected(of_flaky: &str, logs: usize) -> Vec<(String, String, usize)> {
    let of = |name: &str, outcome: &str, logs| (name.to_owned(), outcome.to_owned(), logs);
    vec![
        of("broken", "failed", 0),
        of("flaky", of_flaky, logs),
        of("steady", "passed", 0),
    ]
}

#[test]
fn failed_test_is_repeated_and_flaky_when_it_passes_then() {
    let workspace = Workspace::new(TESTS);
    let run = workspace.tier(&["tests", "all", "--repeat", "--lib"]);
    assert!(!run.status.success(), "{}", printed(&run));
    assert_eq!(
        outcomes(&workspace),
        expected("flaky", 2),
        "{}",
        printed(&run)
    );
    let log = |attempt| {
        let name = format!("target/tier/alone/logs/flaky.{attempt}.log");
        fs::read_to_string(workspace.path().join(name)).unwrap()
    };
    assert!(log(1).contains("first run"), "{}", log(1));
    assert!(log(2).contains("test flaky ... ok"), "{}", log(2));
}

#[test]
fn failed_test_without_repeat_has_failed() {
    let workspace = Workspace::new(TESTS);
    let run = workspace.tier(&["tests", "all", "--lib"]);
    assert!(!run.status.success(), "{}", printed(&run));
    assert_eq!(
        outcomes(&workspace),
        expected("failed", 0),
        "{}",
        printed(&run)
    );
}

#[test]
fn run_whose_failed_tests_are_all_flaky_has_passed() {
    let workspace = Workspace::new(TESTS);
    let run = workspace.tier(&["tests", "all", "--repeat", "--lib", "--", "flaky", "steady"]);
    assert!(run.status.success(), "{}", printed(&run));
}

#[test]
fn ignored_test_is_repeated_as_it_was_run() {
    let workspace = Workspace::new(TESTS);
    let run = workspace.tier(&["tests", "all", "--repeat", "--lib", "--", "--ignored"]);
    assert!(!run.status.success(), "{}", printed(&run));
    let failed = ("ignored".to_owned(), "failed".to_owned(), 0);
    assert_eq!(outcomes(&workspace), [failed], "{}", printed(&run));
}
