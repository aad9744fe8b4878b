//! Rights that the running daemon has given up. (The tests of `sandbox` try each rule.)

use std::fs;
use std::os::unix::fs::chown;

use rustix::thread::CapabilitySet;

use crate::common::*;

/// Returns fields of each thread's status: its name, and those in `wanted`.
fn threads<const N: usize>(pid: u32, wanted: [&str; N]) -> Vec<(String, [String; N])> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |status: String| {
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        (field("Name:"), wanted.map(field))
    };
    let statuses = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("status")));
    // A thread that has just ended has no status.
    statuses.filter_map(|status| status.ok().map(of)).collect()
}

/// Everything is configured that has threads: the kernel's own ones work in the background, too.
#[test]
fn threads_keep_no_privileges() {
    let test_dir = TestDir::new();
    let (disk, other) = (
        test_dir.disk("a.raw", 1 << 20),
        test_dir.disk("b.raw", 1 << 20),
    );
    let (control, export) = (
        text(&test_dir.path("control")),
        text(&test_dir.path("export")),
    );
    let more = ["--control", &control, "--workers", "2", "--sqpoll"];
    let more = [&more[..], &["--vhost-user-blk", &export, &other, &disk]].concat();
    let daemon = Daemon::serve(&test_dir, &more);
    let mut host = Lone::open(&format!("vfio-user://{}/1", text(&test_dir.socket())));
    assert!(host.read(0), "it serves");
    all_stats(&control);
    daemon.wait_log(|line| line.contains("sandbox: landlock: "));
    // Threads that were there before gave up everything themselves.
    assert_eq!(daemon.count("all of threads"), 0, "{:?}", daemon.log());
    let fields = ["CapPrm:", "CapEff:", "CapAmb:", "NoNewPrivs:", "Seccomp:"];
    let none = "0000000000000000";
    let threads = threads(daemon.pid(), fields);
    assert!(threads.len() >= 6, "{threads:?}");
    for (name, fields) in threads {
        assert_eq!(fields, [none, none, none, "1", "2"], "{name}");
    }
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core"));
    let core: Vec<_> = core.unwrap().split_whitespace().collect();
    assert_eq!(core[4..6], ["0", "0"], "{core:?}");
    drop(host);
    let ended = daemon.end();
    // Files that have to be removed are removed.
    for path in [&control, &export, &text(&test_dir.socket())] {
        assert!(!fs::exists(path).unwrap(), "{path}: {ended:?}");
    }
}

#[test]
fn disabled_sandbox_keeps_privileges_and_warns() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M", "--sandbox", "off"]);
    assert_eq!(daemon.count("WARN"), 1, "{:?}", daemon.log());
    daemon.wait_log(|line| line.contains("WARN") && line.contains("--sandbox off"));
    for (name, [seccomp]) in threads(daemon.pid(), ["Seccomp:"]) {
        assert_eq!(seccomp, "0", "{name}");
    }
    daemon.end();
}

/// The child of a process.
fn child_of(pid: u32) -> Option<u32> {
    let is_child = |candidate: &u32| {
        let stat = fs::read_to_string(format!("/proc/{candidate}/stat")).unwrap_or_default();
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let (state, parent) = (fields.next(), fields.next());
        state != Some("Z") && parent == Some(&pid.to_string())
    };
    let names = fs::read_dir("/proc").unwrap();
    let mut pids = names.filter_map(|name| name.unwrap().file_name().to_str()?.parse().ok());
    pids.find(is_child)
}

/// Covers the process that reads clients' messages, and the one that starts it.
#[test]
fn helper_processes_are_sandboxed_and_restarted() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let starter = child_of(daemon.pid()).expect("it was started before");
    let mut before = child_of(starter).expect("it has been started");
    for (name, fields) in threads(starter, ["CapEff:", "CapPrm:", "NoNewPrivs:"]) {
        // Files of other users, where root has this right.
        let kept = ["0000000000000000", "0000000000000002"];
        assert!(
            fields[..2].iter().all(|set| kept.contains(&&**set)),
            "{name}: {fields:?}"
        );
        assert_eq!(fields[2], "1", "{name}");
    }
    for round in 0..3 {
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &pattern(round, 4096));
        let fields = ["CapEff:", "CapPrm:", "NoNewPrivs:", "Seccomp:"];
        for (name, fields) in threads(before, fields) {
            let none = "0000000000000000";
            assert_eq!(fields, [none, none, "1", "2"], "{name}");
        }
        drop(host);
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(before as i32).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        eventually("it is started again", || {
            child_of(starter).is_some_and(|now| now != before)
        });
        before = child_of(starter).unwrap();
    }
    // Each kill was logged, and nothing else.
    eventually("each was told", || daemon.count("ERROR") >= 3);
    assert_eq!(daemon.count("ERROR"), 3, "{:?}", daemon.log());
    daemon.end();
    eventually("its helpers end, too", || {
        [starter, before].iter().all(|pid| !is_alive(*pid))
    });
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// The daemon runs as an unprivileged user who owns the files.
#[test]
fn sandbox_works_for_any_user() {
    const NOBODY: u32 = 65534;
    let held = rustix::thread::capabilities(None).unwrap().effective;
    if !held.contains(CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::CHOWN) {
        testkit::skip("vnvme: the daemon as another user", "needs root");
        return;
    }
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    for path in [test_dir.path("."), test_dir.path("disk.raw")] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    // A place where other users may read the program.
    let program = test_dir.path("vnvme");
    put_program(env!("CARGO_BIN_EXE_vnvme"), &program);
    let socket = text(&test_dir.socket());
    let args = ["serve", "--socket", &socket, "--pin-memory", &disk];
    let daemon = Daemon::spawn_as(NOBODY, &program, &args);
    daemon.wait_listening(&test_dir.socket());
    let mut host = Lone::open(&format!("vfio-user://{socket}/1"));
    assert!(host.read(0), "it serves");
    for (name, fields) in threads(daemon.pid(), ["Uid:", "NoNewPrivs:", "Seccomp:"]) {
        assert_eq!(fields, ["65534", "1", "2"], "{name}");
    }
    drop(host);
    daemon.end();
    assert!(!test_dir.socket().exists());
}
