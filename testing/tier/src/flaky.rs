//! Limits of flaky tests: two in one run, and none of them twice in the last ten runs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Maximum number of flaky tests in one run.
const MAX_IN_ONE_RUN: usize = 2;
/// Number of newest runs that the history of flaky tests holds.
const RUNS: usize = 10;

/// Adds the flaky tests of a run to the history, and answers each limit that they exceed.
///
/// # Errors
/// The history cannot be read or written.
pub fn judge(history: &Path, flaky: &[String]) -> Result<Vec<String>> {
    let earlier = match fs::read_to_string(history) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(e).with_context(|| format!("reading {}", history.display())),
    };
    let mut runs: Vec<Vec<String>> = earlier
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let mut exceeded = Vec::new();
    if flaky.len() > MAX_IN_ONE_RUN {
        exceeded.push(format!(
            "{} tests passed only when repeated; at most {MAX_IN_ONE_RUN} may",
            flaky.len()
        ));
    }
    let recent = runs.len().saturating_sub(RUNS - 1);
    runs.drain(..recent);
    for test in flaky
        .iter()
        .filter(|test| runs.iter().flatten().any(|t| t == *test))
    {
        exceeded.push(format!("{test}: a second time in the last {RUNS} runs"));
    }
    runs.push(flaky.to_vec());
    let lines: Result<Vec<_>, _> = runs.iter().map(serde_json::to_string).collect();
    fs::write(history, lines?.join("\n") + "\n")
        .with_context(|| format!("writing {}", history.display()))?;
    Ok(exceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn flaky_test_is_accepted_once_in_ten_runs() {
        let directory = tempfile::tempdir().unwrap();
        let history = directory.path().join("history");
        let judged = |flaky: &[&str]| judge(&history, &names(flaky)).unwrap().len();
        assert_eq!(judged(&["a", "b"]), 0);
        assert_eq!(judged(&["a"]), 1);
        for _ in 0..9 {
            assert_eq!(judged(&[]), 0);
        }
        assert_eq!(judged(&["a"]), 0);
    }

    #[test]
    fn three_flaky_tests_exceed_limit() {
        let directory = tempfile::tempdir().unwrap();
        let history = directory.path().join("history");
        assert_eq!(judge(&history, &names(&["a", "b", "c"])).unwrap().len(), 1);
    }
}
