//! Many clients in turn: nothing is lost or leaked.

use std::os::fd::AsFd;

use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use vfio_user::client::{Client, RawClient};

use crate::common::*;

/// Runs one client of each kind in turn.
fn visit(test_dir: &TestDir, round: u64) {
    match round % 5 {
        // Connects and sends nothing.
        0 => leave(RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap()),
        // Negotiates, maps memory and leaves without a word.
        1 => {
            let mut client = Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
            let file = memfd(1 << 20);
            let map = window(0, 1 << 20);
            client.dma_map(map, Some(file.as_fd())).unwrap();
        }
        // Uses everything.
        2 => {
            let mut host = Host::attach(&test_dir.socket());
            host.assign_vectors(33);
            host.enable();
            host.create_queues(4, Some(5));
            host.write(1, 0, &pattern(round, 8192));
            assert!(host.read(1, 0, 8192) == pattern(round, 8192));
        }
        // Leaves in the middle of commands.
        3 => {
            let mut host = Host::up(&test_dir.socket());
            for i in 0..30u64 {
                let command = host.transfer(NvmOpcode::WRITE, 1, 64 * i, 32 << 10, 4 << 20);
                host.submit(1, command);
            }
        }
        // Leaves in the middle of a message.
        _ => {
            let mut client = RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap();
            client.send(&[1, 0, 1, 0, 200, 0, 0, 0, 0, 0], &[]).unwrap();
        }
    }
}

#[test]
fn many_clients_leave_nothing() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    // A client that only connects: the descriptors that are open afterwards are the daemon's own.
    visit(&test_dir, 0);
    daemon.wait_log(|line| line.contains("client disconnected"));
    let open = daemon.settled_descriptors();
    let rounds = |count: u64| {
        for round in 0..count {
            visit(&test_dir, round);
            // The client before has disconnected, so that the next is not refused. The log has
            // lines of only a few.
            daemon.wait_descriptors(open);
        }
    };
    rounds(50);
    let resident = status_kib(daemon.pid(), "VmRSS");
    let mapped = status_kib(daemon.pid(), "VmSize");
    rounds(300);
    daemon.wait_descriptors(open);
    let grown = status_kib(daemon.pid(), "VmRSS").saturating_sub(resident);
    assert!(grown < 8 << 10, "{grown} KiB more after 300 clients");
    let grown = status_kib(daemon.pid(), "VmSize").saturating_sub(mapped);
    // Memory of a guest that is not unmapped would be 16 MiB each time; a thread's first allocation
    // takes 64 MiB of addresses.
    assert!(
        grown < 256 << 10,
        "{grown} KiB of address space more after 300 clients"
    );
    daemon.end();
}

#[test]
fn idle_disk_uses_no_cpu() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    for _ in 0..2 {
        std::thread::sleep(std::time::Duration::from_millis(50));
        let before = ticks(daemon.pid());
        std::thread::sleep(std::time::Duration::from_millis(700));
        // 70 ticks would be all of the time.
        let used = ticks(daemon.pid()) - before;
        assert!(used < 20, "{used} ticks");
    }
    drop(host);
    daemon.end();
}

#[test]
fn guest_cannot_fill_log() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::attach(&test_dir.socket());
    let started = std::time::Instant::now();
    for round in 0..400u32 {
        // Enabled well, shut down, reset as a subsystem; then with an admin queue that is nowhere.
        host.enable();
        host.write_register(0x14, &(0x0046_0001u32 | 1 << 14).to_le_bytes());
        host.write_register(0x20, &u32::from_be_bytes(*b"NVMe").to_le_bytes());
        host.write_register(0x14, &0u32.to_le_bytes());
        host.write_register(0x28, &0xdead_0000_0000u64.to_le_bytes());
        host.write_register(0x14, &0x0046_0001u32.to_le_bytes());
        host.write_register(0x1000, &round.to_le_bytes());
    }
    drop(host);
    // Of each of six kinds ten lines, then one in ten seconds; and those of the program itself.
    let allowed = 90 + started.elapsed().as_secs() as usize;
    let ended = daemon.end();
    let lines = ended.log.len();
    assert!(
        lines < allowed,
        "{lines} lines, {:#?}",
        &ended.log[lines - 30..]
    );
}

/// Each kind of log line that a guest can cause has a burst, and then one line in ten seconds.
#[test]
fn guest_cannot_fill_log_by_erasing() {
    const ROUNDS: usize = 100;
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let started = std::time::Instant::now();
    for _ in 0..ROUNDS {
        let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
        assert_eq!(
            host.run(0, format).status().without_flags(),
            Status::SUCCESS
        );
    }
    let mut sanitized = 0;
    while sanitized < ROUNDS {
        let mut sanitize = Command::new(AdminOpcode::SANITIZE.0, 0, 0);
        // Block Erase.
        sanitize.cdw10 = 2.into();
        match host.run(0, sanitize).status().without_flags() {
            Status::SUCCESS => sanitized += 1,
            // The one before goes on.
            Status::SANITIZE_IN_PROGRESS => {}
            other => panic!("{other}"),
        }
    }
    drop(host);
    ensure_few(&daemon.end().log, started, &["erasing", "erased"]);
}

/// Checks that the log has some lines of each kind, and no more than a limit allows.
pub fn ensure_few(log: &[String], started: std::time::Instant, kinds: &[&str]) {
    let allowed = 12 + started.elapsed().as_secs() as usize / 10;
    for kind in kinds {
        let lines = log.iter().filter(|line| line.contains(kind)).count();
        assert!((1..=allowed).contains(&lines), "{lines} lines: {kind}");
    }
}
