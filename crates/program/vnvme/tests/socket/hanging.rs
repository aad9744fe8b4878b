//! Volumes that hang, and workers that stand still: detection, effects on neighbours, and the end
//! of the process.

use std::time::{Duration, Instant};

use fuse_disk::{Disk, Fault, RequestKind, op};
use nvme::{Command, NvmOpcode, Status};
use rustix::process::Signal;

use crate::common::*;

/// Maximum time that a neighbour may wait on a machine that is also busy otherwise. A hanging
/// volume here hangs for ever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A daemon with one worker for two controllers: one on a file system that may stop answering, one
/// on a disk. The file system is dropped first.
struct Pair {
    fuse: Disk,
    daemon: Daemon,
    test_dir: TestDir,
}

impl Pair {
    fn new(test: &str) -> Option<Self> {
        Self::with(test, "")
    }

    /// With these options of the process.
    fn with(test: &str, options: &str) -> Option<Self> {
        let test_dir = TestDir::new();
        let fuse = breaking(&format!("hanging::{test}"), &test_dir, 1 << 20)?;
        let disk = test_dir.disk("disk.raw", 4 << 20);
        let config = format!(
            "[[controller]]\nsocket = \"{}\"\nnamespace = [{{ volume = \"{}\" }}]\n\
             [[controller]]\nsocket = \"{}\"\nnamespace = [{{ volume = \"{disk}\" }}]\n\
             [process]\n{options}",
            text(&test_dir.path("hangs.sock")),
            text(&fuse.path()),
            text(&test_dir.socket()),
        );
        std::fs::write(test_dir.path("vnvme.toml"), config).unwrap();
        let daemon = Daemon::spawn(&["serve", "--config", &text(&test_dir.path("vnvme.toml"))]);
        daemon.wait_listening(&test_dir.path("hangs.sock"));
        daemon.wait_listening(&test_dir.socket());
        Some(Self {
            fuse,
            daemon,
            test_dir,
        })
    }

    fn wait_neighbour_closed(&self) {
        eventually("the neighbour's socket is removed", || {
            !self.test_dir.socket().exists()
        });
    }

    fn hosts(&self) -> [Host; 2] {
        [self.test_dir.path("hangs.sock"), self.test_dir.socket()].map(|socket| Host::up(&socket))
    }
}

/// Commands of every kind on a file that does not answer, more than any pool has threads.
fn hang(host: &mut Host, fuse: &Disk) {
    for i in 0..HANGING as u64 - 1 {
        let opcode = [NvmOpcode::READ, NvmOpcode::WRITE][i as usize % 2];
        let transfer = host.transfer(opcode, 1, i, 512, 4 << 20);
        host.submit(1, transfer);
    }
    host.submit(1, Command::new(NvmOpcode::FLUSH.0, 0, 1));
    assert!(fuse.wait_held(8, WAIT_TIMEOUT));
}

/// Error number of a write without space on the device.
const ENOSPC: i32 = 28;

/// How many [`hang`] starts.
const HANGING: usize = 51;

/// Reads, writes, flushes and registers go on.
fn goes_on(host: &mut Host) {
    for i in 0..20 {
        let began = Instant::now();
        let data = pattern(i, 8192);
        host.write(1, 8 * i, &data);
        host.flush(1);
        assert!(host.read(1, 8 * i, data.len()) == data);
        assert_ne!(host.read32(nvme::regs::VS), 0);
        let took = began.elapsed();
        assert!(took < ANSWER_TIMEOUT, "it took {took:?}");
    }
}

#[test]
fn hanging_volume_blocks_no_other() {
    let Some(pair) = Pair::new("hanging_volume_blocks_no_other") else {
        return;
    };
    let [mut hangs, mut neighbour] = pair.hosts();
    let data = pattern(7, 16 << 10);
    hangs.write(1, 0, &data);
    assert!(hangs.read(1, 0, data.len()) == data);
    hangs.flush(1);
    assert!(pair.fuse.bytes(0..data.len()) == data);

    pair.fuse.silence(None);
    hang(&mut hangs, &pair.fuse);
    goes_on(&mut neighbour);
    // The registers of the disk itself work, too, and a reset does not wait for hanging commands.
    let began = Instant::now();
    hangs.enable();
    hangs.create_queues(1, None);
    assert!(began.elapsed() < ANSWER_TIMEOUT);
    hang(&mut hangs, &pair.fuse);
    goes_on(&mut neighbour);

    pair.fuse.release();
    hangs.enable();
    hangs.create_queues(1, None);
    let data = pattern(8, 16 << 10);
    hangs.write(1, 0, &data);
    hangs.flush(1);
    assert!(hangs.read(1, 0, data.len()) == data);
    drop((hangs, neighbour));
    pair.daemon.end();
}

#[test]
fn recovered_volume_completes_pending_requests() {
    let Some(pair) = Pair::new("recovered_volume_completes_pending_requests") else {
        return;
    };
    let [mut hangs, mut neighbour] = pair.hosts();
    let data = pattern(5, 16 << 10);
    for _ in 0..3 {
        pair.fuse.silence(None);
        hang(&mut hangs, &pair.fuse);
        goes_on(&mut neighbour);
        pair.fuse.release();
        for _ in 0..HANGING {
            assert_eq!(hangs.completion(1).status(), Status::SUCCESS);
        }
        hangs.write(1, 100, &data);
        assert!(hangs.read(1, 100, data.len()) == data);
    }
    drop((hangs, neighbour));
    pair.daemon.end();
}

#[test]
fn hanging_flush_blocks_no_read() {
    let Some(pair) = Pair::new("hanging_flush_blocks_no_read") else {
        return;
    };
    let [mut hangs, mut neighbour] = pair.hosts();
    let data = pattern(6, 4096);
    hangs.write(1, 0, &data);
    pair.fuse.silence(Some(op::FSYNC));
    let flush = hangs.submit(1, Command::new(NvmOpcode::FLUSH.0, 0, 1));
    assert!(pair.fuse.wait_held(1, WAIT_TIMEOUT));
    goes_on(&mut neighbour);
    assert!(hangs.read(1, 0, data.len()) == data);
    pair.fuse.release();
    let completion = hangs.completion(1);
    assert_eq!(
        (completion.cid.get(), completion.status()),
        (flush, Status::SUCCESS)
    );
    drop((hangs, neighbour));
    pair.daemon.end();
}

#[test]
fn full_volume_fails_writes_only() {
    let Some(pair) = Pair::new("full_volume_fails_writes_only") else {
        return;
    };
    let [mut full, mut neighbour] = pair.hosts();
    let data = pattern(4, 4096);
    full.write(1, 0, &data);
    let everywhere = 0..u64::MAX;
    pair.fuse.fail(
        RequestKind::Write,
        everywhere,
        u64::MAX,
        Fault::Error(ENOSPC),
    );
    let write = full.transfer(NvmOpcode::WRITE, 1, 8, 4096, 4 << 20);
    assert_ne!(full.run(1, write).status(), Status::SUCCESS);
    assert!(full.read(1, 0, data.len()) == data);
    goes_on(&mut neighbour);
    pair.fuse.heal();
    full.write(1, 8, &data);
    full.flush(1);
    assert!(full.read(1, 8, data.len()) == data);
    drop((full, neighbour));
    pair.daemon.end();
}

#[test]
fn hanging_close_does_not_block_end() {
    let Some(pair) = Pair::new("hanging_close_does_not_block_end") else {
        return;
    };
    let [mut hangs, mut neighbour] = pair.hosts();
    let data = pattern(9, 4096);
    hangs.write(1, 0, &data);
    hangs.flush(1);
    neighbour.write(1, 0, &data);
    drop((hangs, neighbour));
    pair.fuse.silence(Some(op::FLUSH));
    pair.daemon.signal(Signal::TERM);
    assert!(pair.fuse.wait_held(1, WAIT_TIMEOUT));
    // No other process waits for that.
    pair.wait_neighbour_closed();
    let second = Daemon::serve(&pair.test_dir, &[&text(&pair.test_dir.path("disk.raw"))]);
    let mut host = Host::up(&pair.test_dir.socket());
    assert!(host.read(1, 0, data.len()) == data);
    drop(host);
    second.end();
    assert!(!pair.test_dir.path("hangs.sock").exists());
    let Pair { fuse, daemon, .. } = pair;
    drop(fuse);
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:#?}");
}

#[test]
fn hanging_volume_does_not_block_end() {
    let test = "hanging_volume_does_not_block_end";
    let Some(pair) = Pair::with(test, "stop-timeout = 1\n") else {
        return;
    };
    let [mut hangs, mut neighbour] = pair.hosts();
    let data = pattern(3, 64 << 10);
    neighbour.write(1, 0, &data);
    pair.fuse.silence(None);
    hang(&mut hangs, &pair.fuse);
    pair.daemon.signal(Signal::TERM);
    let file = text(&pair.fuse.path());
    pair.daemon
        .wait_log(|line| line.contains(&file) && line.contains("no answer; cancelling"));
    // All else has ended: the neighbour's disk is flushed and free, and so are both sockets.
    pair.wait_neighbour_closed();
    let disk = text(&pair.test_dir.path("disk.raw"));
    let second = Daemon::serve(&pair.test_dir, &[&disk]);
    let mut host = Host::up(&pair.test_dir.socket());
    assert!(host.read(1, 0, data.len()) == data);
    drop(host);
    second.end();
    eventually("its socket is removed", || {
        !pair.test_dir.path("hangs.sock").exists()
    });
    // The kernel waits for the file with each thread that does, whatever kills the process.
    let Pair { fuse, daemon, .. } = pair;
    drop(fuse);
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(3), "{ended:#?}");
    let last = ended.log.last().unwrap();
    let wanted = ["may not be durable", &file];
    assert!(wanted.iter().all(|text| last.contains(text)), "{last}");
}

#[test]
fn stalled_worker_is_named_and_not_waited_for() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let control = text(&test_dir.path("ctl"));
    // The worker of a disk with mapped doorbells polls all the time, if it is to. A sleeping worker
    // makes no rounds, either.
    let args = ["--doorbells", "mapped", "--max-poll-interval", "0", &disk];
    let args = [&args[..], &["--control", &control, "--stop-timeout", "1"]].concat();
    let daemon = Daemon::serve(&test_dir, &args);
    let mut host = Host::attach(&test_dir.socket());
    host.enable();
    let freeze = || Frozen::stop(daemon.pid(), "worker-0");
    let frozen = match freeze() {
        Ok(frozen) => frozen,
        Err(why) => {
            let test = "vnvme::hanging::stalled_worker_is_named_and_not_waited_for";
            return testkit::skip(test, why);
        }
    };
    let mut worker = serde_json::Value::Null;
    // A busy machine may have kept it standing before: then there are more lines, and more stalls.
    eventually("it stands still", || {
        worker = all_stats(&control)["workers"][0].clone();
        worker["stalled_ms"].as_u64().unwrap() >= 1000
    });
    daemon.wait_log(|line| line.contains("worker-0 has made no round"));
    assert_eq!(worker["thread"], "worker-0");
    assert!(worker["stalls"].as_u64().unwrap() >= 1, "{worker}");
    assert!(
        worker["doing"].as_str().unwrap().contains("stopped"),
        "{worker}"
    );
    drop(frozen);
    daemon.wait_log(|line| line.contains("worker-0 continues after"));
    eventually("it stands still no more", || {
        worker = all_stats(&control)["workers"][0].clone();
        worker["stalled_ms"] == 0
    });
    assert_eq!(worker["doing"], serde_json::Value::Null);

    let frozen = freeze().unwrap();
    daemon.signal(Signal::TERM);
    daemon.wait_log(|line| line.contains("worker-0 does not end"));
    frozen.wait_for_its_end();
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(3), "{ended:#?}");
    let last = ended.log.last().unwrap();
    assert!(last.contains(&text(&test_dir.socket())), "{last}");
}

#[test]
fn unread_log_blocks_nobody() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &["--log", "trace", &disk]);
    drop(Host::up(&test_dir.socket()));
    let full = daemon.stop_reading();
    for _ in 0..3 {
        goes_on(&mut Host::up(&test_dir.socket()));
    }
    daemon.signal(Signal::TERM);
    // Both are removed at the end.
    eventually("it ends", || !test_dir.socket().exists());
    drop(full);
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:#?}");
}
