//! What the load generator must not destroy, and what it must not leave behind.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::common::*;

/// `vnvme bench` with these arguments, to its end.
fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
    command.arg("bench").args(args).env_remove("VNVME_LOG");
    command.output().unwrap()
}

fn refused(args: &[&str], reason: &str) {
    let output = bench(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert!(said.contains(reason), "{args:?}: {said}");
}

#[test]
fn what_a_disk_holds_is_overwritten_only_on_demand() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(b"\x53\xef", 0x438).unwrap();
    let before = fs::read(&disk).unwrap();
    let url = format!("file://{disk}");
    let reason = "holds an ext2, ext3 or ext4 filesystem; --destroy-data overwrites it";
    for target in [&disk, &url] {
        for rw in ["write", "randwrite", "randrw"] {
            refused(&[target, "--rw", rw, "--ios", "300"], reason);
        }
        assert!(fs::read(&disk).unwrap() == before);
        let read = bench(&[target, "--ios", "10"]);
        assert!(read.status.success(), "{read:?}");
    }
    // Behind a socket, too: a guest's disk.
    let daemon = Daemon::serve(&place, &[&disk]);
    let served = format!("vfio-user://{}/1", text(&place.socket()));
    refused(&[&served, "--rw", "randwrite", "--ios", "300"], reason);
    daemon.end();
    for target in [&disk, &url] {
        let args = [target, "--rw", "write", "--ios", "256", "--verify"];
        let wanted = bench(&[&args[..], &["--destroy-data"]].concat());
        assert!(wanted.status.success(), "{wanted:?}");
    }
    assert!(fs::read(&disk).unwrap() != before);
    // What a load has written is data, too.
    refused(&[&disk, "--rw", "write", "--ios", "1"], "holds data");
}

#[test]
fn a_disk_that_is_served_is_not_written_to() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let daemon = Daemon::serve(&place, &[&disk]);
    let url = format!("file://{disk}");
    for target in [&disk, &url] {
        let holder = format!("process {}", daemon.pid());
        let args = [target, "--rw", "randwrite", "--ios", "1", "--destroy-data"];
        refused(&args, &holder);
    }
    daemon.end();
    assert!(place.bytes("disk.raw", 0, 1 << 20) == vec![0; 1 << 20]);
    let free = bench(&[&disk, "--rw", "randwrite", "--ios", "1"]);
    assert!(free.status.success(), "{free:?}");
}

/// A suite at work, which has its folders in `temp`.
struct Suite(Child);

impl Suite {
    fn start(place: &Place, temp: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
        let words = "bench --suite doorbell --memory any --runs 1 --ramp 0 --runtime 600 --output";
        command.args(words.split(' ')).arg(place.path("output"));
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

/// Processes whose command line names something in `temp`.
fn processes(temp: &Path) -> Vec<String> {
    let names = fs::read_dir("/proc").unwrap().flatten();
    let pids = names.filter_map(|entry| entry.file_name().into_string().ok());
    let named = pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&text(temp))
    });
    named.collect()
}

#[test]
fn a_suite_that_is_ended_leaves_nothing() {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        eprintln!("skipped: a suite with a server needs two CPUs");
        return;
    }
    let place = Place::new();
    let temp = place.path("temp");
    fs::create_dir(&temp).unwrap();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        Suite::start(&place, &temp).end(signal);
        assert_eq!(folders(&temp), [""; 0].map(PathBuf::from), "{signal:?}");
        eventually("the server ends", || processes(&temp).is_empty());
    }
    // A killed one leaves a folder, without a server, and the next suite removes it.
    Suite::start(&place, &temp).end(Signal::KILL);
    let left = folders(&temp);
    assert_eq!(left.len(), 1);
    eventually("the server ends", || processes(&temp).is_empty());
    let next = Suite::start(&place, &temp);
    assert!(!left[0].exists());
    next.end(Signal::TERM);
    assert_eq!(folders(&temp), [""; 0].map(PathBuf::from));
}
