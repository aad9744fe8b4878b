//! Processes of the daemon without a processor for seconds to a minute, while a client maps memory,
//! unmaps it and writes. Then the serving process is killed, and nothing is lost.
//!
//! `VNVME_STARVE_SECONDS` has the durations: `3,12,60` before a release.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control::Client;
use rustix::process::Pid;
use vfio_user::DmaUnmapping;

use crate::common::*;
use crate::keeper::{kill_serving, serving, start};
use crate::starvation::{MORE, Stopped, only_receiver, use_more_memory};

/// Time limit of a client's request: longer than any process stands still here.
const LIMIT: Duration = Duration::from_secs(300);
/// Rounds while a process has no processor. A client waits for the keeper after 256 messages with
/// descriptors; QEMU has a few in an hour.
const ROUNDS: u32 = 20;

/// Returns the durations for which a process gets no processor.
fn durations() -> Vec<Duration> {
    let text = std::env::var("VNVME_STARVE_SECONDS").unwrap_or_else(|_| "1".to_owned());
    let seconds = text.split(',').map(|part| part.trim().parse().unwrap());
    seconds.map(Duration::from_secs_f64).collect()
}

/// A daemon with a keeper, and a client with a file to write to.
struct Served {
    daemon: Daemon,
    host: Host,
    control: Client,
    /// Number that was written last to each block of 4 KiB.
    written: BTreeMap<u64, u64>,
    next: u64,
    /// The longest that a client's map, unmap and write have taken together.
    longest: Duration,
    _test_dir: TestDir,
}

impl Served {
    fn start() -> Self {
        let test_dir = TestDir::new();
        let disk = test_dir.disk("disk.raw", 4 << 20);
        let (socket, control) = (text(&test_dir.socket()), text(&test_dir.path("control")));
        let args = ["serve", "--socket", &socket, "--keeper", "process"];
        let args = [&args[..], &["--control", &control, &disk]].concat();
        let daemon = start(&test_dir, &args);
        let client = vfio_user::client::Client::connect(test_dir.socket(), LIMIT).unwrap();
        let mut host = Host::over(client);
        host.map_ram();
        host.enable();
        host.create_queues(1, None);
        let mut served = Self {
            daemon,
            host,
            control: Client::new(vec![test_dir.path("control")]).unwrap(),
            written: BTreeMap::new(),
            next: 0,
            longest: Duration::ZERO,
            _test_dir: test_dir,
        };
        served.round();
        served
    }

    /// Writes a block, maps memory, reads the block into it, and unmaps it.
    fn round(&mut self) {
        let begin = Instant::now();
        let (block, number) = (self.next % 64, self.next);
        self.next += 1;
        self.host.write(1, block * 8, &pattern(number, 4096));
        self.written.insert(block, number);
        self.host.assign_vectors(2);
        if block == 0 {
            use_more_memory(&mut self.host, &pattern(number, 4096));
        } else {
            let first = self.written[&0];
            use_more_memory(&mut self.host, &pattern(first, 4096));
        }
        self.longest = self.longest.max(begin.elapsed());
    }

    /// Goes on for as long as a process gets no processor.
    fn go_on(&mut self, duration: Duration) {
        let begin = Instant::now();
        let pause = duration / ROUNDS;
        while begin.elapsed() < duration {
            self.round();
            std::thread::sleep(pause);
        }
    }

    fn serving(&self) -> Pid {
        serving(self.daemon.pid()).unwrap()
    }

    /// Kills the serving process once its client is kept; everything that was written is there.
    fn lose_nothing(&mut self) {
        let control = &self.control;
        let is_kept = || control.disk("vm").is_ok_and(|disk| !disk.not_yet_kept);
        eventually("the client is kept", is_kept);
        kill_serving(&self.daemon);
        self.check();
        self.round();
        self.check();
    }

    fn check(&mut self) {
        for (&block, &number) in &self.written {
            let read = self.host.read(1, block * 8, 4096);
            assert!(
                read == pattern(number, 4096),
                "block {block}: not write {number}"
            );
        }
    }

    fn end(self, what: &str, duration: Duration) {
        let Self {
            daemon,
            host,
            next,
            longest,
            ..
        } = self;
        println!(
            "{what} for {duration:?}: {next} rounds of write, map, read and unmap, the longest \
             {longest:.1?}; nothing lost"
        );
        assert_eq!(daemon.count("client disconnected"), 0);
        drop(host);
        let ended = daemon.end();
        let errors = ended.log.iter().filter(|line| line.contains("ERROR"));
        assert_eq!(errors.count(), 0, "{ended:#?}");
    }
}

#[test]
fn stopped_keeper_loses_nothing() {
    for duration in durations() {
        let mut served = Served::start();
        let keeper = Stopped::new(served.daemon.pid());
        served.go_on(duration);
        assert!(keeper.is_stopped());
        drop(keeper);
        served.lose_nothing();
        served.end("keeper stopped", duration);
    }
}

#[test]
fn stopped_receiver_loses_nothing() {
    for duration in durations() {
        let mut served = Served::start();
        let receiver = Stopped::new(only_receiver(&served.daemon));
        served.go_on(duration);
        assert!(receiver.is_stopped());
        served.lose_nothing();
        drop(receiver);
        served.end("receiver stopped", duration);
    }
}

/// The serving process stands still: its keeper does not replace it, and it answers afterwards.
#[test]
fn stopped_worker_loses_nothing() {
    for duration in durations() {
        let mut served = Served::start();
        let process = served.serving();
        let stopped = Stopped::new(process.as_raw_nonzero().get() as u32);
        let more = memfd(1 << 20);
        let map = window(MORE, 1 << 20);
        let range = DmaUnmapping::Range {
            iova: MORE,
            size: 1 << 20,
        };
        std::thread::scope(|scope| {
            let client = &mut served.host.client;
            let waits = scope.spawn(move || {
                client.dma_map(map, Some(more.as_fd())).unwrap();
                client.dma_unmap(range).unwrap();
            });
            std::thread::sleep(duration);
            assert!(stopped.is_stopped() && !waits.is_finished());
            drop(stopped);
            waits.join().unwrap();
        });
        served.go_on(duration.min(Duration::from_secs(1)));
        assert_eq!(served.serving(), process, "it was replaced");
        served.lose_nothing();
        served.end("worker stopped", duration);
    }
}

/// Group of processes that together get a hundredth of a processor.
struct Hundredth(PathBuf);

impl Hundredth {
    /// Makes the group, or returns why that is impossible.
    fn new() -> Result<Self, String> {
        let name = format!("vnvme-test-{}", std::process::id());
        let roots = [
            ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "1000"),
            ("/sys/fs/cgroup", "cpu.max", "1000 100000"),
        ];
        for (root, file, limit) in roots {
            let group = Path::new(root).join(&name);
            if fs::create_dir(&group).is_err() {
                continue;
            }
            let group = Self(group);
            if fs::write(group.0.join(file), limit).is_ok() {
                return Ok(group);
            }
        }
        Err("no control group with a limit of processor time can be made".to_owned())
    }

    fn enter(&self, process: u32) {
        let _ = fs::write(self.0.join("cgroup.procs"), process.to_string());
    }
}

impl Drop for Hundredth {
    fn drop(&mut self) {
        // Processes that are left go back to the group above.
        let members = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        let above = self.0.parent().map(|above| above.join("cgroup.procs"));
        for member in members.lines() {
            let _ = above.as_ref().map(|above| fs::write(above, member));
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// Returns a process with all its descendants.
fn family(process: u32) -> BTreeSet<u32> {
    let mut all = BTreeSet::from([process]);
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    for child in children.unwrap_or_default().split_whitespace() {
        all.extend(family(child.parse().unwrap()));
    }
    all
}

#[test]
fn hundredth_of_a_processor_loses_nothing() {
    for duration in durations() {
        let group = match Hundredth::new() {
            Ok(group) => group,
            Err(why) => {
                let test = "vnvme::starvation_times::hundredth_of_a_processor_loses_nothing";
                return testkit::skip(test, why);
            }
        };
        let mut served = Served::start();
        let process = served.serving();
        family(served.daemon.pid())
            .into_iter()
            .for_each(|process| group.enter(process));
        served.go_on(duration);
        assert_eq!(served.serving(), process, "it was replaced");
        // The next process has as little.
        served.lose_nothing();
        drop(group);
        served.check();
        served.end("a hundredth of a processor", duration);
    }
}
