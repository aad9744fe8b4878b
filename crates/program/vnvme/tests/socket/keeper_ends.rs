//! The keeper ends without notice, or its program is replaced: guests go on, and survive the next
//! kill of the serving process.

use crate::common::*;
use control::Client;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::net::UnixDatagram;

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

/// Returns both stand-bys of a keeper, once they have all that the keeper has kept and know each
/// other.
fn both_standbys(keeper: u32) -> [u32; 2] {
    let mut found = None;
    eventually("there are two stand-bys", || {
        found = <[u32; 2]>::try_from(standbys_of(keeper)).ok();
        // The first one knows the second one, too.
        found.is_some_and(|[first, _]| processes_known_to(first).len() == 2)
    });
    found.unwrap()
}

/// Returns the processes of which this process has pidfds; -1: one that has ended.
fn processes_known_to(process: u32) -> Vec<i32> {
    let open = fs::read_dir(format!("/proc/{process}/fdinfo")).into_iter();
    let open = open.flatten().flatten();
    let infos = open.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let pids = infos.filter_map(|info| {
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
        Some(pid.trim().parse().unwrap())
    });
    pids.collect()
}

/// Returns the stand-by of a keeper, if it has all that the keeper has kept.
pub fn standby_of(keeper: u32) -> Option<u32> {
    standbys_of(keeper).first().copied()
}

/// Returns the stand-bys of a keeper that have all that the keeper has kept, know the serving
/// process, and have taken the place of an earlier stand-by, in the order in which they were
/// started.
fn standbys_of(keeper: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace();
    let children: Vec<i32> = children.map(|child| child.parse().unwrap()).collect();
    let stands_by = |process: i32| {
        let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("--stand-by")
    };
    let mut found: Vec<u32> = children.iter().map(|child| child.unsigned_abs()).collect();
    // The serving process is named last, and an earlier stand-by only until it was dismissed.
    found.retain(|child| {
        let known = processes_known_to(*child);
        let knows_serving = known.iter().any(|pid| *pid > 0 && !stands_by(*pid));
        let mut others = known.iter().filter(|pid| stands_by(**pid) || **pid < 0);
        stands_by(child.cast_signed()) && knows_serving && others.all(|pid| children.contains(pid))
    });
    found
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

/// The keeper and its first stand-by are killed within milliseconds, in either order: the second
/// stand-by is the keeper, and has all that was kept.
#[test]
fn guest_survives_its_keeper_and_the_first_stand_by() {
    let test_dir = TestDir::new();
    let mut kept = Kept::start(&test_dir);
    for round in 0..4u32 {
        let (serving, keeper) = kept.processes();
        let [first, _] = both_standbys(keeper);
        let both = [[keeper, first], [first, keeper]];
        both[round as usize % 2].into_iter().for_each(kill);
        // The second one, or one that the first one has started as the keeper before its end.
        let mut next = keeper;
        eventually("the process knows its keeper", || {
            next = kept.processes().1;
            ![keeper, first].contains(&next)
        });
        let wanted = format!("another one goes on: process {next}");
        kept.daemon.wait_log(|line| line.contains(&wanted));
        assert_eq!(kept.processes().0, serving);
        kept.check();
        kept.guest
            .write(2, u64::from(round), &pattern(2, 4096)[..512]);
        kept.guest.write(2, 0, &pattern(2, 4096));
        kept.kill_serving();
        assert_eq!(kept.processes().1, next);
    }
    drop(kept);
}

/// Without any keeper the serving process goes on, and says that nothing outlives it.
#[test]
fn serving_process_says_that_no_keeper_is_left() {
    let test_dir = TestDir::new();
    let mut kept = Kept::start(&test_dir);
    let (serving, keeper) = kept.processes();
    let [first, second] = both_standbys(keeper);
    // A keeper that runs would start another stand-by.
    kill_process(pid(keeper), Signal::STOP).unwrap();
    [second, first, keeper].into_iter().for_each(kill);
    let wanted = "the keeper and its stand-bys have ended";
    kept.daemon.wait_log(|line| line.contains(wanted));
    kept.check();
    let disks = kept.client.disks().unwrap();
    assert!(disks.iter().all(|disk| disk.not_kept), "{disks:?}");
    drop(kept.guest);
    kill_process(pid(serving), Signal::TERM).unwrap();
    let gone = || rustix::process::test_kill_process(pid(serving)).is_err();
    eventually("it has ended", gone);
}
