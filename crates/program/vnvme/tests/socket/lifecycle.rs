//! End of the process, and the disk's content afterwards.

use std::os::unix::process::ExitStatusExt;

use nvme::cmd::io::RwCdw12;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use rustix::process::Signal;

use crate::common::*;

#[test]
fn sigterm_and_sigint_end_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let test_dir = TestDir::new();
        let disk = test_dir.disk("disk.raw", 4 << 20);
        let daemon = Daemon::serve(&test_dir, &[&disk]);
        let mut host = Host::up(&test_dir.socket());
        let data = pattern(1, 128 << 10);
        host.write(1, 100, &data);
        // A client is connected, and a silent one waits behind it.
        let waiting = std::os::unix::net::UnixStream::connect(test_dir.socket()).unwrap();
        daemon.signal(signal);
        let ended = daemon.wait();
        assert_eq!(ended.status.code(), Some(0), "{ended:#?}");
        assert!(!test_dir.socket().exists(), "the socket is left behind");
        assert!(test_dir.bytes("disk.raw", 51_200, data.len()) == data);
        drop((host, waiting));
    }
}

#[test]
fn sigterm_waits_for_commands_in_flight() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 16 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut host = Host::up(&test_dir.socket());
    let data = pattern(9, 64 << 10);
    std::os::unix::fs::FileExt::write_all_at(&host.ram, &data, 4 << 20).unwrap();
    for i in 0..60u64 {
        let write = host.transfer(NvmOpcode::WRITE, 1, 128 * i, data.len(), 4 << 20);
        host.submit(1, write);
    }
    let ended = daemon.end();
    // Each write is there as a whole, or not at all; completed writes are there.
    let mut completed = 0;
    while let Some(completion) = host.completion_after_the_end(1) {
        assert_eq!(completion.status(), Status::SUCCESS);
        completed += 1;
    }
    let mut found = 0;
    for i in 0..60u64 {
        let bytes = test_dir.bytes("disk.raw", i * 65_536, data.len());
        if bytes == data {
            found += 1;
        } else {
            assert!(bytes.iter().all(|byte| *byte == 0), "write {i} is torn");
        }
    }
    assert!(
        found >= completed,
        "{completed} completed, {found} found: {ended:#?}"
    );
}

/// A disk behind a second process. Its counters show every Flush that reaches the device.
struct Observed {
    lower: Daemon,
    control: String,
    url: String,
}

impl Observed {
    fn new(test_dir: &TestDir) -> Observed {
        let socket = text(&test_dir.path("below.sock"));
        let control = text(&test_dir.path("below.ctl"));
        let disk = test_dir.disk("disk.raw", 4 << 20);
        let lower = Daemon::spawn(&["serve", "--control", &control, "--socket", &socket, &disk]);
        lower.wait_listening(socket.as_ref());
        let url = format!("vfio-user://{socket}/1");
        Observed {
            lower,
            control,
            url,
        }
    }

    /// I/O commands that are neither reads nor writes: the driver sends Flushes only, when nothing
    /// is zeroed or trimmed.
    fn flushes(&self) -> u64 {
        let all = all_stats(&self.control);
        let counters = &all["controllers"][0];
        let queues = counters["queues"].as_array().unwrap();
        let io = queues.iter().filter(|queue| queue["qid"] != 0);
        let commands: u64 = io.map(|queue| queue["commands"].as_u64().unwrap()).sum();
        let moved = |name: &str| counters[name].as_u64().unwrap();
        commands - moved("host_reads") - moved("host_writes")
    }
}

/// Threads of a process, by name.
fn has_thread(pid: u32, name: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.flatten().any(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
    })
}

#[test]
fn unflushed_data_is_durable_after_ending_signal() {
    let test_dir = TestDir::new();
    let disk = Observed::new(&test_dir);
    for (round, signals) in [
        &[Signal::TERM][..],
        &[Signal::INT],
        &[Signal::QUIT],
        &[Signal::XCPU],
        // The signals of timeout(1), and of a terminal beside an init system.
        &[Signal::TERM, Signal::TERM],
        &[
            Signal::TERM,
            Signal::INT,
            Signal::TERM,
            Signal::HUP,
            Signal::QUIT,
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let daemon = Daemon::serve(&test_dir, &[&disk.url]);
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 100, &pattern(round as u64, 4096));
        let before = disk.flushes();
        signals.iter().for_each(|signal| daemon.signal(*signal));
        let ended = daemon.wait();
        assert_eq!(ended.status.code(), Some(0), "{signals:?}: {ended:#?}");
        assert!(disk.flushes() > before, "{signals:?}: {ended:#?}");
    }
    disk.lower.end();
}

#[test]
fn export_alone_flushes_and_ends_cleanly() {
    let test_dir = TestDir::new();
    let disk = Observed::new(&test_dir);
    let socket = text(&test_dir.path("v.sock"));
    for signals in [&[Signal::INT][..], &[Signal::TERM, Signal::TERM]] {
        let daemon = Daemon::spawn(&["serve", "--vhost-user-blk", &socket, &disk.url]);
        daemon.wait_listening(socket.as_ref());
        daemon.signal(Signal::HUP);
        daemon.wait_log(|line| line.contains("SIGHUP"));
        let before = disk.flushes();
        signals.iter().for_each(|signal| daemon.signal(*signal));
        let ended = daemon.wait();
        assert_eq!(ended.status.code(), Some(0), "{signals:?}: {ended:#?}");
        assert!(disk.flushes() > before, "{signals:?}: {ended:#?}");
    }
    disk.lower.end();
}

#[test]
fn other_signals_end_nothing() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    for (signal, word) in [
        (Signal::HUP, "only vnvme daemon rereads"),
        (Signal::USR1, "vnvme stats"),
        (Signal::USR2, "vnvme stats"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::VTALARM, "SIGVTALRM"),
        (Signal::PROF, "SIGPROF"),
        (Signal::IO, "SIGIO"),
        (Signal::PIPE, ""),
    ] {
        let daemon = Daemon::serve(&test_dir, &[&disk]);
        let mut host = Host::up(&test_dir.socket());
        for round in 0..50u64 {
            daemon.signal(signal);
            let data = pattern(round, 64 << 10);
            host.write(1, 0, &data);
            assert!(host.read(1, 0, data.len()) == data);
        }
        daemon.wait_log(|line| line.contains(word));
        drop(host);
        daemon.end();
    }
}

#[test]
fn signals_during_start_are_delayed() {
    let test_dir = TestDir::new();
    let disk = Observed::new(&test_dir);
    // The daemon cannot open its volume until the process below continues.
    disk.lower.signal(Signal::STOP);
    let daemon = Daemon::spawn(&["serve", "--socket", &text(&test_dir.socket()), &disk.url]);
    eventually("it opens its volume", || {
        has_thread(daemon.pid(), "signals")
    });
    daemon.signal(Signal::HUP);
    daemon.wait_log(|line| line.contains("SIGHUP"));
    daemon.signal(Signal::TERM);
    daemon.signal(Signal::TERM);
    disk.lower.signal(Signal::CONT);
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:#?}");
    assert!(disk.flushes() > 0, "{ended:#?}");
    disk.lower.end();
}

#[test]
fn closed_log_does_not_prevent_clean_end() {
    let test_dir = TestDir::new();
    let disk = Observed::new(&test_dir);
    let daemon = Daemon::serve(&test_dir, &[&disk.url]);
    daemon.close_log(|daemon| daemon.signal(Signal::HUP));
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 100, &pattern(1, 4096));
    let before = disk.flushes();
    daemon.end();
    assert!(disk.flushes() > before);
    disk.lower.end();
}

#[test]
fn write_beyond_file_size_limit_fails_alone() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut host = Host::up(&test_dir.socket());
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32);
    let limit = rustix::process::Rlimit {
        current: Some(1 << 20),
        maximum: None,
    };
    rustix::process::prlimit(pid, rustix::process::Resource::Fsize, limit).unwrap();
    let data = pattern(1, 4096);
    for _ in 0..20 {
        assert_ne!(host.write_with(1, 4096, &data, false), Status::SUCCESS);
    }
    assert_eq!(host.write_with(1, 0, &data, false), Status::SUCCESS);
    assert!(host.read(1, 0, data.len()) == data);
    daemon.wait_log(|line| line.contains("ulimit -f"));
    drop(host);
    daemon.end();
}

#[test]
fn second_signal_ends_at_once() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["null://1G?latency=50s"]);
    let mut host = Host::up(&test_dir.socket());
    let read = host.transfer(NvmOpcode::READ, 1, 0, 512, 4 << 20);
    host.submit(1, read);
    // The command was fetched when a later command is answered.
    host.identify_controller();
    daemon.signal(Signal::TERM);
    daemon.wait_log(|line| line.contains("ending"));
    // Early signals count as the same order, so a later one follows.
    eventually("a signal is taken as a second one", || {
        daemon.signal(Signal::TERM);
        daemon.count("a second SIGTERM") > 0
    });
    let ended = daemon.wait();
    assert_eq!(ended.status.signal(), Some(15), "{ended:#?}");
}

#[test]
fn flushed_data_survives_sigkill() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 16 << 20);
    for round in 0..3u64 {
        let daemon = Daemon::serve(&test_dir, &[&disk]);
        let mut host = Host::up(&test_dir.socket());
        let fua: Vec<_> = (0..8).map(|i| pattern(round * 100 + i, 4096)).collect();
        for (lba, data) in (0..).step_by(8).zip(&fua) {
            assert_eq!(host.write_with(1, lba, data, true), Status::SUCCESS);
        }
        let flushed = pattern(round * 100 + 50, 256 << 10);
        host.write(1, 2048, &flushed);
        host.flush(1);
        // More writes are in flight.
        for i in 0..20u64 {
            let write = host.transfer(NvmOpcode::WRITE, 1, 8192 + 128 * i, 65_536, 4 << 20);
            host.submit(1, write);
        }
        daemon.kill();
        for (offset, data) in (0..).step_by(4096).zip(&fua) {
            assert!(
                test_dir.bytes("disk.raw", offset, 4096) == *data,
                "FUA at {offset}"
            );
        }
        assert!(test_dir.bytes("disk.raw", 1 << 20, flushed.len()) == flushed);
    }
    // The killed daemon's socket, lock and data are no hindrance.
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(1, 0, 4096) == pattern(200, 4096));
    drop(host);
    daemon.end();
}

/// Get or Set Features, Volatile Write Cache (06h).
fn write_cache(host: &mut Host, opcode: AdminOpcode, on: bool) -> u32 {
    let mut command = Command::new(opcode.0, 0, 0);
    command.cdw10 = 6.into();
    command.cdw11 = u32::from(on).into();
    let completion = host.run(0, command);
    assert_eq!(completion.status(), Status::SUCCESS);
    completion.dw0.get()
}

#[test]
fn writes_without_cache_survive_sigkill() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &["--no-write-cache", &disk]);
    let mut host = Host::up(&test_dir.socket());
    assert_eq!(write_cache(&mut host, AdminOpcode::GET_FEATURES, false), 0);
    let data = pattern(5, 64 << 10);
    host.write(1, 0, &data);
    daemon.kill();
    assert!(test_dir.bytes("disk.raw", 0, data.len()) == data);

    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut host = Host::up(&test_dir.socket());
    assert_eq!(write_cache(&mut host, AdminOpcode::GET_FEATURES, false), 1);
    write_cache(&mut host, AdminOpcode::SET_FEATURES, false);
    assert_eq!(write_cache(&mut host, AdminOpcode::GET_FEATURES, false), 0);
    host.write(1, 1024, &data);
    // The host's setting lasts until its next reset.
    host.client.reset().unwrap();
    host.enable();
    assert_eq!(write_cache(&mut host, AdminOpcode::GET_FEATURES, false), 1);
    daemon.kill();
    assert!(test_dir.bytes("disk.raw", 512 << 10, data.len()) == data);
}

#[test]
fn invalid_commands_get_status_and_harm_nobody() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let read = |host: &Host| host.transfer(NvmOpcode::READ, 1, 0, 512, 1 << 20);
    let last = 2048;
    for (lba, status) in [
        (last - 1, Status::SUCCESS),
        (last, Status::LBA_OUT_OF_RANGE),
        (u64::MAX, Status::LBA_OUT_OF_RANGE),
    ] {
        let mut command = read(&host);
        command.set_slba(lba);
        assert!(host.run(1, command).status().is(status), "{lba}");
    }
    let mut command = read(&host);
    command.cdw12 = RwCdw12::new().with_nlb_z(u16::MAX).into_bits().into();
    assert!(
        !host.run(1, command).status().is_success(),
        "more than MDTS"
    );
    let mut command = read(&host);
    command.nsid = 7.into();
    assert!(
        host.run(1, command)
            .status()
            .is(Status::INVALID_NAMESPACE_OR_FORMAT)
    );
    let mut command = read(&host);
    command.opcode = 0x7f;
    assert!(host.run(1, command).status().is(Status::INVALID_OPCODE));
    // Memory that is nowhere, and an offset that is not allowed.
    let mut command = read(&host);
    command.set_prps(0xdead_0000_0000, 0);
    assert!(!host.run(1, command).status().is_success());
    let mut command = read(&host);
    command.set_prps(RAM_BASE + 1, 0);
    assert!(host.run(1, command).status().is(Status::PRP_OFFSET_INVALID));
    // A doorbell beyond the ring, and one of a queue that is not there.
    host.write_register(0x1000 + 8, &1000u32.to_le_bytes());
    host.write_register(0x1000 + 8 * 60, &1u32.to_le_bytes());
    host.write(1, 0, &[9; 512]);
    drop(host);
    daemon.end();
}
