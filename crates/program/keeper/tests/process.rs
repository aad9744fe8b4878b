//! A keeper process, and processes that serve under it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use keeper::{
    Handover, Keeper, KeeperClient, KeeperExit, Keeping, MayGo, PassedDescriptor, ProgramSelector,
    Programs, outlive,
};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
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
/// Destination of a connection with a close that takes long.
const LINGERS: &str = "VNVME_TEST_LINGERS";
/// Set for a keeper that stands by.
const STANDBY: &str = "VNVME_TEST_STANDBY";
/// Number of the descriptor with the state of a keeper after its program was replaced.
const STATE: &str = "VNVME_TEST_STATE";
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
    fn start(&mut self, which: ProgramSelector, channel: OwnedFd) -> std::io::Result<Child> {
        let what = match which {
            ProgramSelector::Present => &self.present,
            ProgramSelector::New => &self.new,
        };
        if what == "is missing" {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child_serving", "--nocapture"]);
        command.env_remove(KEEPER).env(SERVE, what);
        command.env_remove(STANDBY).env_remove(STATE);
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

    fn decide(&mut self, which: ProgramSelector) {
        if which == ProgramSelector::New {
            self.present.clone_from(&self.new);
        }
    }

    fn start_standby(&mut self, channel: OwnedFd) -> std::io::Result<Child> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child_keeper", "--nocapture"]);
        command.env(KEEPER, &self.present).env(STANDBY, "1");
        command.env_remove("LISTEN_FDS").env_remove(STATE);
        command.stdin(Stdio::from(channel)).spawn()
    }

    fn replace(&mut self, state: BorrowedFd<'_>, last: RawFd, may_go: MayGo) -> std::io::Error {
        if self.new == "cannot be the keeper" {
            return std::io::Error::other("it knows of no keeper");
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child_keeper", "--nocapture"]);
        command
            .env(KEEPER, &self.present)
            .env(STATE, state.as_raw_fd().to_string())
            .env("LISTEN_PID", std::process::id().to_string())
            .env("LISTEN_FDS", (last - 2).to_string());
        inherit::replace_program(&mut command, may_go)
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

/// Opens a connection that takes a minute to close: no peer reads the sent data.
fn lingering(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&stream, Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Another process closes the kept descriptors, for a client may see to it that this takes long.
#[test]
fn keeper_end_does_not_wait_for_close() {
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
    let open: Vec<OwnedFd> = match std::env::var_os(STATE) {
        Some(_) => inherit::take(),
        None => Vec::new(),
    };
    let is_first = open.is_empty() && std::env::var_os(STANDBY).is_none();
    let given = is_first.then(|| PassedDescriptor {
        name: "control".into(),
        fd: memfd_create("given", MemfdFlags::CLOEXEC).unwrap(),
    });
    let keeper = Keeper {
        programs: &mut programs,
        most: 100,
        given: given.into_iter().collect(),
        is_last: false,
        manager: std::env::var_os("NOTIFY_SOCKET").map(|path| {
            let socket = UnixDatagram::unbound().unwrap();
            socket.connect(path).unwrap();
            socket.into()
        }),
    };
    let end = if let Ok(state) = std::env::var(STATE) {
        let state: RawFd = state.parse().unwrap();
        let mut open = open;
        let place = open.iter().position(|fd| fd.as_raw_fd() == state).unwrap();
        let state = open.swap_remove(place);
        let resumed = keeper.resume(state.as_fd(), open, inherit::unblock_signals);
        resumed.map_err(|(error, _)| error).unwrap().unwrap()
    } else if !is_first {
        let channel = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        match keeper.stand_by(channel, || Ok(())).unwrap() {
            Some(end) => end,
            None => std::process::exit(0),
        }
    } else {
        keeper.run(|| Ok(())).unwrap()
    };
    let code = match end {
        KeeperExit::Code(code) => code.into(),
        KeeperExit::Signal(signal) => BY_SIGNAL + signal,
        KeeperExit::NotDurable => NOT_DURABLE,
    };
    std::process::exit(code);
}

/// Not a test of its own: the process that the keeper starts.
#[test]
fn child_serving() {
    let Ok(what) = std::env::var(SERVE) else {
        return;
    };
    let channel = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let arrival = Handover::receive(channel).unwrap();
    assert!(matches!(arrival.link.keeping(), Keeping::Process(_)));
    assert_eq!(arrival.given.len(), 1);
    assert_eq!(arrival.given[0].0, "control");
    let mut client = KeeperClient::new(&arrival.link);
    let mut keep = |name: &str| {
        let memory = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        client.store(name, memory.as_fd()).unwrap();
        let ticket = client.barrier().unwrap();
        while !client.is_answered(ticket) {
            client.advance(Instant::now()).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        memory
    };
    let was_kept = |wanted: &str| arrival.kept.iter().any(|(name, _)| name == wanted);
    let before = was_kept("count");
    let mut late = was_kept("late");
    let count = arrival.kept.into_iter().find(|(name, _)| name == "count");
    let count: File = match count {
        Some((_, fd)) => fd.into(),
        None => keep("count").into(),
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
            client.store("socket", kept.as_fd()).unwrap();
            let ticket = client.barrier().unwrap();
            while !client.is_answered(ticket) {
                client.advance(Instant::now()).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            arrival.link.tell("READY=1\n").unwrap();
            std::process::exit(0)
        }
        "ends with 1" => std::process::exit(1),
        "keeps more when told" => {
            assert_eq!(late, times > 0);
            let told = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(Signal::USR1.as_raw(), told.clone()).unwrap();
            arrival.link.tell("READY=1\n").unwrap();
            say();
            loop {
                if told.load(Ordering::Acquire) && !late {
                    keep("late");
                    late = true;
                    // More than ever wait for a stand-by.
                    for _ in 0..2000 {
                        while arrival.link.tell("STATUS=busy\n").is_err() {
                            std::thread::yield_now();
                        }
                    }
                    println!("serving: kept more");
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        "hangs once" => {
            if times != 1 {
                arrival.link.tell("READY=1\n").unwrap();
            }
            say();
            loop {
                std::thread::sleep(LIMIT);
            }
        }
        "goes on" | "goes on, too" | "cannot be the keeper" => {
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
            signal_hook::flag::register(Signal::ALARM.as_raw(), Arc::default()).unwrap();
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
                client.store(&format!("d.{n}"), fd.as_fd()).unwrap();
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

struct KeeperProcess {
    keeper: Child,
    lines: BufReader<std::process::ChildStdout>,
    /// Lines of the keeper and the serving processes, in any order, that no call has consumed yet.
    said: Vec<String>,
}

impl Drop for KeeperProcess {
    /// Ends all processes: those that serve outlive their keeper.
    fn drop(&mut self) {
        let group = Pid::from_raw(self.keeper.id().try_into().unwrap()).unwrap();
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.keeper.wait();
    }
}

fn start(what: &str) -> KeeperProcess {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "child_keeper", "--nocapture"]);
    command.env(KEEPER, what).stdin(Stdio::null());
    started(command)
}

fn started(mut command: Command) -> KeeperProcess {
    command.process_group(0);
    let mut keeper = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(keeper.stdout.take().unwrap());
    KeeperProcess {
        keeper,
        lines,
        said: Vec::new(),
    }
}

impl KeeperProcess {
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
fn dead_process_is_replaced_with_all_descriptors() {
    assert_eq!(start("dies twice").code(), Some(0));
}

#[test]
fn processes_never_ready_are_replaced() {
    assert_eq!(start("fails").code(), Some(0));
}

#[test]
fn failure_of_first_process_ends_keeper() {
    assert_eq!(start("never ready").code(), Some(BY_SIGNAL + 9));
    assert_eq!(start("ends with 1").code(), Some(1));
}

#[test]
fn signal_is_forwarded_and_ends_keeper() {
    let mut running = start("goes on");
    running.serving();
    kill_process(running.pid(), Signal::TERM).unwrap();
    assert_eq!(running.code(), Some(BY_SIGNAL + Signal::TERM.as_raw()));
}

/// A signal may arrive during any system call of the keeper.
#[test]
fn many_signals_do_not_end_keeper() {
    let mut running = start("ends in order");
    running.serving();
    for _ in 0..300_000 {
        kill_process(running.pid(), Signal::ALARM).unwrap();
    }
    // A keeper that has failed leaves a process that serves, and ends no output.
    assert!(running.keeper.try_wait().unwrap().is_none());
    kill_process(running.pid(), Signal::TERM).unwrap();
    assert_eq!(running.code(), Some(2));
}

/// The next process may have something to do before it ends.
#[test]
fn signal_during_restart_waits_for_next_process() {
    for _ in 0..10 {
        let mut running = start("ends in order");
        let first = running.serving();
        kill_process(first, Signal::KILL).unwrap();
        wait_until_gone(first);
        kill_process(running.pid(), Signal::TERM).unwrap();
        assert_eq!(running.code(), Some(2));
    }
}

/// Returns the first stand-by of a keeper, once it has all that the keeper has kept, knows the
/// serving process, and has taken the place of an earlier stand-by.
fn standby(keeper: Pid, serving: Pid) -> Pid {
    let serving = serving.as_raw_nonzero().get();
    let end = Instant::now() + LIMIT;
    loop {
        let children = children(keeper);
        // The serving process is named last, and an earlier stand-by only until it was dismissed.
        let is_standby = |child: &&i32| {
            let variables = std::fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
            let is_it = variables
                .windows(STANDBY.len())
                .any(|part| part == STANDBY.as_bytes());
            let known = processes_known_to(**child);
            let (mut others, serving): (Vec<i32>, Vec<i32>) =
                known.into_iter().partition(|pid| *pid != serving);
            others.retain(|pid| !children.contains(pid));
            is_it && !serving.is_empty() && others.is_empty()
        };
        if let Some(child) = children.iter().find(is_standby) {
            return Pid::from_raw(*child).unwrap();
        }
        assert!(Instant::now() < end, "there is no stand-by");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the children of a process, in the order in which they were started.
fn children(parent: Pid) -> Vec<i32> {
    // Each thread has its own children.
    let threads = std::fs::read_dir(format!("/proc/{}/task", parent.as_raw_nonzero())).unwrap();
    let lists = threads
        .flatten()
        .map(|thread| thread.path().join("children"));
    let lists = lists.filter_map(|path| std::fs::read_to_string(path).ok());
    let children: String = lists.collect();
    let children = children.split_whitespace();
    children.map(|child| child.parse().unwrap()).collect()
}

/// Returns the processes of which this process has pidfds; -1: one that has ended.
fn processes_known_to(process: i32) -> Vec<i32> {
    let open = std::fs::read_dir(format!("/proc/{process}/fdinfo")).into_iter();
    let open = open.flatten().flatten();
    let infos = open.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
    let pids = infos.filter_map(|info| {
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
        Some(pid.trim().parse().unwrap())
    });
    pids.collect()
}

/// A keeper that is killed is followed by its stand-by, again and again: the serving process goes
/// on, and the next one has all that was kept.
#[test]
fn killed_keeper_is_followed_by_standby_with_all_that_was_kept() {
    let mut running = start("goes on");
    let mut serving = running.serving();
    let mut keeper = running.pid();
    for times in 1..=3 {
        let next = standby(keeper, serving);
        kill_process(keeper, Signal::KILL).unwrap();
        let said = running.wait_said("another one goes on");
        assert!(said.contains(&next.as_raw_nonzero().to_string()), "{said}");
        assert!(test_kill_process(serving).is_ok(), "it was not disturbed");
        keeper = next;
        // The new keeper has a stand-by before its serving process is killed, or has none yet.
        if times == 2 {
            standby(keeper, serving);
        }
        kill_process(serving, Signal::KILL).unwrap();
        let line = running.next("serving: ");
        let (pid, count) = line.trim_end().split_once(' ').unwrap();
        assert_eq!(count, times.to_string());
        serving = Pid::from_raw(pid.parse().unwrap()).unwrap();
    }
    // The last one ends in order, with the process that it has started.
    kill_process(keeper, Signal::TERM).unwrap();
    wait_until_gone(serving);
    wait_until_gone(keeper);
}

/// The stand-by has what is kept after it was started.
#[test]
fn standby_has_descriptors_that_were_kept_after_its_start() {
    let mut running = start("keeps more when told");
    let (serving, keeper) = (running.serving(), running.pid());
    let next = standby(keeper, serving);
    kill_process(serving, Signal::USR1).unwrap();
    running.next("serving: kept more");
    kill_process(keeper, Signal::KILL).unwrap();
    running.wait_said("another one goes on");
    kill_process(serving, Signal::KILL).unwrap();
    // The next process finds them.
    let second = running.serving();
    kill_process(next, Signal::TERM).unwrap();
    wait_until_gone(second);
}

/// A stand-by that takes no messages is replaced by another one, which has everything.
#[test]
fn standby_that_falls_behind_is_replaced() {
    let mut running = start("keeps more when told");
    let (serving, keeper) = (running.serving(), running.pid());
    let first = standby(keeper, serving);
    kill_process(first, Signal::STOP).unwrap();
    kill_process(serving, Signal::USR1).unwrap();
    running.next("serving: kept more");
    let end = Instant::now() + LIMIT;
    while standby(keeper, serving) == first {
        assert!(Instant::now() < end, "there is no other");
    }
    kill_process(serving, Signal::KILL).unwrap();
    running.serving();
    running.end();
}

/// A process that was not ready when its keeper died may wait for that keeper: the stand-by starts
/// another one.
#[test]
fn standby_replaces_process_that_is_not_ready() {
    let mut running = start("hangs once");
    let (first, keeper) = (running.serving(), running.pid());
    let next = standby(keeper, first);
    kill_process(first, Signal::KILL).unwrap();
    let second = running.serving();
    kill_process(keeper, Signal::KILL).unwrap();
    let third = running.serving();
    assert_ne!(third, second);
    wait_until_gone(second);
    kill_process(next, Signal::TERM).unwrap();
    wait_until_gone(third);
}

/// The keeper and the serving process die at one time.
#[test]
fn standby_follows_keeper_that_dies_with_its_process() {
    for keeper_first in [false, true] {
        let mut running = start("goes on");
        let (serving, keeper) = (running.serving(), running.pid());
        let next = standby(keeper, serving);
        let both = if keeper_first {
            [keeper, serving]
        } else {
            [serving, keeper]
        };
        for pid in both {
            kill_process(pid, Signal::KILL).unwrap();
        }
        let second = running.serving();
        assert_ne!(second, serving);
        kill_process(next, Signal::TERM).unwrap();
        wait_until_gone(second);
    }
}

/// A stand-by that dies is replaced, and one that is stopped holds up nothing.
#[test]
fn standby_that_dies_is_replaced_and_stopped_one_is_not_waited_for() {
    let mut running = start("goes on");
    let serving = running.serving();
    let first = standby(running.pid(), serving);
    kill_process(first, Signal::KILL).unwrap();
    let end = Instant::now() + LIMIT;
    while standby(running.pid(), serving) == first {
        assert!(Instant::now() < end, "there is no other");
    }
    kill_process(standby(running.pid(), serving), Signal::STOP).unwrap();
    kill_process(serving, Signal::KILL).unwrap();
    running.serving();
    running.end();
}

/// A stand-by is not needed after an end in order, and ends.
#[test]
fn standby_ends_with_the_keeper_that_ends_in_order() {
    let mut running = start("ends in order");
    let serving = running.serving();
    let standby = standby(running.pid(), serving);
    kill_process(running.pid(), Signal::TERM).unwrap();
    assert_eq!(running.code(), Some(2));
    wait_until_gone(standby);
}

#[test]
fn stopped_process_blocks_nothing_and_killed_one_is_replaced() {
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

/// Starts a keeper that continues in its process, and is to be replaced by one that does `new`.
fn upgrade(new: &str) -> (KeeperProcess, Pid) {
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

impl KeeperProcess {
    /// Waits until the keeper has logged this.
    fn wait_said(&mut self, wanted: &str) -> String {
        loop {
            let said = self.next("keeper: ");
            if said.contains(wanted) {
                return said;
            }
        }
    }

    /// Waits until the new program serves and has replaced the keeper's. An earlier signal may be
    /// lost here: this process has a second thread, unlike the keeper's program.
    fn wait_upgraded(&mut self) {
        self.wait_said("upgraded");
        self.wait_said("runs the new program");
    }

    fn end(self) {
        kill_process(self.pid(), Signal::TERM).unwrap();
        assert_eq!(self.code(), Some(BY_SIGNAL + Signal::TERM.as_raw()));
    }
}

#[test]
fn upgrade_replaces_process_with_new_program() {
    let (mut running, first) = upgrade("goes on, too");
    let second = running.serving();
    assert_ne!(first, second);
    // The keeper is the new program, too, in the same process with all that was kept.
    running.wait_upgraded();
    assert!(test_kill_process(second).is_ok());
    // From now on the new program follows a killed one.
    kill_process(second, Signal::KILL).unwrap();
    let said = running.next("serving: ");
    let (third, count) = said.trim_end().split_once(' ').unwrap();
    assert_eq!(count, "2");
    standby(
        running.pid(),
        Pid::from_raw(third.parse().unwrap()).unwrap(),
    );
    running.end();
}

/// A keeper that has just become the new program has a stand-by: that of the program before.
#[test]
fn keeper_killed_after_its_replacement_is_followed_by_standby() {
    for _ in 0..10 {
        let (mut running, _) = upgrade("goes on, too");
        let serving = running.serving();
        standby(running.pid(), serving);
        running.wait_upgraded();
        kill_process(running.pid(), Signal::KILL).unwrap();
        let said = running.wait_said("another one goes on: process ");
        let next = said.trim_end().rsplit(' ').next().unwrap().parse().unwrap();
        assert!(test_kill_process(serving).is_ok(), "it was not disturbed");
        kill_process(Pid::from_raw(next).unwrap(), Signal::TERM).unwrap();
        wait_until_gone(serving);
    }
}

/// The new program serves, and cannot be the keeper: then the program before goes on as the keeper.
#[test]
fn keeper_goes_on_where_the_new_program_cannot_be_the_keeper() {
    let (mut running, _) = upgrade("cannot be the keeper");
    let second = running.serving();
    let said = running.wait_said("goes on with the program before");
    assert!(said.contains("it knows of no keeper"), "{said}");
    kill_process(second, Signal::KILL).unwrap();
    running.serving();
    running.end();
}

#[test]
fn upgrade_during_restart_waits_for_next_process() {
    let (mut running, _) = upgrade("goes on, too");
    let second = running.serving();
    running.wait_upgraded();
    // The next process is not started before the keeper continues.
    kill_process(running.pid(), Signal::STOP).unwrap();
    kill_process(second, Signal::KILL).unwrap();
    kill_process(running.pid(), Signal::USR2).unwrap();
    kill_process(running.pid(), Signal::CONT).unwrap();
    // The one in between may not reach the point of reporting its process id.
    assert_ne!(running.serving(), second);
    running.wait_upgraded();
    running.end();
}

/// However often it is asked for: not more than one in a second.
#[test]
fn upgrades_are_rate_limited() {
    let began = Instant::now();
    let (mut running, _) = upgrade("goes on, too");
    running.serving();
    running.wait_upgraded();
    kill_process(running.pid(), Signal::USR2).unwrap();
    running.serving();
    running.wait_upgraded();
    assert!(began.elapsed() >= Duration::from_secs(1));
    running.end();
}

#[test]
fn failed_upgrade_is_rolled_back() {
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
fn incompatible_upgrade_changes_nothing() {
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
fn inherited_descriptors_are_limited() {
    assert_eq!(start("says nonsense").code(), Some(0));
}

#[test]
fn service_manager_gets_own_notifications() {
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
