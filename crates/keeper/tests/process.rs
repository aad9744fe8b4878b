//! A keeper process, and processes that serve under it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use keeper::{Arrival, Desk, End, Given, Keeper, Keeping, MOST_FAILURES};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);
/// Set for a process that is to be a keeper, or one that serves: what the latter does.
const KEEPER: &str = "VNVME_TEST_KEEPER";
const SERVE: &str = "VNVME_TEST_SERVE";
/// Exit codes of the keeper for ends that have no code.
const BY_SIGNAL: i32 = 100;
const GIVEN_UP: i32 = 90;
const NOT_DURABLE: i32 = 91;

/// Not a test of its own: what [`start`] starts.
#[test]
fn child_keeper() {
    let Ok(what) = std::env::var(KEEPER) else {
        return;
    };
    let mut start = |channel: OwnedFd| {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child_serving", "--nocapture"]);
        command.env_remove(KEEPER).env(SERVE, &what);
        command.stdin(Stdio::from(channel)).spawn()
    };
    let given = memfd_create("given", MemfdFlags::CLOEXEC).unwrap();
    let keeper = Keeper {
        start: &mut start,
        most: 100,
        given: vec![Given {
            name: "control".into(),
            fd: given,
        }],
        manager: std::env::var_os("NOTIFY_SOCKET").map(|path| {
            let socket = UnixDatagram::unbound().unwrap();
            socket.connect(path).unwrap();
            socket.into()
        }),
    };
    let code = match keeper.run(|| Ok(())).unwrap() {
        End::Code(code) => code.into(),
        End::Signal(signal) => BY_SIGNAL + signal,
        End::GivenUp { failures, .. } => {
            assert_eq!(failures, MOST_FAILURES);
            GIVEN_UP
        }
        End::NotDurable => NOT_DURABLE,
    };
    std::process::exit(code);
}

/// Not a test of its own: what the keeper starts.
#[test]
fn child_serving() {
    let Ok(what) = std::env::var(SERVE) else {
        return;
    };
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let channel = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let arrival = Arrival::receive(channel).unwrap();
    assert!(matches!(arrival.link.keeping(), Keeping::Process(_)));
    assert_eq!(arrival.given.len(), 1);
    assert_eq!(arrival.given[0].0, "control");
    let mut desk = Desk::new(&arrival.link);
    let count = arrival.kept.into_iter().find(|(name, _)| name == "count");
    let before = count.is_some();
    let count: File = match count {
        Some((_, fd)) => fd.into(),
        None => {
            let memory = memfd_create("count", MemfdFlags::CLOEXEC).unwrap();
            desk.store("count", memory.as_fd()).unwrap();
            let ticket = desk.barrier().unwrap();
            while !desk.is_answered(ticket) {
                desk.advance(Instant::now()).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            memory.into()
        }
    };
    let mut bytes = [0; 4];
    let _ = count.read_at(&mut bytes, 0).unwrap();
    let times = u32::from_ne_bytes(bytes);
    assert_eq!(before, times > 0);
    assert_eq!(arrival.facts.restarts, times);
    count.write_all_at(&(times + 1).to_ne_bytes(), 0).unwrap();
    let say = || println!("serving {} {times}", std::process::id());
    let die = || {
        let _ = kill_process(rustix::process::getpid(), Signal::KILL);
        unreachable!()
    };
    match &*what {
        "dies twice" => {
            arrival.link.tell("READY=1\n").unwrap();
            if times == 2 {
                assert_eq!(arrival.facts.how.as_deref(), Some("signal 9"));
                assert!(arrival.facts.ended_at.is_some());
                std::process::exit(0);
            }
            die();
        }
        "fails" => {
            if times == 0 {
                arrival.link.tell("READY=1\n").unwrap();
            }
            assert_eq!(arrival.facts.failures, times.saturating_sub(1));
            die();
        }
        "never ready" => die(),
        "ends with 1" => std::process::exit(1),
        "goes on" => {
            arrival.link.tell("READY=1\nX_ELSE=1\n").unwrap();
            say();
            loop {
                std::thread::sleep(LIMIT);
            }
        }
        "says nonsense" => {
            // A process that has been taken over.
            let stored: Vec<OwnedFd> = (0..99)
                .map(|_| memfd_create("more", MemfdFlags::CLOEXEC).unwrap())
                .collect();
            for (n, fd) in stored.iter().enumerate().filter(|_| times == 0) {
                desk.store(&format!("d.{n}"), fd.as_fd()).unwrap();
            }
            for _ in 0..10_000 {
                let _ = arrival.link.tell("FDSTORE=1\nREADY=1\n\u{1}");
                let _ = arrival.link.tell("BARRIER=1");
                let _ = arrival.link.tell("FDSTOREREMOVE=1\nFDNAME=\n");
            }
            // There is room when the keeper has read some.
            while arrival.link.tell("READY=1\n").is_err() {
                std::thread::yield_now();
            }
            if times == 3 {
                std::process::exit(0);
            }
            die();
        }
        what => panic!("{what}"),
    }
}

struct Running {
    keeper: Child,
    lines: BufReader<std::process::ChildStdout>,
}

fn start(what: &str) -> Running {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "child_keeper", "--nocapture"]);
    command.env(KEEPER, what).stdin(Stdio::null());
    started(command)
}

fn started(mut command: Command) -> Running {
    let mut keeper = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(keeper.stdout.take().unwrap());
    Running { keeper, lines }
}

impl Running {
    /// The number of the next serving process.
    fn serving(&mut self) -> Pid {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it has ended");
            // The test harness of the child prints lines of its own.
            if let Some((_, rest)) = line.split_once("serving ") {
                let pid = rest.split(' ').next().unwrap();
                return Pid::from_raw(pid.parse().unwrap()).unwrap();
            }
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.keeper.id().try_into().unwrap()).unwrap()
    }

    fn code(mut self) -> Option<i32> {
        let code = self.keeper.wait().unwrap().code();
        // The process that serves has the other end.
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        code
    }
}

fn wait_until_gone(pid: Pid) {
    let end = Instant::now() + LIMIT;
    while test_kill_process(pid).is_ok() {
        assert!(Instant::now() < end, "it is still there");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_process_that_dies_is_followed_by_one_with_all_that_was_kept() {
    assert_eq!(start("dies twice").code(), Some(0));
}

#[test]
fn processes_that_never_become_ready_are_given_up() {
    assert_eq!(start("fails").code(), Some(GIVEN_UP));
}

#[test]
fn the_first_process_ends_the_keeper_as_it_ends() {
    assert_eq!(start("never ready").code(), Some(BY_SIGNAL + 9));
    assert_eq!(start("ends with 1").code(), Some(1));
}

#[test]
fn signals_are_passed_on_and_end_both() {
    let mut running = start("goes on");
    running.serving();
    kill_process(running.pid(), Signal::TERM).unwrap();
    assert_eq!(running.code(), Some(BY_SIGNAL + Signal::TERM.as_raw()));
}

#[test]
fn both_die_together_when_the_keeper_is_killed() {
    let mut running = start("goes on");
    let serving = running.serving();
    running.keeper.kill().unwrap();
    assert_eq!(running.code(), None);
    wait_until_gone(serving);
}

#[test]
fn a_stopped_process_holds_up_nothing_and_a_killed_one_is_followed() {
    let mut running = start("goes on");
    let first = running.serving();
    kill_process(first, Signal::STOP).unwrap();
    kill_process(first, Signal::KILL).unwrap();
    let second = running.serving();
    assert_ne!(first, second);
    kill_process(second, Signal::STOP).unwrap();
    // It dies of it when it goes on.
    kill_process(running.pid(), Signal::INT).unwrap();
    kill_process(second, Signal::CONT).unwrap();
    assert_eq!(running.code(), Some(BY_SIGNAL + Signal::INT.as_raw()));
}

#[test]
fn a_taken_over_process_keeps_no_more_than_there_may_be() {
    assert_eq!(start("says nonsense").code(), Some(0));
}

#[test]
fn a_service_manager_is_told_what_is_meant_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(LIMIT)).unwrap();
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "child_keeper", "--nocapture"]);
    command.env(KEEPER, "goes on").env("NOTIFY_SOCKET", &path);
    command.stdin(Stdio::null());
    let mut running = started(command);
    let serving = running.serving();
    let mut text = [0; 100];
    let len = manager.recv(&mut text).unwrap();
    assert_eq!(&text[..len], b"READY=1\n");
    let more = rustix::net::recv(&manager, &mut text, RecvFlags::DONTWAIT);
    assert!(more.is_err(), "the rest stays here");
    kill_process(serving, Signal::KILL).unwrap();
    running.serving();
    running.keeper.kill().unwrap();
    let _ = running.keeper.wait();
}
