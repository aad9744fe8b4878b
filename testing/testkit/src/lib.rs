//! Reports of skipped tests, the process ID of a serving process under a keeper, [`huge`] pages of
//! the host, and the commands printed on [`pages`].
//!
//! A test that cannot run on a machine passes all the same, and the test runner hides its output.
//! [`skip`] therefore writes past the runner to standard error, and to the file that [`FILE`]
//! names: `testing/harness/skips.sh`, in which each tier of tests runs, empties that file first,
//! prints it at the end, and in CI fails on a line that `.ci/skips` does not list.
//!
//! Only for tests: a `dev-dependency`, and a dependency of the guest harness and the benchmarks.
#![forbid(unsafe_code)]

pub mod huge;
pub mod pages;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Environment variable that names the file for skips. Without it they are written to standard
/// error alone.
pub const FILE: &str = "VNVME_SKIPS";

/// Process name of a keeper.
const KEEPER: &str = "vnvme-keeper";

/// Returns the process ID of the serving process of a `vnvme serve` with this process ID: its child
/// if it is a keeper.
#[must_use]
pub fn serving(pid: u32) -> u32 {
    let of = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
    let keeps = of("comm").is_ok_and(|comm| comm.trim() == KEEPER);
    let children = of(&format!("task/{pid}/children")).ok().filter(|_| keeps);
    let first = children.and_then(|text| text.split_whitespace().next()?.parse().ok());
    first.unwrap_or(pid)
}

/// Reports that a test, or the part of it named by `what`, does not run on this machine, and the
/// reason.
///
/// `what` begins with the crate: `volume::system::block_device_reads_back_writes`. The list of
/// accepted skips has patterns for whole lines "what: reason": keep details that differ between
/// runs out of the reason.
///
/// # Panics
/// When the file cannot be written, because an unreported skip counts as a failure.
#[track_caller]
pub fn skip(what: &str, reason: impl Display) {
    let line = line(what, reason);
    // `eprintln!` would not do, because the test runner hides its output when the test passes. If
    // writing fails, the file still counts.
    let _ = io::stderr().write_all(format!("skipped: {line}").as_bytes());
    if let Some(file) = std::env::var_os(FILE).filter(|file| !file.is_empty()) {
        record(Path::new(&file), &line);
    }
}

/// Formats a skip as one line, whatever line breaks the reason contains.
fn line(what: &str, reason: impl Display) -> String {
    let reason = reason.to_string();
    let words: Vec<&str> = reason.split_whitespace().collect();
    format!("{what}: {}\n", words.join(" "))
}

#[track_caller]
#[expect(clippy::panic, reason = "the test that skips has to fail")]
fn record(file: &Path, line: &str) {
    if let Err(error) = append(file, line) {
        panic!(
            "{}: {error}: this skip would not be seen: {line}",
            file.display()
        );
    }
}

/// Appends a line in one system call, so that lines of concurrent processes do not mix (open(2),
/// `O_APPEND`).
fn append(file: &Path, line: &str) -> io::Result<()> {
    let mut file = File::options().create(true).append(true).open(file)?;
    match file.write(line.as_bytes())? {
        written if written == line.len() => Ok(()),
        written => Err(io::Error::other(format!(
            "{written} of {} bytes written",
            line.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn skip_is_recorded_as_whole_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("skips.txt");
        let threads = 8;
        let barrier = Barrier::new(threads);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (path, barrier) = (&path, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for round in 0..100 {
                        let reason = format!("line one\n  line two {}", "x".repeat(200));
                        let what = format!("testkit::{thread}::{round}");
                        record(path, &line(&what, &reason));
                    }
                });
            }
        });
        let text = std::fs::read_to_string(&path).unwrap();
        let mut found: Vec<&str> = text.lines().collect();
        let mut wanted = Vec::new();
        for thread in 0..threads {
            for round in 0..100 {
                let x = "x".repeat(200);
                wanted.push(format!("testkit::{thread}::{round}: line one line two {x}"));
            }
        }
        found.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(found, wanted);
    }

    #[test]
    fn unrecordable_skip_fails_test() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("missing").join("skips.txt");
        let result = std::panic::catch_unwind(|| record(&path, "what: why\n"));
        assert!(result.is_err());
    }
}
