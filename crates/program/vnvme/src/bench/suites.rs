//! Measurement suites and comparisons are a separate program, `vnvme-bench`. `vnvme bench` runs it
//! for `--suite`, `--against`, `--report`, `--compare` and `--keep`, if it is in the same directory
//! as this program.

use anyhow::{Context, Result};
use config::usage_error::UsageError;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

const PROGRAM: &str = "vnvme-bench";

/// Returns the arguments for `vnvme-bench` if this command line requests a suite. `args` exclude
/// the program's name.
pub fn wanted(args: impl IntoIterator<Item = OsString>) -> Option<Vec<OsString>> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let options = args.iter().take_while(|arg| *arg != "--");
    let suite = options.into_iter().any(|arg| {
        let name = arg.to_str().map(|arg| arg.split('=').next().unwrap_or(arg));
        matches!(
            name,
            Some("--suite" | "--against" | "--report" | "--compare" | "--keep")
        )
    });
    // Global options may precede the command; one of them has a value.
    let command = args.iter().position(|arg| arg == "bench")?;
    let global = args.get(..command)?;
    let is_command = match global {
        [] => true,
        [log] => log.to_str().is_some_and(|log| log.starts_with("--log=")),
        [log, _] => log == "--log",
        _ => false,
    };
    (suite && is_command).then(|| {
        args.remove(command);
        args
    })
}

/// Replaces this process with `vnvme-bench`. Returns only on failure.
///
/// # Errors
/// A message for the user when the program cannot be executed.
pub fn run(args: &[OsString]) -> Result<()> {
    let own = std::env::current_exe().context("the program's own path")?;
    let program = own.with_file_name(PROGRAM);
    if !program.is_file() {
        return Err(UsageError::error(format!(
            "suites and comparisons are a program of their own, {PROGRAM}, which is not beside this \
             one; in the repository this builds both: cargo build --release -p vnvme -p bench"
        )));
    }
    let error = Command::new(&program).args(args).exec();
    Err(error).with_context(|| format!("{}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn suite_and_report_options_reach_bench_program() {
        for (line, passed) in [
            ("bench --suite cost --runs 1", "--suite cost --runs 1"),
            ("bench --runs 1 --suite=all", "--runs 1 --suite=all"),
            ("bench --report --add a.json", "--report --add a.json"),
            ("bench --compare old.json", "--compare old.json"),
            ("bench --keep kept", "--keep kept"),
            ("bench null://1T --against spdk", "null://1T --against spdk"),
            (
                "--log debug bench --suite bench",
                "--log debug --suite bench",
            ),
            ("--log=debug bench --report", "--log=debug --report"),
        ] {
            assert_eq!(wanted(words(line)), Some(words(passed)), "{line}");
        }
        for line in [
            "bench mem://1M",
            "bench -- --suite",
            "serve bench --suite",
            "stats --report",
            "--suite cost",
            "",
        ] {
            assert_eq!(wanted(words(line)), None, "{line}");
        }
    }
}
