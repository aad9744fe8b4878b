//! The controller memory buffer: by message and mapped, and its end with its client and with its
//! process.

use dma::Memory;
use nvme::regs::{self, Cap, Cmbloc, Cmbmsc, Cmbsz};
use nvme::{NvmOpcode, Status};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, ftruncate};
use std::os::fd::AsFd;

use crate::common::*;
use crate::keeper::{kill_serving, start};

const SIZE: usize = 2 << 20;
/// Where commands find it.
const BASE: u64 = 0x80_0000_0000;
/// Region of the buffer.
const BAR2: u32 = 2;

/// Has commands find it, as Linux does; its mapping, and the number of its file.
fn map(host: &mut Host) -> (Memory, u64) {
    let mut cap = [0; 8];
    host.client.region_read(BAR0, regs::CAP, &mut cap).unwrap();
    assert!(Cap::from_bits(u64::from_le_bytes(cap)).cmbs());
    host.write_register(regs::CMBMSC, &1u32.to_le_bytes());
    let size = Cmbsz::from_bits(host.read32(regs::CMBSZ));
    assert_eq!(size.bytes(), SIZE as u64);
    let location = Cmbloc::from_bits(host.read32(regs::CMBLOC));
    assert_eq!((location.bir(), location.ofst()), (2, 0));
    let on = Cmbmsc::new()
        .with_cre(true)
        .with_cmse(true)
        .with_cba(BASE >> 12);
    let on = on.into_bits().to_le_bytes();
    host.write_register(regs::CMBMSC + 4, &on[4..]);
    host.write_register(regs::CMBMSC, &on[..4]);
    assert_eq!(host.read32(regs::CMBSTS), 0);
    let region = host.client.region_info(BAR2).unwrap();
    assert_eq!(
        (region.size, region.read, region.write),
        (SIZE as u64, true, true)
    );
    let mapping = region.mmap.expect("all of it can be mapped");
    assert_eq!((mapping.offset, mapping.areas.len()), (0, 0));
    // The seals prevent the client from shrinking the memory under the server.
    let seals = fcntl_get_seals(&mapping.fd).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    assert!(ftruncate(&mapping.fd, 0).is_err());
    let file = fstat(mapping.fd.as_fd()).unwrap().st_ino;
    (
        Memory::from_fd(mapping.fd, SIZE as u64, true).unwrap(),
        file,
    )
}

/// Reads or writes 12 KiB at `data` in the buffer, by a list at its beginning.
fn transfer(host: &mut Host, buffer: &Memory, opcode: NvmOpcode, lba: u64, data: u64) -> Status {
    let entries = [data + 4096, data + 8192].map(|at| (BASE + at).to_le_bytes());
    buffer.write(0, &entries.concat()).unwrap();
    let mut command = host.transfer(opcode, 1, lba, 12 << 10, 4 << 20);
    command.set_prps(BASE + data, BASE);
    host.run(1, command).status()
}

#[test]
fn cmb_is_accessible_by_messages_and_mapping() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://8M", "--cmb-size", "2M"]);
    let mut host = Host::up(&test_dir.socket());
    // The BAR has the buffer's size, as 64-bit prefetchable memory.
    host.client.region_write(CONFIG, 0x18, &[0xff; 8]).unwrap();
    let mut bar = [0; 8];
    host.client.region_read(CONFIG, 0x18, &mut bar).unwrap();
    assert_eq!(u64::from_le_bytes(bar), !(SIZE as u64 - 1) | 0b1100);
    let (buffer, _) = map(&mut host);
    let bytes = pattern(1, 12 << 10);
    host.client.region_write(BAR2, 0x10_000, &bytes).unwrap();
    assert_eq!(
        transfer(&mut host, &buffer, NvmOpcode::WRITE, 8, 0x10_000),
        Status::SUCCESS
    );
    assert!(host.read(1, 8, bytes.len()) == bytes);
    assert_eq!(
        transfer(&mut host, &buffer, NvmOpcode::READ, 8, 0x20_000),
        Status::SUCCESS
    );
    let mut got = vec![0; bytes.len()];
    buffer.read(0x20_000, &mut got).unwrap();
    assert!(got == bytes);
    host.client.region_read(BAR2, 0x20_000, &mut got).unwrap();
    assert!(got == bytes);
    // The buffer ends with the region.
    assert!(
        host.client
            .region_write(BAR2, SIZE as u64 - 1, &[0; 2])
            .is_err()
    );
    assert!(
        host.client
            .region_read(BAR2, SIZE as u64, &mut got[..1])
            .is_err()
    );
    let last = SIZE as u64 - 4096;
    let crossing = transfer(&mut host, &buffer, NvmOpcode::READ, 8, last);
    // No memory follows the buffer.
    assert_eq!(crossing.without_flags(), Status::DATA_TRANSFER_ERROR);
    drop(host);
    drop(daemon.end());
}

#[test]
fn cmb_of_next_client_is_new_file() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://8M", "--cmb-size", "2M"]);
    let mut host = Host::up(&test_dir.socket());
    let (before, file) = map(&mut host);
    before.write(0x1000, b"secret").unwrap();
    drop(host);
    let mut host = Host::up(&test_dir.socket());
    assert_eq!(host.read32(regs::CMBMSC), 0);
    let (now, next) = map(&mut host);
    assert_ne!(file, next);
    let mut got = [1; 6];
    now.read(0x1000, &mut got).unwrap();
    assert_eq!(got, [0; 6]);
    // The server frees the pages that it has written, so that nobody collects its memory.
    eventually("the old pages have gone", || {
        before.read(0x1000, &mut got).unwrap();
        got == [0; 6]
    });
    // A disconnected client can write only to its own buffer.
    before.write(0x1000, b"poison").unwrap();
    host.client.region_read(BAR2, 0x1000, &mut got).unwrap();
    assert_eq!(got, [0; 6]);
    drop(host);
    drop(daemon.end());
}

#[test]
fn disk_without_cmb_option_has_no_cmb() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://8M"]);
    let mut host = Host::up(&test_dir.socket());
    let region = host.client.region_info(BAR2).unwrap();
    assert_eq!((region.size, region.mmap.is_none()), (0, true));
    assert!(host.client.region_read(BAR2, 0, &mut [0]).is_err());
    host.client.region_write(CONFIG, 0x18, &[0xff; 8]).unwrap();
    let mut bar = [1; 8];
    host.client.region_read(CONFIG, 0x18, &mut bar).unwrap();
    assert_eq!(bar, [0; 8]);
    drop(host);
    drop(daemon.end());
}

/// A client keeps its mapping while the process that serves it is another one each time.
#[test]
fn cmb_survives_process() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let args = [
        "serve",
        "--socket",
        &socket,
        "--keeper",
        "process",
        "mem://8M",
        "--cmb-size",
        "2M",
    ];
    let daemon = start(&test_dir, &args);
    for client in 0..2u64 {
        let mut host = Host::up(&test_dir.socket());
        let (buffer, file) = map(&mut host);
        for round in 0..3 {
            let bytes = pattern(10 * client + round, 12 << 10);
            buffer.write(0x10_000, &bytes).unwrap();
            kill_serving(&daemon);
            let lba = 24 * round;
            let written = transfer(&mut host, &buffer, NvmOpcode::WRITE, lba, 0x10_000);
            assert_eq!(written, Status::SUCCESS, "client {client}, round {round}");
            kill_serving(&daemon);
            assert!(host.read(1, lba, bytes.len()) == bytes);
            // Asked again, it is the same file.
            let region = host.client.region_info(BAR2).unwrap();
            let mapping = region.mmap.unwrap();
            assert_eq!(fstat(&mapping.fd).unwrap().st_ino, file);
        }
    }
    let ended = daemon.end();
    let is_error = |line: &&String| line.contains("ERROR");
    assert_eq!(ended.log.iter().find(is_error), None);
}
