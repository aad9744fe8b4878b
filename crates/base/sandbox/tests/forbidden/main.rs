//! Each rule is broken: by a process that is in the sandbox, and, to see that the attempt would
//! succeed otherwise, by one that is not.
//!
//! A process cannot leave the sandbox, so each attempt has one of its own: this program again, with
//! the test [`child`] alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by a panic.
#![allow(unsafe_code)] // Some calls that are forbidden have no safe form.

mod cases;
mod files;
mod others;

use cases::*;
use io_uring::{IoUring, opcode, squeue, types};
use others::{
    CONNECTIONS, DATAGRAM, OTHER_PORT, RAW_NETLINK, SOCKET_ELSEWHERE, SOCKET_IN, unix_socket,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use sandbox::{Connect, Needs, Sandbox};
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, exit};

/// How the attempt is named to the child.
const TRY: &str = "SANDBOX_TRY";
/// Which of the two steps the child takes before it.
const STEP: &str = "SANDBOX_STEP";
/// A directory with those of [`DIRECTORIES`]; a file `one/beside`, and a link `open/link` to
/// `there/file`.
const PLACE: &str = "SANDBOX_PLACE";
/// Each has a file `file`.
const DIRECTORIES: [&str; 7] = [
    "there",
    "removable",
    "readable",
    "open",
    "open/inside",
    "one",
    "look",
];
/// A port that somebody listens on, and a process that is not in the sandbox.
const PORT: &str = "SANDBOX_PORT";
const OUTSIDE: &str = "SANDBOX_OUTSIDE";
/// The process needs to connect to that port, and to sockets in a directory.
const CONNECTS: &str = "SANDBOX_CONNECTS";

/// What the child is to start before it enters: a thread of that name.
const EARLY: &str = "early";

/// What the child ends with when the attempt has succeeded, or when there was none.
const DONE: i32 = 200;
const BROKEN: i32 = 201;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// [`Sandbox::enter`] alone.
    Enter,
    /// [`Sandbox::seal`] alone.
    Seal,
    /// Both.
    Both,
    /// Both, of a process that opens files while it runs.
    Later,
    /// [`sandbox::leave_nothing`].
    Thread,
    /// [`sandbox::leave_user`].
    Starter,
    /// None: to see that the attempt can succeed.
    Outside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Done,
    Refused(Errno),
    Killed,
}

/// What is attempted. A file is named from [`PLACE`].
type Attempt = fn() -> io::Result<()>;

struct Case {
    name: &'static str,
    attempt: Attempt,
    step: Step,
    end: End,
    /// What it takes outside, and not every test has.
    needs: CapabilitySet,
}

const fn case(name: &'static str, attempt: Attempt, step: Step, end: End) -> Case {
    Case {
        name,
        attempt,
        step,
        end,
        needs: CapabilitySet::empty(),
    }
}

const fn with(needs: CapabilitySet, case: Case) -> Case {
    Case { needs, ..case }
}

const DENIED: End = End::Refused(Errno::ACCESS);
const FORBIDDEN: End = End::Refused(Errno::PERM);
const ELSEWHERE: End = End::Refused(Errno::XDEV);

fn place(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(PLACE).unwrap()).join(name)
}

fn port() -> u16 {
    std::env::var(PORT).unwrap().parse().unwrap()
}

/// What a system call without a result answers.
fn answer(result: libc::c_long) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn all() -> impl Iterator<Item = &'static Case> {
    let all = FILES.iter().chain(LATER).chain(OTHERS);
    all.chain(RIGHTS).chain(STARTING).chain(CALLS)
}

/// In a process of its own: enters the sandbox, tries, and ends with what became of it.
#[test]
#[ignore = "a process that another test starts: cargo test -p sandbox --test forbidden"]
fn child() {
    let Ok(name) = std::env::var(TRY) else {
        return;
    };
    let step = std::env::var(STEP).unwrap();
    let later = match &*step {
        "Later" => Needs {
            open_below: vec![place("open"), place("one/file"), place("not there")],
            read_below: vec![place("look")],
            ..Needs::default()
        },
        _ => Needs::default(),
    };
    let connect = if std::env::var(CONNECTS).is_ok() {
        vec![Connect::Tcp(port()), Connect::UnixIn(place("removable"))]
    } else {
        Vec::new()
    };
    let sandbox = Sandbox::new(Needs {
        remove_in: vec![place("removable")],
        read_in: vec![place("readable"), place("not there")],
        connect,
        ..later
    });
    if name == EARLY {
        let thread = std::thread::Builder::new().name(EARLY.into());
        let hour = std::time::Duration::from_secs(3600);
        thread.spawn(move || std::thread::sleep(hour)).unwrap();
        let outside = sandbox.enter().unwrap().outside;
        let is_named = outside.iter().any(|name| name == EARLY);
        exit(if is_named { DONE } else { BROKEN });
    }
    if ["Enter", "Both", "Later"].contains(&&*step) {
        sandbox.enter().unwrap();
    }
    if ["Seal", "Both", "Later"].contains(&&*step) {
        sandbox.seal().unwrap();
    }
    if step == "Thread" {
        sandbox::leave_nothing().unwrap();
    }
    if step == "Starter" {
        sandbox::leave_user().unwrap();
    }
    if let Some((_, number)) = NEVER.iter().find(|(never, _)| *never == name) {
        // SAFETY: it does not come to that: the process ends.
        unsafe { libc::syscall(*number, 0, 0, 0, 0, 0, 0) };
        exit(DONE);
    }
    let case = all().map(|case| (case.name, case.attempt));
    let mut case = case.chain(CONNECTIONS.iter().copied());
    let case = case.find(|(of, _)| *of == name);
    let end = case.map_or(BROKEN, |(_, attempt)| match attempt() {
        Ok(()) => DONE,
        Err(error) => error.raw_os_error().unwrap_or(BROKEN),
    });
    exit(end)
}

/// What becomes of an attempt.
fn tried(name: &str, step: Step) -> End {
    tried_with(name, step, false)
}

/// The same of a process that may need to connect.
fn tried_with(name: &str, step: Step, connects: bool) -> End {
    let place = tempfile::tempdir().unwrap();
    for directory in DIRECTORIES {
        fs::create_dir(place.path().join(directory)).unwrap();
        fs::write(place.path().join(directory).join("file"), "x").unwrap();
    }
    fs::write(place.path().join("one/beside"), "x").unwrap();
    let link = place.path().join("open/link");
    std::os::unix::fs::symlink(place.path().join("there/file"), link).unwrap();
    let tcp = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = tcp.local_addr().unwrap().port().to_string();
    let abstract_socket = unix_socket().unwrap();
    let name_of = place.path().join("");
    let address =
        SocketAddrUnix::new_abstract_name(name_of.as_os_str().as_encoded_bytes()).unwrap();
    bind(&abstract_socket, &address).unwrap();
    listen(&abstract_socket, 4).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    if connects {
        command.env(CONNECTS, "1");
    }
    let _listeners = ["there", "removable"].map(|directory| {
        let path = place.path().join(directory).join("listens");
        std::os::unix::net::UnixListener::bind(path).unwrap()
    });
    let status = command
        .args(["child", "--exact", "--ignored", "--test-threads=1"])
        .env(TRY, name)
        .env(STEP, format!("{step:?}"))
        .env(PLACE, place.path())
        .env(PORT, port)
        .env(OUTSIDE, std::process::id().to_string())
        .output()
        .unwrap();
    match (status.status.code(), status.status.signal()) {
        (Some(DONE), _) => End::Done,
        (None, Some(libc::SIGSYS)) => End::Killed,
        (Some(code @ 1..DONE), _) if code != 101 => End::Refused(Errno::from_raw_os_error(code)),
        _ => panic!("{name}, {step:?}: {status:?}"),
    }
}

fn check(cases: &[Case]) {
    let held = rustix::thread::capabilities(None).unwrap().effective;
    let mut wrong = Vec::new();
    for case in cases {
        if !held.contains(case.needs) {
            let why = format!("needs {:?}", case.needs);
            testkit::skip(&format!("sandbox: {}", case.name), why);
            continue;
        }
        let end = tried(case.name, case.step);
        if end != case.end {
            wrong.push(format!(
                "{}, {:?}: {end:?}, not {:?}",
                case.name, case.step, case.end
            ));
        }
        let outside = tried(case.name, Step::Outside);
        if outside != End::Done {
            wrong.push(format!("{}, outside: {outside:?}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether the kernel enforces this ABI of Landlock.
fn landlock(abi: u32, what: &str) -> bool {
    // SAFETY: asks for a number (LANDLOCK_CREATE_RULESET_VERSION).
    let known = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    let has = known >= i64::from(abi);
    if !has {
        testkit::skip(what, format!("the kernel's Landlock is no ABI {abi}"));
    }
    has
}

#[test]
fn files_are_unreachable_by_path() {
    // Truncation came with the third.
    if landlock(3, "sandbox: files") {
        check(FILES);
    }
}

#[test]
fn later_opens_stay_below_named_folders() {
    // Moves between directories came with the second, truncation with the third.
    if landlock(3, "sandbox: what is opened later") {
        check(LATER);
    }
}

#[test]
fn network_and_other_processes_are_unreachable() {
    if landlock(6, "sandbox: network and processes") {
        check(OTHERS);
    }
}

#[test]
fn dropped_rights_are_never_regained() {
    check(RIGHTS);
}

#[test]
fn only_listed_system_calls_are_made() {
    check(CALLS);
}

#[test]
fn process_with_children_keeps_user_rights() {
    check(STARTING);
    for (name, _) in NEVER {
        let end = if ["execve", "execveat", "capset"].contains(name) {
            End::Done
        } else {
            End::Killed
        };
        assert_eq!(tried(name, Step::Starter), end, "{name}");
    }
}

/// A process that has to connect may do so to the configured destination only, and with no other
/// kind of socket.
#[test]
fn only_configured_connections_are_allowed() {
    assert_eq!(tried_with("TCP", Step::Seal, true), End::Done);
    for (name, end) in [
        (DATAGRAM, End::Refused(Errno::PERM)),
        (RAW_NETLINK, End::Refused(Errno::PERM)),
    ] {
        assert_eq!(tried_with(name, Step::Seal, true), end, "{name}");
        assert_eq!(tried(name, Step::Outside), End::Done, "{name}, outside");
    }
    if landlock(6, "sandbox: network and processes") {
        assert_eq!(tried_with("TCP", Step::Both, true), End::Done);
        let refused = End::Refused(Errno::ACCESS);
        assert_eq!(tried_with(OTHER_PORT, Step::Both, true), refused);
        assert_eq!(tried(OTHER_PORT, Step::Outside), End::Done);
        assert_eq!(tried_with(SOCKET_IN, Step::Both, true), End::Done);
    }
    if landlock(9, "sandbox: sockets by their paths") {
        let refused = End::Refused(Errno::ACCESS);
        assert_eq!(tried_with(SOCKET_ELSEWHERE, Step::Both, true), refused);
    }
}

/// It keeps everything, and so the report names it.
#[test]
fn earlier_thread_is_named() {
    assert_eq!(tried(EARLY, Step::Enter), End::Done);
}

#[test]
fn forbidden_calls_kill_process() {
    for (name, _) in NEVER {
        assert_eq!(tried(name, Step::Seal), End::Killed, "{name}");
    }
}
