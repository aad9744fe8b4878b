//! Copy: what arrives, and what is refused.

mod across;
mod by_file;

use crate::common::*;
use nvme::cmd::io::CopyRange;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use proptest::prelude::*;
use std::sync::Arc;
use volume::{Effect, Fault, FileOptions, FileVolume, IoErrorKind, MemVolume, OpKind, Volume};
use zerocopy::IntoBytes;

const BACK: u64 = HIGH + (6 << 20);
const LIST: u64 = HIGH + (12 << 20);
const MIB: u64 = 1 << 20;

/// A command that copies ranges (first block, blocks) one after the other to a block.
fn copy(h: &Host, to: u64, ranges: &[(u64, u32)]) -> Command {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|(slba, blocks)| (0, *slba, *blocks))
        .collect();
    copy_from(h, to, &ranges)
}

/// The same of ranges with the namespace of each.
fn copy_from(h: &Host, to: u64, ranges: &[(u32, u64, u32)]) -> Command {
    for (at, (nsid, slba, blocks)) in (0..).zip(ranges) {
        let range = CopyRange {
            snsid: (*nsid).into(),
            slba: (*slba).into(),
            nlb_z: ((blocks - 1) as u16).into(),
            ..CopyRange::default()
        };
        h.write(PAGE + at * 32, range.as_bytes());
    }
    let mut command = Command::new(NvmOpcode::COPY.0, 0, 1);
    command.set_prps(PAGE, 0);
    command.set_slba(to);
    command.cdw12 = (ranges.len() as u32 - 1).into();
    command
}

/// Writes a disk of 512-byte blocks from its beginning.
fn fill(h: &mut Host, bytes: &[u8]) {
    fill_namespace(h, 1, bytes);
}

fn fill_namespace(h: &mut Host, nsid: u32, bytes: &[u8]) {
    for (at, piece) in (0..).zip(bytes.chunks(1 << 20)) {
        h.write(DATA, piece);
        let blocks = (piece.len() / 512) as u32;
        let mut write = h.rw(NvmOpcode::WRITE, nsid, at * 2048, blocks, 0);
        h.prps(&mut write, DATA, piece.len() as u64, LIST);
        assert_eq!(h.io(write), Status::SUCCESS);
    }
}

/// What is on it.
fn whole(h: &mut Host, len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for at in 0..(len >> 20) as u64 {
        let mut read = h.rw(NvmOpcode::READ, 1, at * 2048, 2048, 0);
        h.prps(&mut read, BACK, MIB, LIST);
        assert_eq!(h.io(read), Status::SUCCESS);
        bytes.extend(h.read(BACK, 1 << 20));
    }
    bytes
}

fn file() -> (tempfile::TempDir, Arc<dyn Volume>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(8 * MIB).unwrap();
    let volume = FileVolume::open(&path, FileOptions::default()).unwrap();
    (dir, Arc::new(volume))
}

#[test]
fn identify_reports_copy_limits() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(2, mem(MIB), 4096)]);
    for (nsid, range, all) in [(1, 0xffff, 1 << 17), (2, 1 << 14, 1 << 14)] {
        let page = h.identify(0, nsid, 0).1;
        let word = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
        assert_eq!((word(74), page[80]), (range, 127));
        assert_eq!(u32::from(word(76)) | u32::from(word(78)) << 16, all);
    }
    let page = h.identify(1, 0, 0).1;
    assert_eq!(page[534], 15, "formats 0h to 3h");
    assert_eq!(page[521] & 1, 1, "ONCS");
}

#[test]
fn copied_ranges_are_concatenated() {
    let (_dir, file) = file();
    for volume in [mem(8 * MIB), file] {
        let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
        let mut disk = pattern(7, 8 << 20);
        fill(&mut h, &disk);
        // Of a block, of more than a piece, of the last block.
        let command = copy(&h, 8192, &[(3, 1), (100, 1500), (16383, 1), (0, 3)]);
        assert_eq!(h.io(command), Status::SUCCESS);
        let mut to = 8192 * 512;
        for (from, len) in [(3, 1), (100, 1500), (16383, 1), (0, 3)] {
            let range = from * 512..(from + len) * 512;
            disk.copy_within(range, to);
            to += len * 512;
        }
        assert!(whole(&mut h, 8 << 20) == disk);
    }
}

#[test]
fn copy_out_of_range_or_limit_changes_nothing() {
    let mut h = Host::ready_with(vec![ns(1, mem(8 * MIB), 512)]);
    let disk = pattern(9, 8 << 20);
    fill(&mut h, &disk);
    let blocks = 16384;
    for (to, ranges, status) in [
        (0, &[(blocks, 1)][..], Status::LBA_OUT_OF_RANGE),
        (0, &[(blocks - 1, 2)], Status::LBA_OUT_OF_RANGE),
        (0, &[(u64::MAX, 1)], Status::LBA_OUT_OF_RANGE),
        (blocks, &[(0, 1)], Status::LBA_OUT_OF_RANGE),
        (u64::MAX, &[(0, 1)], Status::LBA_OUT_OF_RANGE),
        (1 << 55, &[(0, 1)], Status::LBA_OUT_OF_RANGE),
        (blocks - 3, &[(0, 2), (4, 2)], Status::LBA_OUT_OF_RANGE),
        (0, &[(0, 1)], Status::OVERLAPPING_IO_RANGE),
        (8, &[(0, 9)], Status::OVERLAPPING_IO_RANGE),
        (8, &[(15, 1), (100, 8)], Status::OVERLAPPING_IO_RANGE),
        (0, &[(0, 0x1_0000)], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
    ] {
        let command = copy(&h, to, ranges);
        assert_eq!(plain(h.io(command)), status, "{to} {ranges:?}");
    }
    // One that touches is none that overlaps.
    let command = copy(&h, 16, &[(0, 8), (32, 8)]);
    let mut other = command;
    for (cdw12, status) in [
        (127 + 1, Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (255, Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (1 | 1 << 8, Status::INVALID_FORMAT),
        (1 | 15 << 8, Status::INVALID_FIELD),
    ] {
        other.cdw12 = cdw12.into();
        assert_eq!(plain(h.io(other)), status, "{cdw12:#x}");
    }
    other.cdw12 = 1.into();
    other.set_prps(LOW_SIZE, 0);
    assert_eq!(plain(h.io(other)), Status::DATA_TRANSFER_ERROR);
    assert!(whole(&mut h, 8 << 20) == disk);
    assert_eq!(h.io(command), Status::SUCCESS);
    // More than a command may copy, of ranges that may be.
    let mut h = Host::ready_with(vec![ns(
        1,
        Arc::new(MemVolume::new(256 * MIB).unwrap()),
        512,
    )]);
    let ranges = [(0, 0xffff), (0, 0xffff), (0, 3)];
    let command = copy(&h, 1 << 18, &ranges);
    assert_eq!(plain(h.io(command)), Status::COMMAND_SIZE_LIMIT_EXCEEDED);
    let command = copy(&h, 1 << 18, &[(0, 0xffff), (0, 0xffff), (0, 2)]);
    assert_eq!(h.io(command), Status::SUCCESS);
}

#[test]
fn copy_to_read_only_namespace_is_refused() {
    let volume = Arc::new(MemVolume::new(MIB).unwrap().read_only());
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    let command = copy(&h, 0, &[(8, 1)]);
    assert_eq!(plain(h.io(command)), Status::NAMESPACE_WRITE_PROTECTED);
}

/// With the number of the range that failed; those before have been copied.
#[test]
fn copy_error_reports_failed_range() {
    for (kind, error, status) in [
        (
            OpKind::Read,
            IoErrorKind::MediaRead,
            Status::UNRECOVERED_READ_ERROR,
        ),
        (
            OpKind::Write,
            IoErrorKind::NoSpace,
            Status::CAPACITY_EXCEEDED,
        ),
    ] {
        let (volume, faults) = faulty(8 * MIB);
        let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
        let mut disk = pattern(11, 8 << 20);
        fill(&mut h, &disk);
        faults.add(Fault::nth(kind, 3, Effect::Fail(error.into())));
        let command = copy(&h, 4096, &[(0, 1), (8, 1), (16, 1), (24, 1)]);
        h.submit(1, command);
        h.run();
        let done = h.reap(1).unwrap();
        assert_eq!((plain(done.status()), done.dw0.get()), (status, 2));
        disk.copy_within(0..512, 4096 * 512);
        disk.copy_within(8 * 512..9 * 512, 4097 * 512);
        assert!(whole(&mut h, 8 << 20) == disk);
        // All memory is free again.
        for _ in 0..100 {
            assert_eq!(h.io(command), Status::SUCCESS);
        }
    }
}

#[test]
fn copy_memory_is_bounded() {
    let (volume, faults) = faulty(8 * MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let command = copy(&h, 8192, &[(0, 4096)]);
    h.create_pair(2, 64);
    for at in 0..80 {
        h.submit(1 + at / 40, command);
    }
    h.run_held(&faults, 64);
    let mut refused = h.reap_all(1);
    refused.extend(h.reap_all(2));
    assert_eq!(refused.len(), 16);
    for done in refused {
        assert_eq!(done.status(), Status::COMMAND_INTERRUPTED, "may be retried");
    }
    faults.clear();
    faults.release();
    h.until(|h| h.c.in_flight() == 0);
    assert_eq!(h.reap_all(1).len() + h.reap_all(2).len(), 64);
}

/// While the volume has a piece; `budget.rs` has the rest.
#[test]
fn copy_is_aborted() {
    let (volume, faults) = faulty(128 * MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::nth(OpKind::Write, 3, Effect::Hold));
    let command = copy(&h, 1 << 17, &[(0, 0xffff)]);
    let cid = h.submit(1, command);
    h.run_held(&faults, 1);
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    h.submit(0, abort);
    h.run();
    let done = h.reap(1).unwrap();
    assert_eq!(plain(done.status()), Status::ABORT_REQUESTED);
    assert_eq!(h.reap(0).unwrap().dw0.get() & 1, 0, "it was aborted");
    let copied = h.rw(NvmOpcode::READ, 1, 1 << 17, 1, BACK);
    assert_eq!(h.io(copied), Status::SUCCESS);
}

#[test]
fn copy_is_ended_by_reset() {
    let (volume, faults) = faulty(8 * MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let command = copy(&h, 8192, &[(0, 4096)]);
    h.submit(1, command);
    h.run_held(&faults, 1);
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.enable();
    h.create_pair(1, 4);
    assert!(h.reap(1).is_none());
    assert_eq!(h.io(command), Status::SUCCESS);
}

/// Blocks of the random disks.
const SMALL: u64 = 4096;

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_copies_match_array(
        copies in prop::collection::vec(
            (0..SMALL + 8, prop::collection::vec((0..SMALL + 8, 1..900u32), 1..6)),
            1..30,
        )
    ) {
        let mut h = Host::ready_with(vec![ns(1, mem(SMALL * 512), 512)]);
        let mut disk = pattern(3, (SMALL * 512) as usize);
        fill(&mut h, &disk);
        for (to, ranges) in copies {
            let all: u64 = ranges.iter().map(|(_, blocks)| u64::from(*blocks)).sum();
            let inside = |(slba, blocks): &(u64, u32)| slba + u64::from(*blocks) <= SMALL;
            let meets = |(slba, blocks): &(u64, u32)| {
                *slba < to + all && to < slba + u64::from(*blocks)
            };
            let wanted = if !ranges.iter().all(inside) || to + all > SMALL {
                Status::LBA_OUT_OF_RANGE
            } else if ranges.iter().any(meets) {
                Status::OVERLAPPING_IO_RANGE
            } else {
                Status::SUCCESS
            };
            let command = copy(&h, to, &ranges);
            prop_assert_eq!(plain(h.io(command)), wanted);
            if wanted == Status::SUCCESS {
                let mut at = to as usize * 512;
                for (slba, blocks) in ranges {
                    let (from, len) = (slba as usize * 512, blocks as usize * 512);
                    disk.copy_within(from..from + len, at);
                    at += len;
                }
            }
        }
        prop_assert!(whole(&mut h, (SMALL * 512) as usize) == disk);
    }
}
