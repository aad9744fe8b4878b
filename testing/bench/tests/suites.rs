//! What a suite must not leave behind, and comparisons with other programs.
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

/// Compares vnvme with a program on a volume. Returns the JSON results.
fn against(target: &str, words: &[&str]) -> serde_json::Value {
    let job = "--runs 3 --runtime 0.2 --ramp 0 --iodepth 4 --json".split(' ');
    let output = Command::new(program())
        .arg(target)
        .args(words)
        .args(job)
        .output()
        .unwrap();
    assert!(output.status.success(), "{target}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns whether both sides of a comparison can run here.
fn has_two_cpus() -> bool {
    let has = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
    if !has {
        testkit::skip("bench::against", "it needs two CPUs");
    }
    has
}

fn ensure_results(results: &serde_json::Value, peer: &str) {
    let median = |side: &str| results[side]["iops"].as_f64().unwrap();
    for side in ["vnvme", peer] {
        let mut runs: Vec<f64> = serde_json::from_value(results[side]["runs"].clone()).unwrap();
        runs.sort_by(f64::total_cmp);
        assert_eq!((runs.len(), runs[1]), (3, median(side)), "{results}");
        assert!(runs[0] > 0.0, "{results}");
    }
    let ratio = results["ratio"].as_f64().unwrap();
    assert!(
        (ratio - median("vnvme") / median(peer)).abs() < 1e-6,
        "{results}"
    );
    assert!(
        results["round_trip_ns"].as_f64().unwrap() > 1.0,
        "{results}"
    );
}

/// Makes a script that stands for a program.
fn stand_in(path: &Path, script: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn qemu_storage_daemon_is_compared_on_null_volume_and_image() {
    if !has_two_cpus() {
        return;
    }
    for tool in ["qemu-storage-daemon", "qemu-img"] {
        if Command::new(tool).arg("--version").output().is_err() {
            return testkit::skip("bench::against_qsd", format!("there is no {tool}"));
        }
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = place.path().join("disk.qcow2");
    let create = ["create", "-q", "-f", "qcow2"];
    let made = Command::new("qemu-img")
        .args(create)
        .arg(&image)
        .arg("64M")
        .status();
    assert!(made.unwrap().success());
    let image = format!("qcow2://{}", image.display());
    for target in ["null://1G", &image] {
        let results = against(target, &["--against", "qemu-storage-daemon"]);
        ensure_results(&results, "qemu-storage-daemon");
    }
}

/// fio's place is taken by this project's load generator, whose results have fio's layout.
#[test]
fn fio_is_compared_on_file() {
    if !has_two_cpus() {
        return;
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = place.path().join("disk.raw");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let vnvme = Path::new(program()).with_file_name("vnvme");
    let words = place.path().join("words");
    let script = format!(
        "[ \"$1\" = --version ] || {{ echo \"$@\" >{}; exec {} bench {} --runtime 0.2 --json; }}",
        words.display(),
        vnvme.display(),
        disk.display()
    );
    let fio = stand_in(&place.path().join("fio"), &script);
    let disk = disk.to_str().unwrap();
    let results = against(disk, &["--against", "fio", "--program", &fio]);
    ensure_results(&results, "fio");
    let words = fs::read_to_string(words).unwrap();
    assert!(
        words.contains(&format!("--filename={disk} ")) && words.contains("--iodepth=4 "),
        "{words}"
    );
}

/// SPDK's place is taken by vnvme, with a null volume at the socket that SPDK would make.
#[test]
fn spdk_is_compared_on_null_volume() {
    if !has_two_cpus() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let vnvme = Path::new(program()).with_file_name("vnvme");
    let kept = place.path().join("config.json");
    let script = format!(
        "[ \"$1\" = --version ] && exit; cp \"$2\" {}; exec {} serve --keeper=off --socket ${{2%/*}}/cntrl null://1G",
        kept.display(),
        vnvme.display()
    );
    let spdk = stand_in(&place.path().join("spdk_tgt"), &script);
    let results = against("null://1G", &["--against", "spdk", "--program", &spdk]);
    ensure_results(&results, "spdk");
    let config: serde_json::Value = serde_json::from_slice(&fs::read(kept).unwrap()).unwrap();
    let blocks = config.pointer("/subsystems/0/config/0/params/num_blocks");
    assert_eq!(blocks.unwrap(), 2 << 20);
}

#[test]
fn comparison_overwrites_data_only_on_demand() {
    if !has_two_cpus() {
        return;
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = place.path().join("disk.raw");
    fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let fio = stand_in(&place.path().join("fio"), "exit");
    let output = Command::new(program())
        .arg(&disk)
        .args([
            "--against",
            "fio",
            "--program",
            &fio,
            "--rw",
            "randwrite",
            "--ios",
            "10",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--destroy-data overwrites it"), "{said}");
    assert_eq!(fs::read(&disk).unwrap(), vec![7; 1 << 20]);
}
