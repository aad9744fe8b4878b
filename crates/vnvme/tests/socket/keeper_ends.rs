//! The keeper ends without notice, or its program is replaced: guests go on, and survive the next
//! kill of the serving process.

use crate::common::*;
use control::Client;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::net::{UnixDatagram, UnixStream};

/// A daemon with a keeper, and a guest that has written into its disks.
struct Kept {
    daemon: Daemon,
    client: Client,
    guest: Host,
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number.try_into().unwrap()).unwrap()
}

fn kill(process: u32) {
    kill_process(pid(process), Signal::KILL).unwrap();
}

impl Kept {
    fn start(test_dir: &TestDir) -> Self {
        let disk = test_dir.disk("disk.raw", 1 << 20);
        let (socket, control) = (text(&test_dir.socket()), text(&test_dir.path("control")));
        let ready = test_dir.path("ready");
        let manager = UnixDatagram::bind(&ready).unwrap();
        manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let variables = [KEEPER_AS_CONFIGURED, ("NOTIFY_SOCKET", &text(&ready))];
        let args = ["serve", "--socket", &socket, "--control", &control];
        let args = [&args[..], &["--keeper", "process", &disk, "mem://1M"]].concat();
        let daemon = Daemon::spawn_outliving(&variables, &args);
        assert!(manager.recv(&mut [0; 64]).unwrap() > 0);
        let client = Client::new(vec![test_dir.path("control")]).unwrap();
        let mut guest = Host::up(&test_dir.socket());
        guest.write(1, 0, &pattern(1, 4096));
        guest.write(2, 0, &pattern(2, 4096));
        Self {
            daemon,
            client,
            guest,
        }
    }

    /// Returns the serving process and its keeper.
    fn processes(&self) -> (u32, u32) {
        let process = self.client.stats().unwrap().measured.process;
        (process.pid, process.keeper.unwrap())
    }

    /// Reads all that the guest has written.
    fn check(&mut self) {
        assert!(self.guest.read(1, 0, 4096) == pattern(1, 4096));
        assert!(self.guest.read(2, 0, 4096) == pattern(2, 4096));
    }

    /// Kills the serving process; the next one answers when this returns.
    fn kill_serving(&mut self) {
        let (serving, _) = self.processes();
        kill(serving);
        self.check();
        eventually("another one answers", || {
            let stats = self.client.stats();
            stats.is_ok_and(|stats| stats.measured.process.pid != serving)
        });
    }
}

/// Returns the stand-by of a keeper, once it has all that the keeper has kept.
fn standby(keeper: u32) -> u32 {
    let mut found = None;
    eventually("there is a stand-by", || {
        found = standby_of(keeper);
        found.is_some()
    });
    found.unwrap()
}

/// Returns the stand-by of a keeper, if it has all that the keeper has kept.
pub fn standby_of(keeper: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"));
    let children = children.unwrap_or_default();
    let is_standby = |child: &&str| {
        let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        let open = fs::read_dir(format!("/proc/{child}/fd"))
            .into_iter()
            .flatten();
        let mut open = open
            .flatten()
            .filter_map(|fd| fs::read_link(fd.path()).ok());
        // The last record of the configuration has been kept for long.
        String::from_utf8_lossy(&line).contains("--stand-by")
            && open.any(|link| text(&link).contains("vnvme-served"))
    };
    let found = children.split_whitespace().find(is_standby);
    found.map(|child| child.parse().unwrap())
}

#[test]
fn guest_survives_its_keeper_and_then_its_process() {
    let test_dir = TestDir::new();
    let mut kept = Kept::start(&test_dir);
    for round in 0..3u32 {
        let (serving, keeper) = kept.processes();
        let next = standby(keeper);
        kill(keeper);
        kept.check();
        let wanted = format!("another one goes on: process {next}");
        kept.daemon.wait_log(|line| line.contains(&wanted));
        eventually("the process knows its keeper", || {
            kept.processes() == (serving, next)
        });
        kept.guest
            .write(1, u64::from(round), &pattern(1, 4096)[..512]);
        kept.guest.write(1, 0, &pattern(1, 4096));
        kept.kill_serving();
        kept.kill_serving();
    }
    let (serving, keeper) = kept.processes();
    drop(kept.guest);
    kill_process(pid(keeper), Signal::TERM).unwrap();
    let gone = |process: u32| rustix::process::test_kill_process(pid(process)).is_err();
    eventually("both have ended", || gone(serving) && gone(keeper));
    assert!(!test_dir.socket().exists(), "they have ended in order");
}

/// The keeper is the new program after an upgrade, in the same process, and keeps all that it had.
#[test]
fn upgrade_replaces_the_program_of_the_keeper() {
    let test_dir = TestDir::new();
    let mut kept = Kept::start(&test_dir);
    for round in 1..=3 {
        let (_, keeper) = kept.processes();
        kill_process(pid(keeper), Signal::USR2).unwrap();
        eventually("the keeper is the new program", || {
            kept.daemon.count("the keeper runs the new program, too") == round
        });
        assert_eq!(kept.daemon.pid(), keeper, "in the same process");
        kept.check();
        kept.kill_serving();
        assert_eq!(kept.processes().1, keeper);
        standby(keeper);
    }
    let (_, keeper) = kept.processes();
    kill(keeper);
    kept.check();
    kept.daemon
        .wait_log(|line| line.contains("another one goes on"));
    kept.kill_serving();
    drop(kept);
}

/// Nobody keeps anything when both keepers are killed, and the disks end with their process.
#[test]
fn guest_without_keepers_is_served_until_its_process_ends() {
    let test_dir = TestDir::new();
    let mut kept = Kept::start(&test_dir);
    let (serving, keeper) = kept.processes();
    let next = standby(keeper);
    // A stopped keeper starts no other stand-by.
    kill_process(pid(keeper), Signal::STOP).unwrap();
    kill(next);
    kill(keeper);
    let is_gone = |process: u32| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z"))
    };
    eventually("both have ended", || is_gone(next) && is_gone(keeper));
    kept.check();
    kept.guest.write(1, 0, &pattern(3, 4096));
    assert!(kept.guest.read(1, 0, 4096) == pattern(3, 4096));
    kill(serving);
    eventually("nobody listens", || {
        UnixStream::connect(test_dir.socket()).is_err()
    });
    drop(kept);
}
