//! Bus Master Enable over a socket, as a VMM passes it on.

use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

use nvme::pci::command::{BUS_MASTER, MEMORY_SPACE};
use nvme::{NvmOpcode, Status};

use crate::common::*;

/// Where data of reads begins in guest memory.
const READS: u64 = 8 << 20;
const LEN: usize = 4096;
/// Time after which QEMU treats a missing answer as an error.
const QEMU_WAITS: Duration = Duration::from_secs(5);

fn memory(host: &Host) -> Vec<u8> {
    let mut bytes = vec![0; RAM_SIZE as usize];
    host.ram.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A kernel that starts another one (kexec) clears the bit and nothing else. Memory that the old
/// kernel's reads used belongs to the new one then.
#[test]
fn memory_is_free_after_bus_master_is_cleared() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    // A limit of one read in a second, so that most of these are in flight when the bit is cleared.
    let volume = "mem://4M?iops=1&burst=1ms";
    let daemon = Daemon::serve(&test_dir, &["--control", &control, volume]);
    let mut host = Host::up(&test_dir.socket());
    host.ram.write_all_at(&[0xee; 8 * LEN], READS).unwrap();
    for i in 0..8 {
        let at = READS + i * LEN as u64;
        let read = host.transfer(NvmOpcode::READ, 1, i * 8, LEN, at);
        host.submit(1, read);
    }
    let asked = Instant::now();
    host.set_command(MEMORY_SPACE);
    assert!(asked.elapsed() < QEMU_WAITS, "{:?}", asked.elapsed());
    let before = memory(&host);
    // Whatever waits for its time at the volume has it now.
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["limits", "--control", &control, "--all", "--iops", "0"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let read = host.transfer(NvmOpcode::READ, 1, 0, LEN, READS + (1 << 20));
    host.submit(1, read);
    let ours = memory(&host);
    for _ in 0..1000 {
        // Rounds of the worker's go by.
        host.read32(0x1c);
    }
    assert!(memory(&host) == ours, "memory was written");
    assert!(before[READS as usize..] == ours[READS as usize..]);
    host.set_command(MEMORY_SPACE | BUS_MASTER);
    let (mut good, mut again) = (0, 0);
    for _ in 0..9 {
        match host.completion(1).status() {
            Status::SUCCESS => good += 1,
            status if status.is(Status::COMMAND_INTERRUPTED) => again += 1,
            status => panic!("{status}"),
        }
    }
    assert!(good >= 1 && again >= 1, "{good} and {again}");
    drop(host);
    daemon.end();
}

/// A client that does nothing else, while it has commands in flight.
#[test]
fn daemon_survives_bus_master_toggled_under_load() {
    // With registers, and with shadow doorbells: half of them each.
    for shadow in [false, true] {
        let test_dir = TestDir::new();
        let daemon = Daemon::serve(&test_dir, &["--workers", "2", "mem://16M", "mem://16M"]);
        let mut host = Host::up(&test_dir.socket());
        if shadow {
            host.use_shadow_doorbells();
        }
        let mut in_flight = 0;
        let mut done = 0u64;
        for toggle in 0..5000u64 {
            while in_flight < 32 {
                let (nsid, at) = (1 + toggle as u32 % 2, toggle % 64 * LEN as u64);
                let read = host.transfer(NvmOpcode::READ, nsid, toggle % 64, LEN, READS + at);
                host.submit(1, read);
                in_flight += 1;
            }
            let on = if toggle % 2 == 0 { 0 } else { BUS_MASTER };
            host.set_command(MEMORY_SPACE | on);
            while let Some(completion) = host.try_completion(1) {
                assert_eq!(completion.status(), Status::SUCCESS);
                in_flight -= 1;
                done += 1;
            }
        }
        host.set_command(MEMORY_SPACE | BUS_MASTER);
        for _ in 0..in_flight {
            assert_eq!(host.completion(1).status(), Status::SUCCESS);
        }
        assert!(done > 1000, "{done} commands");
        host.write(1, 0, &pattern(1, LEN));
        assert!(host.read(1, 0, LEN) == pattern(1, LEN));
        drop(host);
        daemon.end();
    }
}
