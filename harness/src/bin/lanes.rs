//! Runs the workspace's tests as `cargo test --workspace --no-fail-fast` does, but those of some
//! packages several at a time: a guest leaves a processor idle for much of its time.
//!
//! What a test program prints is printed whole when it ends; which of them took the longest is
//! said at the end.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::Value;

/// Runs the workspace's tests, those of some packages several at a time.
#[derive(Parser)]
struct Args {
    /// How many test programs run at a time, of the packages of --beside
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    lanes: u8,
    /// A package whose test programs run beside each other, one test of each at a time; those of
    /// the first named begin
    #[arg(long, value_name = "PACKAGE")]
    beside: Vec<String>,
    /// A test program of such a package that begins before its others, as it takes long: at the end
    /// it would run beside nothing
    #[arg(long, value_name = "NAME")]
    early: Vec<String>,
    /// A test program of such a package that runs alone
    #[arg(long, value_name = "NAME")]
    alone: Vec<String>,
}

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    package: String,
    name: String,
    program: PathBuf,
    /// Where cargo runs it.
    dir: PathBuf,
}

impl Target {
    /// The test program that a line of `cargo --message-format=json` is about, if it is.
    fn of(line: &str) -> Option<Target> {
        let said: Value = serde_json::from_str(line).ok()?;
        let text = |at: &str| said.pointer(at).and_then(Value::as_str);
        let is_test = said.pointer("/profile/test") == Some(&Value::Bool(true));
        let is_test = is_test && text("/reason") == Some("compiler-artifact");
        let program = text("/executable").filter(|_| is_test)?;
        let mut dir = PathBuf::from(text("/manifest_path")?);
        dir.pop();
        Some(Target {
            package: dir.file_name()?.to_str()?.to_owned(),
            name: text("/target/name")?.to_owned(),
            program: program.into(),
            dir,
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.dir).stdin(Stdio::null());
        command.env("CARGO_MANIFEST_DIR", &self.dir);
        command
    }
}

/// How a test program ended.
struct Ended {
    what: String,
    passed: bool,
    took: Duration,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let (mut beside, alone): (Vec<_>, Vec<_>) = build()?.into_iter().partition(|target| {
        args.beside.contains(&target.package) && !args.alone.contains(&target.name)
    });
    beside.sort_by_key(|target| {
        let package = args.beside.iter().position(|one| *one == target.package);
        (package, !args.early.contains(&target.name))
    });
    let mut ended = run_beside(args.lanes, beside)?;
    for target in alone {
        println!("     Running {} {}", target.package, target.name);
        ended.push(run(&target, target.command())?);
    }
    let began = Instant::now();
    let status = cargo(&["--doc", "--no-fail-fast"]).status()?;
    ended.push(Ended {
        what: "documentation".to_owned(),
        passed: status.success(),
        took: began.elapsed(),
    });
    Ok(summary(ended))
}

fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--workspace"]).args(words);
    command
}

/// Builds all test programs of the workspace.
fn build() -> Result<Vec<Target>> {
    let mut cargo = cargo(&["--no-run", "--message-format=json-render-diagnostics"]);
    let built = cargo.stderr(Stdio::inherit()).output();
    let built = built.context("starting cargo")?;
    ensure!(built.status.success(), "the tests are not built");
    let told = String::from_utf8(built.stdout).context("what cargo tells of its artifacts")?;
    let mut targets: Vec<_> = told.lines().filter_map(Target::of).collect();
    ensure!(!targets.is_empty(), "cargo told of no test program");
    targets.sort_by(|a, b| (&a.package, &a.name).cmp(&(&b.package, &b.name)));
    Ok(targets)
}

fn run(target: &Target, mut command: Command) -> Result<Ended> {
    let began = Instant::now();
    let status = command.status();
    let status = status.with_context(|| format!("starting {}", target.program.display()))?;
    Ok(Ended {
        what: format!("{} {}", target.package, target.name),
        passed: status.success(),
        took: began.elapsed(),
    })
}

fn run_beside(lanes: u8, targets: Vec<Target>) -> Result<Vec<Ended>> {
    let waiting = Mutex::new(VecDeque::from(targets));
    let printing = Mutex::new(());
    let lane = || -> Result<Vec<Ended>> {
        let mut ended = Vec::new();
        loop {
            let next = lock(&waiting).pop_front();
            let Some(target) = next else {
                return Ok(ended);
            };
            let mut said = tempfile::tempfile()?;
            let mut command = target.command();
            command.env("RUST_TEST_THREADS", "1");
            // How long each step of a guest took.
            command.arg("--show-output");
            command.stdout(said.try_clone()?).stderr(said.try_clone()?);
            let end = run(&target, command)?;
            let _one = lock(&printing);
            print(&end, &mut said)?;
            ended.push(end);
        }
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let mut ended = Vec::new();
        for lane in lanes {
            let joined = lane.join().map_err(|_| anyhow::anyhow!("a lane panicked"));
            ended.extend(joined??);
        }
        Ok(ended)
    })
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn print(end: &Ended, said: &mut File) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "     Running {}", end.what)?;
    said.rewind()?;
    io::copy(said, &mut out)?;
    out.flush()?;
    Ok(())
}

/// Says what took the longest, and what failed.
fn summary(mut ended: Vec<Ended>) -> ExitCode {
    ended.sort_by_key(|end| std::cmp::Reverse(end.took));
    println!("{} test programs; the longest:", ended.len());
    for end in ended.iter().take(12) {
        println!("{:8.1} s  {}", end.took.as_secs_f64(), end.what);
    }
    let failed: Vec<_> = ended.iter().filter(|end| !end.passed).collect();
    for end in &failed {
        println!("FAILED: {}", end.what);
    }
    match failed.is_empty() {
        true => ExitCode::SUCCESS,
        // As cargo ends.
        false => ExitCode::from(101),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"reason":"compiler-artifact","manifest_path":"/w/crates/x/Cargo.toml",
        "target":{"kind":["test"],"name":"y"},"profile":{"test":true},"executable":"/w/t/y-1"}"#;

    #[test]
    fn test_programs_are_found_and_nothing_else() {
        let found = Target::of(LINE).expect("a test program");
        let wanted = Target {
            package: "x".to_owned(),
            name: "y".to_owned(),
            program: "/w/t/y-1".into(),
            dir: "/w/crates/x".into(),
        };
        assert_eq!(found, wanted);
        for (from, to) in [
            ("\"test\":true", "\"test\":false"),
            ("\"/w/t/y-1\"", "null"),
            ("compiler-artifact", "build-finished"),
            ("{\"reason\"", "\"reason\""),
        ] {
            let line = LINE.replacen(from, to, 1);
            assert_ne!(line, LINE);
            assert_eq!(Target::of(&line), None, "{line}");
        }
    }

    fn script(name: &str, text: &str) -> Target {
        let dir = std::env::temp_dir();
        let program = dir.join(format!("lanes-{}-{name}", std::process::id()));
        std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).expect("made a program");
        Target {
            package: "scripts".to_owned(),
            name: name.to_owned(),
            program,
            dir,
        }
    }

    #[test]
    fn each_runs_once_two_at_a_time_and_failures_are_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path().display();
        // Each of the first two ends only beside the other.
        let meets = |name: &str, other: &str| {
            let text =
                format!("touch {at}/{name}; while [ ! -e {at}/{other} ]; do sleep 0.05; done");
            script(name, &format!("echo {name} >>{at}/all; {text}"))
        };
        let fails = script("fails", &format!("echo fails >>{at}/all; exit 3"));
        let targets = vec![meets("a", "b"), meets("b", "a"), fails];
        let ended = run_beside(2, targets.clone()).expect("all were started");
        for target in targets {
            std::fs::remove_file(target.program).expect("removed");
        }
        let all = std::fs::read_to_string(dir.path().join("all")).expect("what has run");
        let mut all: Vec<_> = all.lines().collect();
        all.sort_unstable();
        assert_eq!(all, ["a", "b", "fails"]);
        let failed: Vec<_> = ended.iter().filter(|end| !end.passed).collect();
        let failed: Vec<_> = failed.iter().map(|end| end.what.as_str()).collect();
        assert_eq!(failed, ["scripts fails"]);
        assert_eq!(summary(ended), ExitCode::from(101));
        assert_eq!(summary(Vec::new()), ExitCode::SUCCESS);
    }
}
