//! What a suite must not leave behind.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![allow(unsafe_code)] // `pre_exec`.

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Waits until something holds.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The suites' program, with the one that they measure built beside it.
fn program() -> &'static str {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "vnvme"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    });
    env!("CARGO_BIN_EXE_vnvme-bench")
}

/// A suite at work, which has its folders in `temp`.
struct Suite(Child);

impl Suite {
    fn start(output: &Path, temp: &Path) -> Self {
        let mut command = Command::new(program());
        let words = "--suite doorbell --memory any --runs 1 --ramp 0 --runtime 600 --output";
        command.args(words.split(' ')).arg(output);
        command.env("TMPDIR", temp).stderr(Stdio::null());
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let suite = Suite(command.spawn().unwrap());
        // A server that another suite has left a folder of is dead.
        let serves = |folder: &PathBuf| folder.join("control").exists();
        eventually("a server is there", || {
            !processes(temp).is_empty() && folders(temp).iter().any(serves)
        });
        suite
    }

    fn end(mut self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
        let status = self.0.wait().unwrap();
        let by = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(by, Some(signal.as_raw()), "{status:?}");
    }
}

fn folders(temp: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(temp).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Processes with a command line that names something in `temp`.
fn processes(temp: &Path) -> Vec<String> {
    let names = fs::read_dir("/proc").unwrap().flatten();
    let pids = names.filter_map(|entry| entry.file_name().into_string().ok());
    let named = pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(temp.to_str().unwrap())
    });
    named.collect()
}

#[test]
fn interrupted_suite_leaves_nothing() {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        testkit::skip(
            "bench::interrupted_suite_leaves_nothing",
            "it needs two CPUs",
        );
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (temp, output) = (place.path().join("temp"), place.path().join("output"));
    fs::create_dir(&temp).unwrap();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        Suite::start(&output, &temp).end(signal);
        assert_eq!(folders(&temp), [""; 0].map(PathBuf::from), "{signal:?}");
        eventually("the server ends", || processes(&temp).is_empty());
    }
    // A killed one leaves a folder, without a server, and the next suite removes it.
    Suite::start(&output, &temp).end(Signal::KILL);
    let left = folders(&temp);
    assert_eq!(left.len(), 1);
    eventually("the server ends", || processes(&temp).is_empty());
    let next = Suite::start(&output, &temp);
    assert!(!left[0].exists());
    next.end(Signal::TERM);
    assert_eq!(folders(&temp), [""; 0].map(PathBuf::from));
}
