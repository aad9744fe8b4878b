//! A keeper process, and processes that serve under it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use keeper::{Arrival, Desk, End, Given, Keeper, Keeping, Programs, Which, outlive};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);
/// Environment variable of a keeper or serving process; its value selects the behaviour of the
/// latter.
const KEEPER: &str = "VNVME_TEST_KEEPER";
const SERVE: &str = "VNVME_TEST_SERVE";
/// Set for the process that a keeper leaves.
const LAST: &str = "VNVME_TEST_LAST";
/// Destination of a connection whose close takes long.
const LINGERS: &str = "VNVME_TEST_LINGERS";
/// Behaviour of the new program.
const NEW: &str = "VNVME_TEST_NEW";
/// Exit codes of the keeper for ends that have no code.
const BY_SIGNAL: i32 = 100;
const NOT_DURABLE: i32 = 91;

/// Two programs: this one, which does one thing or the other.
struct Pair {
    present: String,
    new: String,
}

impl Programs for Pair {
    fn start(&mut self, which: Which, channel: OwnedFd) -> std::io::Result<Child> {
        let what = match which {
            Which::Present => &self.present,
            Which::New => &self.new,
        };
        if what == "is missing" {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child_serving", "--nocapture"]);
        command.env_remove(KEEPER).env(SERVE, what);
        command.stdin(Stdio::from(channel)).spawn()
    }

    fn ask(&mut self, output: Stdio) -> Result<Child, String> {
        let mut command = Command::new("/bin/sh");
        let script = match &*self.new {
            "says nothing" => "exec sleep 100".to_owned(),
            new => format!("echo '{new}'"),
        };
        command.args(["-c", &script]);
        if self.new == "fails when asked" {
            command = Command::new("/bin/false");
        }
        command
            .stdin(Stdio::null())
            .stdout(output)
            .spawn()
            .map_err(|error| error.to_string())
    }

    fn fits(&mut self, said: &str) -> Result<(), String> {
        assert_eq!(said, format!("{}\n", self.new));
        match said {
            "is strange\n" => Err("it is strange".to_owned()),
            _ => Ok(()),
        }
    }

    fn decide(&mut self, which: Which) {
        if which == Which::New {
            self.present.clone_from(&self.new);
        }
    }

    fn start_last(&mut self, keeper: OwnedFd) -> std::io::Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child_last", "--nocapture"]);
        command.env_remove(KEEPER).env(LAST, "");
        command.stdin(Stdio::from(keeper)).spawn()?;
        // The process may take any time to end before this one.
        std::thread::sleep(Duration::from_millis(500));
        Ok(())
    }

    fn say(&mut self, text: &str) {
        println!("keeper: {text}");
    }
}

/// Opens a connection whose close takes a minute: no peer reads the sent data.
fn lingering(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&stream, Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Another process closes the kept descriptors, for a client may see to it that this takes long.
#[test]
fn the_end_waits_for_no_close() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "child_keeper", "--nocapture"]);
    command
        .env(KEEPER, "leaves what lingers")
        .env(LINGERS, listener.local_addr().unwrap().to_string())
        .stdin(Stdio::null());
    let began = Instant::now();
    assert_eq!(started(command).code(), Some(0));
    assert!(began.elapsed() < LIMIT);
}

/// Not a test of its own: the process that [`start`] starts.
#[test]
fn child_keeper() {
    let Ok(what) = std::env::var(KEEPER) else {
        return;
    };
    let mut programs = Pair {
        present: what,
        new: std::env::var(NEW).unwrap_or_default(),
    };
    let given = memfd_create("given", MemfdFlags::CLOEXEC).unwrap();
    let keeper = Keeper {
        programs: &mut programs,
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
        End::NotDurable => NOT_DURABLE,
    };
    std::process::exit(code);
}

/// Not a test of its own: the process that the keeper starts.
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
    let say = || println!("serving: {} {times}", std::process::id());
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
            // More than were ever taken for the end, and pauses grow between them.
            if times == 11 {
                std::process::exit(0);
            }
            die();
        }
        "never ready" => die(),
        "leaves what lingers" => {
            let address = std::env::var(LINGERS).unwrap();
            let (ours, kept) = UnixStream::pair().unwrap();
            let bytes = [std::io::IoSlice::new(b"x")];
            let lingering = [lingering(&address)];
            let rights: Vec<_> = lingering.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
            sendmsg(&ours, &bytes, &mut control, SendFlags::empty()).unwrap();
            desk.store("socket", kept.as_fd()).unwrap();
            let ticket = desk.barrier().unwrap();
            while !desk.is_answered(ticket) {
                desk.advance(Instant::now()).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            arrival.link.tell("READY=1\n").unwrap();
            std::process::exit(0)
        }
        "ends with 1" => std::process::exit(1),
        "goes on" | "goes on, too" => {
            let is_new = what != "goes on";
            if is_new {
                let how = arrival.facts.how.as_deref();
                assert!(how.is_some_and(|how| how.contains("replaced") || how == "signal 9"));
            }
            arrival.link.tell("READY=1\nX_ELSE=1\n").unwrap();
            say();
            loop {
                std::thread::sleep(LIMIT);
            }
        }
        "ends in order" => {
            // A process that is notified earlier cannot do so.
            std::thread::sleep(Duration::from_millis(50));
            let told = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(Signal::TERM.as_raw(), told.clone()).unwrap();
            arrival.link.tell("READY=1\n").unwrap();
            say();
            while !told.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::process::exit(2);
        }
        "is never ready" => {
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

/// Not a test of its own: the process that the keeper leaves.
#[test]
fn child_last() {
    if std::env::var_os(LAST).is_some() {
        outlive(std::io::stdin()).unwrap();
    }
}

struct Running {
    keeper: Child,
    lines: BufReader<std::process::ChildStdout>,
    /// Lines of the keeper and the serving processes, in any order, that no call has consumed yet.
    said: Vec<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
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
    Running {
        keeper,
        lines,
        said: Vec::new(),
    }
}

impl Running {
    /// Returns the rest of the next line that begins with `begin`.
    fn next(&mut self, begin: &str) -> String {
        let found = |line: &String| line.starts_with(begin);
        loop {
            if let Some(place) = self.said.iter().position(found) {
                return self.said.remove(place).split_off(begin.len());
            }
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it has ended");
            // The test harness of the child prints lines of its own.
            let said = ["serving: ", "keeper: "]
                .iter()
                .filter_map(|all| line.find(all));
            if let Some(place) = said.min() {
                self.said.push(line.split_off(place));
            }
        }
    }

    /// The number of the next serving process.
    fn serving(&mut self) -> Pid {
        let said = self.next("serving: ");
        Pid::from_raw(said.split(' ').next().unwrap().parse().unwrap()).unwrap()
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
fn processes_that_never_become_ready_are_followed_by_others() {
    assert_eq!(start("fails").code(), Some(0));
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

/// The next process may have something to do before it ends.
#[test]
fn a_signal_waits_for_the_process_that_follows() {
    for _ in 0..10 {
        let mut running = start("ends in order");
        let first = running.serving();
        kill_process(first, Signal::KILL).unwrap();
        wait_until_gone(first);
        kill_process(running.pid(), Signal::TERM).unwrap();
        assert_eq!(running.code(), Some(2));
    }
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
    // The process dies of the signal when it continues.
    kill_process(running.pid(), Signal::INT).unwrap();
    kill_process(second, Signal::CONT).unwrap();
    assert_eq!(running.code(), Some(BY_SIGNAL + Signal::INT.as_raw()));
}

/// Starts a keeper whose process continues, and is to be replaced by one that does `new`.
fn upgrade(new: &str) -> (Running, Pid) {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "child_keeper", "--nocapture"]);
    command
        .env(KEEPER, "goes on")
        .env(NEW, new)
        .stdin(Stdio::null());
    let mut running = started(command);
    let first = running.serving();
    // The process is ready before it reports so.
    kill_process(running.pid(), Signal::USR2).unwrap();
    (running, first)
}

impl Running {
    /// Waits until the keeper has logged this.
    fn wait_said(&mut self, wanted: &str) {
        let said = self.next("keeper: ");
        assert!(said.contains(wanted), "{said}");
    }

    fn end(self) {
        kill_process(self.pid(), Signal::TERM).unwrap();
        assert_eq!(self.code(), Some(BY_SIGNAL + Signal::TERM.as_raw()));
    }
}

#[test]
fn a_new_program_takes_the_place_of_the_present_one() {
    let (mut running, first) = upgrade("goes on, too");
    let second = running.serving();
    assert_ne!(first, second);
    running.wait_said("upgraded");
    // From now on the new program follows a killed one.
    kill_process(second, Signal::KILL).unwrap();
    running.serving();
    running.end();
}

#[test]
fn an_upgrade_waits_for_the_process_that_follows() {
    let (mut running, _) = upgrade("goes on, too");
    let second = running.serving();
    running.wait_said("upgraded");
    // The next process is not started before the keeper continues.
    kill_process(running.pid(), Signal::STOP).unwrap();
    kill_process(second, Signal::KILL).unwrap();
    kill_process(running.pid(), Signal::USR2).unwrap();
    kill_process(running.pid(), Signal::CONT).unwrap();
    // The one in between may not reach the point of reporting its process id.
    assert_ne!(running.serving(), second);
    running.wait_said("upgraded");
    running.end();
}

/// However often it is asked for: not more than one in a second.
#[test]
fn upgrades_have_a_rest_between_them() {
    let began = Instant::now();
    let (mut running, _) = upgrade("goes on, too");
    running.serving();
    running.wait_said("upgraded");
    kill_process(running.pid(), Signal::USR2).unwrap();
    running.serving();
    running.wait_said("upgraded");
    assert!(began.elapsed() >= Duration::from_secs(1));
    running.end();
}

#[test]
fn a_new_program_that_does_not_serve_is_given_up() {
    for new in ["is missing", "never ready", "ends with 1"] {
        let (mut running, _) = upgrade(new);
        running.wait_said("back to the program before");
        running.serving();
        running.end();
    }
    let (mut running, _) = upgrade("is never ready");
    let second = running.serving();
    running.wait_said("back to the program before");
    wait_until_gone(second);
    running.serving();
    running.end();
}

#[test]
fn a_new_program_that_does_not_fit_changes_nothing() {
    for (new, why) in [
        ("is strange", "it is strange"),
        ("fails when asked", "does not know how"),
        ("says nothing", "does not answer"),
    ] {
        let (mut running, first) = upgrade(new);
        running.wait_said(why);
        assert!(test_kill_process(first).is_ok());
        running.end();
    }
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
