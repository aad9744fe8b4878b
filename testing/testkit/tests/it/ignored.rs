//! Ignored tests: each one is run by `make test-long`, or is a process that another test starts.

use std::fs;
use std::path::{Path, PathBuf};

/// Reason of a test that another test starts as a process.
const HELPER: &str = "a process that another test starts: ";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Rust files below a directory.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Module and reason of every ignored test of the workspace.
fn ignored() -> Vec<(String, String)> {
    let mut files = Vec::new();
    for directory in ["crates", "examples", "testing"] {
        sources(&root().join(directory), &mut files);
    }
    let mut all = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let module = file.file_stem().unwrap().to_string_lossy().into_owned();
        let lines = text.lines().map(str::trim);
        for line in lines.filter(|line| line.starts_with("#[ignore")) {
            let reason = line.strip_prefix("#[ignore = \"");
            let reason = reason.and_then(|rest| rest.strip_suffix("\"]"));
            all.push((module.clone(), reason.unwrap_or_default().to_owned()));
        }
    }
    all
}

#[test]
fn ignored_test_has_reason_and_runs_in_test_long() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let all = ignored();
    assert!(all.len() >= 9, "the tests are not found: {all:?}");
    for (module, reason) in all {
        if reason.starts_with(HELPER) {
            continue;
        }
        let runs = format!("-- --ignored {module}::");
        assert!(
            !reason.is_empty(),
            "{module}: an ignored test without a reason"
        );
        assert!(
            makefile.lines().any(|line| line.contains(&runs)),
            "{module}: no line of test-long has {runs:?}"
        );
    }
}
