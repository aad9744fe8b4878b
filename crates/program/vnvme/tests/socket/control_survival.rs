//! The control socket while another process fails: a new version, or the next process of the same
//! daemon.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use control::Client;
use rustix::process::{Resource, Signal, getgid, getrlimit, kill_process};

use crate::access::open_place;
use crate::common::*;
use crate::failure_domains::{Domain, command, controller};
use crate::keeper::{kill_serving, serving};

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).map_or(0, |file| file.ino())
}

/// A request that was sent to a control socket and is not answered yet.
struct Asked(UnixStream);

impl Asked {
    fn new(control: &Path) -> Self {
        let mut stream = UnixStream::connect(control).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let request = "GET /v1/disks HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        Self(stream)
    }

    fn answer(mut self) -> String {
        let mut answer = String::new();
        self.0.read_to_string(&mut answer).unwrap();
        answer
    }
}

/// Returns both control sockets of a domain.
fn both(domain: &Domain) -> [PathBuf; 2] {
    ["control", "control-ro"].map(|name| domain.test_dir.path(name))
}

/// Starts a daemon whose read-only control socket belongs to the group of this process.
fn with_questions(test_dir: TestDir, disks: &str) -> Domain {
    let group = getgid().as_raw().to_string();
    let domain = Domain::start_with(test_dir, disks, &["--control-group", &group]);
    assert!(both(&domain).iter().all(|path| inode(path) != 0));
    domain
}

#[test]
fn failed_upgrade_leaves_control_sockets() {
    let test_dir = TestDir::new();
    let (disk, hidden) = (test_dir.path("disk.raw"), test_dir.path("hidden"));
    let disks = controller(
        &test_dir,
        "disk",
        &[&test_dir.disk("disk.raw", 1 << 20)],
        "",
    );
    let domain = with_questions(test_dir, &disks);
    let mut host = domain.host("disk");
    host.write(1, 0, &pattern(1, 4096));
    let before = both(&domain).map(|path| inode(&path));
    fs::rename(&disk, &hidden).unwrap();
    let (code, said) = command(&domain, &["upgrade"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("back to the program before"), "{said}");
    assert_eq!(both(&domain).map(|path| inode(&path)), before);
    assert_eq!(domain.daemon.count("a kept socket cannot be used"), 0);
    for control in both(&domain) {
        let disks = Client::new(vec![control]).unwrap().disks().unwrap();
        assert_eq!(disks.len(), 1);
    }
    fs::rename(&hidden, &disk).unwrap();
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    drop(host);
    let sockets = both(&domain);
    domain.daemon.end();
    assert!(sockets.iter().all(|path| !path.exists()));
}

/// The next processes fail after they have the control socket, until the obstacle is removed. A
/// client that asks meanwhile is answered in the end.
#[test]
fn processes_that_fail_at_start_leave_control_socket() {
    let test_dir = TestDir::new();
    let disks = controller(
        &test_dir,
        "disk",
        &[&test_dir.disk("disk.raw", 1 << 20)],
        "",
    );
    let domain = with_questions(test_dir, &disks);
    let mut host = domain.host("disk");
    host.write(1, 0, &pattern(1, 4096));
    let [control, questions] = both(&domain);
    let before = inode(&control);
    fs::remove_file(&questions).unwrap();
    fs::write(&questions, "no socket").unwrap();
    kill_serving(&domain.daemon);
    eventually("two processes fail", || {
        domain.daemon.count("exists and is not a socket") >= 2
    });
    assert_eq!(inode(&control), before);
    let asked = Asked::new(&control);
    fs::remove_file(&questions).unwrap();
    let answer = asked.answer();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert_eq!(inode(&control), before);
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    drop(host);
    domain.daemon.end();
    assert!(!control.exists());
}

/// User of a daemon that may have few threads. Root may have any number.
const USER: u32 = 54_326;

/// The next process fails wherever it starts a thread, or a process: it may have ever more of them.
#[test]
fn processes_without_threads_leave_control_socket() {
    let test = "processes_without_threads_leave_control_socket";
    let Some((test_dir, program)) = open_place(test) else {
        return;
    };
    fs::set_permissions(test_dir.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let control = test_dir.path("control");
    let (socket, path) = (text(&test_dir.socket()), text(&control));
    let args = ["serve", "--keeper", "process", "-s", &socket];
    let args = [&args[..], &["--control", &path, "mem://1M"]].concat();
    let daemon = Daemon::spawn_as(USER, &program, &args);
    let client = Client::new(vec![control.clone()]).unwrap();
    let serves = || client.stats().is_ok_and(|all| all.measured.process.ready);
    eventually("it serves", serves);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    let before = inode(&control);
    let limit = |soft: &str| {
        let pid = daemon.pid().to_string();
        let mut prlimit = Command::new("prlimit");
        prlimit.uid(USER).gid(USER).args(["--pid", &pid]);
        let set = prlimit.arg(format!("--nproc={soft}:")).status().unwrap();
        assert!(set.success());
    };
    let usual = getrlimit(Resource::Nproc).maximum;
    let usual = usual.map_or("unlimited".to_owned(), |count| count.to_string());
    let failed = || {
        let words = ["os error 11", "could not be started"];
        let log = daemon.log().into_iter();
        log.filter(|line| words.iter().any(|word| line.contains(word)))
            .count()
    };
    let mut failures = Vec::new();
    for count in 1..64 {
        let failed_before = failed();
        let followed = || daemon.count("this one goes on");
        let followed_before = followed();
        limit(&count.to_string());
        kill_process(serving(daemon.pid()).unwrap(), Signal::KILL).unwrap();
        eventually("the next process fails or serves", || {
            failed() > failed_before || followed() > followed_before
        });
        let is_enough = failed() == failed_before;
        limit(&usual);
        if is_enough {
            // That process has the low limit.
            kill_serving(&daemon);
        }
        let wanted = followed_before + usize::from(is_enough);
        eventually("a process serves", || followed() > wanted);
        assert_eq!(inode(&control), before, "{count} threads");
        assert!(serves(), "{count} threads");
        assert!(host.read(1, 0, 4096) == pattern(1, 4096), "{count} threads");
        if is_enough {
            break;
        }
        failures.push(count);
    }
    assert!(failures.len() >= 5, "{failures:?}");
    drop(host);
    daemon.end();
    assert!(!control.exists());
}
