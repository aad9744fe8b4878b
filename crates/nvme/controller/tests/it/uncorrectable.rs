//! Write Uncorrectable and what tells of it: blocks that cannot be read until they are written, Get
//! LBA Status, the LBA Status Information log page and its alert.

mod histories;
mod says;
mod shared;
use crate::reservations::world;

use crate::common::*;
use controller::ControllerConfig;
use nvme::cmd::io::CopyRange;
use nvme::log::{ErrorInformation, SelfTestCode, SelfTestLog, SelfTestOutcome, Smart};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use volume::{Effect, Fault, IoErrorKind, MemVolume, OpKind};
use zerocopy::{FromBytes, IntoBytes};

const UNREADABLE: Status = Status::UNRECOVERED_READ_ERROR;
const MIB: u64 = 1 << 20;

/// A command on blocks, its data in one run at `DATA`.
fn on(h: &Host, opcode: NvmOpcode, nsid: u32, slba: u64, blocks: u32) -> Command {
    let mut command = h.rw(opcode, nsid, slba, blocks, DATA);
    h.prps(&mut command, DATA, u64::from(blocks) * 512, PAGE);
    command
}

/// Ends the process; time passes.
fn die(h: &mut Host) {
    h.die();
    h.now = h.now.max(Instant::now());
}

fn mark(h: &mut Host, slba: u64, blocks: u32) -> Status {
    let command = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 1, slba, blocks, 0);
    h.io(command)
}

fn write(h: &mut Host, slba: u64, blocks: u32) -> Status {
    h.write(DATA, &vec![0x5a; blocks as usize * 512]);
    let command = on(h, NvmOpcode::WRITE, 1, slba, blocks);
    h.io(command)
}

fn read(h: &mut Host, slba: u64, blocks: u32) -> Status {
    let command = on(h, NvmOpcode::READ, 1, slba, blocks);
    h.io(command)
}

/// Which of the blocks up to one cannot be read.
fn unreadable(h: &mut Host, blocks: u64) -> Vec<u64> {
    let all = (0..blocks).filter(|slba| match read(h, *slba, 1) {
        Status::SUCCESS => false,
        status => {
            assert_eq!(status, UNREADABLE, "{slba}");
            true
        }
    });
    all.collect()
}

fn deallocate(h: &mut Host, slba: u64, blocks: u32) -> Status {
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&blocks.to_le_bytes());
    range[8..].copy_from_slice(&slba.to_le_bytes());
    h.write(DATA, &range);
    let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    command.set_prps(DATA, 0);
    command.cdw11 = 4.into();
    h.io(command)
}

fn copy(h: &mut Host, to: u64, ranges: &[(u64, u32)]) -> (Status, u32) {
    for (at, (slba, blocks)) in (0..).zip(ranges) {
        let range = CopyRange {
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
    let done = h.command(1, command);
    (done.status(), done.dw0.get())
}

#[test]
fn marked_blocks_fail_every_read() {
    let mut h = Host::ready();
    assert_eq!(write(&mut h, 0, 64), Status::SUCCESS);
    assert_eq!(mark(&mut h, 10, 3), Status::SUCCESS);
    assert_eq!(unreadable(&mut h, 64), [10, 11, 12]);
    for (slba, blocks) in [(10, 1), (12, 1), (0, 64), (9, 2), (12, 2), (11, 20)] {
        for opcode in [NvmOpcode::READ, NvmOpcode::COMPARE, NvmOpcode::VERIFY] {
            let command = on(&h, opcode, 1, slba, blocks);
            // It may be tried again: DNR is clear.
            assert_eq!(h.io(command), UNREADABLE, "{opcode} {slba} {blocks}");
        }
    }
    for (slba, blocks) in [(0, 10), (13, 51)] {
        let verify = on(&h, NvmOpcode::VERIFY, 1, slba, blocks);
        assert_eq!(h.io(verify), Status::SUCCESS);
        assert_eq!(read(&mut h, slba, blocks), Status::SUCCESS);
    }
    // The second range of a Copy has one; the first was copied.
    assert_eq!(mark(&mut h, 100, 1), Status::SUCCESS);
    assert_eq!(copy(&mut h, 96, &[(0, 8), (8, 4)]), (UNREADABLE, 1));
    assert_eq!(read(&mut h, 96, 8), Status::SUCCESS);
    let log = h.log(1, 64, 0, false).1;
    let entry = ErrorInformation::read_from_bytes(&log).unwrap();
    assert_eq!((entry.lba.get(), entry.nsid.get()), (10, 1));
}

#[test]
fn written_blocks_are_readable_again() {
    let mut h = Host::ready();
    assert_eq!(write(&mut h, 0, 64), Status::SUCCESS);
    assert_eq!(mark(&mut h, 8, 40), Status::SUCCESS);
    assert_eq!(write(&mut h, 7, 2), Status::SUCCESS);
    let zeroes = on(&h, NvmOpcode::WRITE_ZEROES, 1, 20, 2);
    assert_eq!(h.io(zeroes), Status::SUCCESS);
    assert_eq!(copy(&mut h, 30, &[(0, 1), (2, 1)]).0, Status::SUCCESS);
    // What is read of deallocated blocks is known.
    assert_eq!(deallocate(&mut h, 47, 100), Status::SUCCESS);
    let rest = unreadable(&mut h, 64);
    let wanted: Vec<u64> = (9..47).filter(|b| ![20, 21, 30, 31].contains(b)).collect();
    assert_eq!(rest, wanted);
    assert_eq!(read(&mut h, 8, 1), Status::SUCCESS);
    assert_eq!(h.read(DATA, 512), [0x5a; 512]);
    assert_eq!(read(&mut h, 21, 1), Status::SUCCESS);
    assert_eq!(h.read(DATA, 512), [0; 512]);
    // Durable writes, too, and of more than a page.
    let mut durable = on(&h, NvmOpcode::WRITE, 1, 9, 38);
    durable.cdw12 = (durable.cdw12.get() | 1 << 30).into();
    assert_eq!(h.io(durable), Status::SUCCESS);
    assert_eq!(unreadable(&mut h, 64), Vec::<u64>::new());
}

#[test]
fn deallocated_blocks_stay_marked_without_zeroes() {
    // It may leave what was there where it deallocates.
    let forgetful = described(mem(MIB), |info| volume::Info {
        zeroes_after_deallocate: false,
        ..info
    });
    let mut h = Host::ready_with(vec![ns(1, forgetful, 512)]);
    assert_eq!(mark(&mut h, 8, 4), Status::SUCCESS);
    assert_eq!(deallocate(&mut h, 0, 32), Status::SUCCESS);
    assert_eq!(unreadable(&mut h, 16), [8, 9, 10, 11]);
    // One that cannot deallocate does nothing.
    let (volume, faults) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    assert_eq!(mark(&mut h, 8, 4), Status::SUCCESS);
    let error = IoErrorKind::Unsupported.into();
    faults.add(Fault::always(OpKind::Deallocate, Effect::Fail(error)));
    assert_eq!(deallocate(&mut h, 0, 32), Status::SUCCESS);
    assert_eq!(unreadable(&mut h, 16), [8, 9, 10, 11]);
}

#[test]
fn failed_write_clears_no_mark() {
    let (volume, faults) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    assert_eq!(mark(&mut h, 8, 4), Status::SUCCESS);
    let error = IoErrorKind::MediaWrite.into();
    faults.add(Fault::nth(OpKind::Write, 1, Effect::Fail(error)));
    assert_eq!(write(&mut h, 9, 2), Status::WRITE_FAULT);
    faults.add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Fail(error)));
    let zeroes = on(&h, NvmOpcode::WRITE_ZEROES, 1, 8, 4);
    assert_eq!(h.io(zeroes), Status::WRITE_FAULT);
    // Of a Copy, the ranges before the one that failed were written.
    faults.add(Fault::nth(OpKind::Write, 2, Effect::Fail(error)));
    let done = copy(&mut h, 8, &[(100, 1), (102, 1)]);
    assert_eq!(done, (Status::WRITE_FAULT, 1));
    assert_eq!(unreadable(&mut h, 16), [9, 10, 11]);
    assert_eq!(write(&mut h, 9, 2), Status::SUCCESS);
    assert_eq!(unreadable(&mut h, 16), [11]);
}

/// Both orders are right, and the write has one for all of its blocks.
#[test]
fn write_in_flight_is_ordered_with_mark() {
    let (volume, faults) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    for watched in [false, true] {
        if watched {
            assert_eq!(mark(&mut h, 1000, 1), Status::SUCCESS);
        }
        faults.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
        h.write(DATA, &[0x5a; 8 * 512]);
        let begun = on(&h, NvmOpcode::WRITE, 1, 8, 8);
        h.submit(1, begun);
        h.run_held(&faults, 1);
        assert_eq!(mark(&mut h, 10, 2), Status::SUCCESS);
        assert_eq!(read(&mut h, 11, 1), UNREADABLE);
        faults.release();
        h.run();
        assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
        let left = unreadable(&mut h, 20);
        assert_eq!(left, if watched { vec![] } else { vec![10, 11] });
        // A command that begins now is ordered after it.
        assert_eq!(write(&mut h, 8, 8), Status::SUCCESS);
        assert!(unreadable(&mut h, 20).is_empty());
    }
}

#[test]
fn invalid_write_uncorrectable_is_refused() {
    let read_only = Arc::new(MemVolume::new(MIB).unwrap().read_only());
    let mut h = Host::ready_with(vec![
        ns(1, mem(MIB), 512),
        ns(2, read_only, 512),
        ns(3, mem(16 * MIB), 512),
    ]);
    for (nsid, slba, blocks, status) in [
        (1, 2048, 1, Status::LBA_OUT_OF_RANGE),
        (1, 2047, 2, Status::LBA_OUT_OF_RANGE),
        (1, u64::MAX, 1, Status::LBA_OUT_OF_RANGE),
        (1, u64::MAX, 0x1_0000, Status::LBA_OUT_OF_RANGE),
        (2, 0, 1, Status::NAMESPACE_WRITE_PROTECTED),
        (4, 0, 1, Status::INVALID_NAMESPACE_OR_FORMAT),
        (u32::MAX, 0, 1, Status::INVALID_NAMESPACE_OR_FORMAT),
        (0, 0, 1, Status::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        let command = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, nsid, slba, blocks, 0);
        let done = h.io(command);
        assert_eq!((plain(done), done.dnr()), (status, true), "{nsid} {slba}");
    }
    let command = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 3, 0, 32768, 0);
    assert_eq!(h.io(command), Status::SUCCESS);
    assert!(unreadable(&mut h, 64).is_empty(), "of namespace 1");
}

/// Number of ranges that Write Uncorrectable may use, and number of ranges with those of writes.
const MOST: [u64; 2] = [4096, 8192];

/// A guest that marks every third block takes a bounded amount of memory.
#[test]
fn marked_ranges_of_controller_are_bounded() {
    let mut h = Host::ready_with(vec![ns(1, mem(16 * MIB), 512), ns(2, mem(MIB), 512)]);
    for at in 0..MOST[0] {
        assert_eq!(mark(&mut h, at * 3, 1), Status::SUCCESS, "{at}");
    }
    let more = MOST[0] * 3;
    assert_eq!(mark(&mut h, more, 1), Status::INTERNAL_ERROR);
    let other = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 2, 0, 1, 0);
    assert_eq!(h.io(other), Status::INTERNAL_ERROR, "of all namespaces");
    // Ranges that merge with others need no room.
    assert_eq!(mark(&mut h, 9, 1), Status::SUCCESS);
    assert_eq!(mark(&mut h, more - 2, 1), Status::SUCCESS);
    assert_eq!(read(&mut h, more, 1), Status::SUCCESS);
    die(&mut h);
    assert_eq!(read(&mut h, more - 3, 2), UNREADABLE);
    assert_eq!(read(&mut h, more - 1, 1), Status::SUCCESS);
    assert_eq!(mark(&mut h, more, 1), Status::INTERNAL_ERROR);
    assert_eq!(write(&mut h, 30, 1), Status::SUCCESS);
    assert_eq!(mark(&mut h, more, 1), Status::SUCCESS, "there is room");
    // One range instead of thousands.
    assert_eq!(mark(&mut h, 0, 32768), Status::SUCCESS);
    assert_eq!(h.io(other), Status::SUCCESS);
    assert_eq!(says::status(&mut h, 0, 0, 4096).0, [(0, 32768)]);
}

/// A whole namespace is one range. Writes split it, until there are as many ranges as there may be;
/// then a write fails rather than unmark blocks that were not written.
#[test]
fn marked_namespace_is_split_by_writes() {
    const BLOCKS: u64 = 131_072;
    let mut h = Host::ready_with(vec![ns(1, mem(BLOCKS * 512), 512)]);
    for slba in [0, 65_536] {
        assert_eq!(mark(&mut h, slba, 65_536), Status::SUCCESS);
    }
    assert_eq!(says::status(&mut h, 0, 0, 4096), (vec![(0, 131_072)], true));
    for slba in [0, 65_535, 65_536, BLOCKS - 1] {
        assert_eq!(read(&mut h, slba, 1), UNREADABLE);
    }
    die(&mut h);
    assert_eq!(says::status(&mut h, 0, 0, 4096), (vec![(0, 131_072)], true));
    let split = |at: u64| at * 4 + 1;
    for at in 0..MOST[1] - 1 {
        assert_eq!(write(&mut h, split(at), 1), Status::SUCCESS, "{at}");
    }
    let full = split(MOST[1] - 1);
    for round in 0..2 {
        assert_eq!(write(&mut h, full, 1), Status::INTERNAL_ERROR);
        let zeroes = on(&h, NvmOpcode::WRITE_ZEROES, 1, full, 1);
        assert_eq!(h.io(zeroes), Status::INTERNAL_ERROR);
        assert_eq!(deallocate(&mut h, full, 1), Status::INTERNAL_ERROR);
        let copied = copy(&mut h, full, &[(1, 1)]).0;
        assert_eq!(copied, Status::INTERNAL_ERROR);
        for slba in [full - 1, full, full + 1, BLOCKS - 1, 0, 2] {
            assert_eq!(read(&mut h, slba, 1), UNREADABLE, "{round} {slba}");
        }
        assert_eq!(read(&mut h, split(MOST[1] - 2), 1), Status::SUCCESS);
        assert_eq!(mark(&mut h, 2, 1), Status::SUCCESS, "it is marked");
        die(&mut h);
    }
    // Writes that split nothing need no room, and make some.
    assert_eq!(write(&mut h, BLOCKS - 1, 1), Status::SUCCESS);
    assert_eq!(write(&mut h, full, 1), Status::INTERNAL_ERROR);
    assert_eq!(write(&mut h, 0, 1), Status::SUCCESS);
    assert_eq!(write(&mut h, full, 1), Status::SUCCESS);
    die(&mut h);
    assert_eq!(read(&mut h, full, 1), Status::SUCCESS);
    assert_eq!(read(&mut h, full + 1, 1), UNREADABLE);
    let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    assert_eq!(h.admin(format).status(), Status::SUCCESS);
    for slba in [2, full + 1] {
        assert_eq!(read(&mut h, slba, 1), Status::SUCCESS);
    }
    die(&mut h);
    assert_eq!(says::status(&mut h, 0, 0, 4096), (vec![], true));
}

/// Marks two blocks around each of `count` blocks that are read, so that there are as many ranges.
fn mark_ranges(h: &mut Host, count: u64) {
    for at in 0..count {
        assert_eq!(mark(h, at * 4, 2), Status::SUCCESS, "{at}");
    }
}

/// With more ranges than the control state has room for, a process may die between the two commits.
#[test]
fn many_marked_ranges_survive_death_at_every_point() {
    let mut h = Host::ready_with(vec![ns(1, mem(16 * MIB), 512)]);
    mark_ranges(&mut h, 2050);
    for point in ["controller.mark.saved", "state-memory.control.written"] {
        for (passed, at) in (1..5).zip(3000..) {
            crash::arm(point, passed);
            assert_eq!(mark(&mut h, at * 4, 1), Status::SUCCESS);
            crash::disarm();
            assert_eq!(read(&mut h, at * 4, 1), UNREADABLE, "{point} {passed}");
            crash::arm(point, passed);
            assert_eq!(write(&mut h, at * 4, 1), Status::SUCCESS);
            crash::disarm();
            assert_eq!(read(&mut h, at * 4, 1), Status::SUCCESS, "{point} {passed}");
        }
        let died = h.crashes.get(point).copied();
        assert!(died >= Some(1), "{point} is never passed");
    }
    // Back in the control state, and again in their own section.
    for count in [3, 2060] {
        assert_eq!(deallocate(&mut h, 0, 20_000), Status::SUCCESS);
        mark_ranges(&mut h, count);
        die(&mut h);
        let last = count * 4 - 3;
        assert_eq!(read(&mut h, last, 1), UNREADABLE);
        assert_eq!(read(&mut h, last + 1, 1), Status::SUCCESS);
        assert_eq!(read(&mut h, last + 3, 1), Status::SUCCESS);
    }
}

/// A state memory of an older version has no section of marks, so that fewer ranges may be marked.
#[test]
fn state_memory_without_section_of_marks_keeps_fewer_ranges() {
    let mut h = Host::ready_with(vec![ns(1, mem(16 * MIB), 512)]);
    mark_ranges(&mut h, 500);
    // The header's third word is the number of its sections, of which the last has the marks.
    let file = File::from(h.state.fd().try_clone_to_owned().unwrap());
    file.write_all_at(&7u64.to_le_bytes(), 16).unwrap();
    die(&mut h);
    assert_eq!(read(&mut h, 499 * 4, 1), UNREADABLE);
    for at in 500..512 {
        assert_eq!(mark(&mut h, at * 4, 2), Status::SUCCESS, "{at}");
    }
    assert_eq!(mark(&mut h, 4000, 1), Status::INTERNAL_ERROR);
    assert_eq!(mark(&mut h, 10_000, 1), Status::INTERNAL_ERROR);
    assert_eq!(mark(&mut h, 0, 10_000), Status::SUCCESS);
    for at in 0..1023 {
        assert_eq!(write(&mut h, at * 2 + 1, 1), Status::SUCCESS, "{at}");
    }
    assert_eq!(write(&mut h, 5000, 1), Status::INTERNAL_ERROR);
    h.log(nvme::log::Lid::LBA_STATUS.0, 4096, 0, true);
    die(&mut h);
    assert!(h.c.survives());
    assert_eq!(unreadable(&mut h, 6), [0, 2, 4]);
}

/// Reads and writes of a namespace without marks take the short way, which needs no event; so they
/// do after the last mark is cleared.
#[test]
fn namespace_without_marks_uses_fast_path() {
    let mut h = Host::ready();
    // How many of eight writes and reads took the general way.
    let general = |h: &mut Host| {
        crash::disarm();
        for slba in 100..108 {
            assert_eq!(write(h, slba, 1), Status::SUCCESS);
            assert_eq!(read(h, slba, 1), Status::SUCCESS);
        }
        let passed = crash::passed();
        let count = |name| {
            passed
                .iter()
                .filter(|p| *p.0 == name)
                .map(|p| p.1)
                .sum::<u64>()
        };
        count("controller.submit.submitted")
    };
    assert_eq!(general(&mut h), 0);
    assert_eq!(mark(&mut h, 8, 2), Status::SUCCESS);
    assert_eq!(general(&mut h), 16);
    assert_eq!(write(&mut h, 8, 1), Status::SUCCESS);
    assert_eq!(general(&mut h), 16);
    assert_eq!(write(&mut h, 9, 1), Status::SUCCESS);
    assert_eq!(general(&mut h), 0);
    // So it is in the next process.
    assert_eq!(mark(&mut h, 8, 2), Status::SUCCESS);
    die(&mut h);
    assert_eq!(general(&mut h), 16);
    assert_eq!(deallocate(&mut h, 0, 100), Status::SUCCESS);
    die(&mut h);
    assert_eq!(general(&mut h), 0);
}

/// A process that dies on the way leaves a block as the host has seen it.
#[test]
fn completed_marks_survive_death_at_every_point() {
    let mut h = Host::ready();
    for point in [
        "controller.mark.recorded",
        "controller.mark.marked",
        "controller.commit.before",
        "controller.commit.after",
        "controller.mark.committed",
    ] {
        for (passed, slba) in (1..4).zip(20..) {
            crash::disarm();
            crash::arm(point, passed);
            assert_eq!(mark(&mut h, slba, 1), Status::SUCCESS);
            crash::disarm();
            assert_eq!(read(&mut h, slba, 1), UNREADABLE, "{point} {passed}");
            crash::arm(point, passed);
            assert_eq!(write(&mut h, slba, 1), Status::SUCCESS);
            crash::disarm();
            assert_eq!(read(&mut h, slba, 1), Status::SUCCESS, "{point} {passed}");
        }
        let died = h.crashes.get(point).copied();
        assert!(died >= Some(1), "{point} is never passed");
    }
}

#[test]
fn format_and_sanitize_clear_marks() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(2, mem(MIB), 512)]);
    for (opcode, nsid, cdw10) in [
        (AdminOpcode::FORMAT_NVM, 1, 0),
        (AdminOpcode::SANITIZE, 0, 2),
    ] {
        for nsid in [1, 2] {
            let command = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, nsid, 8, 2, 0);
            assert_eq!(h.io(command), Status::SUCCESS);
        }
        let mut erase = Command::new(opcode.0, 0, nsid);
        erase.cdw10 = cdw10.into();
        assert_eq!(h.admin(erase).status(), Status::SUCCESS);
        // A sanitize operation continues after the command.
        h.until(|h| read(h, 9, 1) != Status::SANITIZE_IN_PROGRESS);
        assert_eq!(read(&mut h, 8, 2), Status::SUCCESS);
        let other = on(&h, NvmOpcode::READ, 2, 8, 2);
        let wanted = if nsid == 1 {
            UNREADABLE
        } else {
            Status::SUCCESS
        };
        assert_eq!(h.io(other), wanted, "{opcode}");
        die(&mut h);
        assert_eq!(read(&mut h, 8, 2), Status::SUCCESS);
    }
}

/// One that fails leaves what it has not erased.
#[test]
fn failed_format_keeps_marks() {
    let (volume, faults) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    assert_eq!(mark(&mut h, 8, 2), Status::SUCCESS);
    let error = IoErrorKind::MediaWrite.into();
    faults.add(Fault::always(OpKind::WriteZeroes, Effect::Fail(error)));
    let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    assert_eq!(h.admin(format).status(), Status::WRITE_FAULT);
    assert_eq!(read(&mut h, 8, 2), UNREADABLE);
    // Nothing is marked meanwhile.
    faults.clear();
    faults.add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Hold));
    h.submit(0, format);
    h.run_held(&faults, 1);
    assert_eq!(mark(&mut h, 20, 1), Status::FORMAT_IN_PROGRESS);
    faults.release();
    h.until(|h| h.peek(0).is_some());
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
    assert!(unreadable(&mut h, 32).is_empty());
}

#[test]
fn self_test_finds_marked_block() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512)]);
    assert_eq!(mark(&mut h, 1234, 3), Status::SUCCESS);
    let mut test = Command::new(AdminOpcode::DEVICE_SELF_TEST.0, 0, 1);
    test.cdw10 = u32::from(SelfTestCode::EXTENDED.0).into();
    assert_eq!(h.admin(test).status(), Status::SUCCESS);
    for _ in 0..200 {
        h.now += std::time::Duration::from_millis(100);
        h.run();
    }
    let log = h.log(6, size_of::<SelfTestLog>(), 0, false).1;
    let log = SelfTestLog::read_from_bytes(&log).unwrap();
    let result = log.results[0];
    assert_eq!(result.status.outcome(), SelfTestOutcome::FAILED_SEGMENT);
    assert_eq!((result.flba.get(), result.sct, result.sc), (1234, 2, 0x81));
}

/// A host that marks blocks makes no medium bad; a medium that is bad counts.
#[test]
fn marked_blocks_count_no_media_errors() {
    let (volume, faults) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    let smart = |h: &mut Host| {
        let log = h.log(2, 512, 0, false).1;
        let smart = Smart::read_from_bytes(&log).unwrap();
        (smart.mdie.get(), smart.neile.get())
    };
    assert_eq!(mark(&mut h, 8, 1), Status::SUCCESS);
    assert_eq!(read(&mut h, 8, 1), UNREADABLE);
    let verify = on(&h, NvmOpcode::VERIFY, 1, 0, 16);
    assert_eq!(h.io(verify), UNREADABLE);
    assert_eq!(smart(&mut h), (0, 2));
    let log = h.log(1, 64, 0, false).1;
    let entry = ErrorInformation::read_from_bytes(&log).unwrap();
    assert_eq!((entry.lba.get(), entry.sqid.get()), (8, 1));
    let error = IoErrorKind::MediaRead.into();
    faults.add(Fault::nth(OpKind::Read, 1, Effect::Fail(error)));
    assert_eq!(read(&mut h, 9, 1), UNREADABLE);
    assert_eq!(smart(&mut h), (1, 3));
}

#[test]
fn marks_beyond_shrunk_end_are_dropped() {
    let volume = Arc::new(MemVolume::new(MIB).unwrap());
    let size = Arc::new(AtomicU64::new(MIB));
    let told = size.clone();
    let resized = described(volume, move |info| volume::Info {
        size: told.load(Ordering::Relaxed),
        ..info
    });
    let mut h = Host::ready_with(vec![ns(1, resized, 512)]);
    assert_eq!(mark(&mut h, 1000, 100), Status::SUCCESS);
    for (blocks, left) in [(1024, 24), (2048, 24), (512, 0), (2048, 0)] {
        size.store(blocks * 512, Ordering::Relaxed);
        assert!(h.outliving(|h| h.c.check_sizes()));
        let all = blocks.min(1200);
        assert_eq!(unreadable(&mut h, all).len(), left, "{blocks}");
    }
}

/// A namespace attached under an ID is not the one that was there before.
#[test]
fn attached_namespace_has_no_marks() {
    let config = ControllerConfig {
        max_namespaces: 2,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, mem(MIB), 512)]);
    h.enable();
    h.create_pair(1, 64);
    assert_eq!(mark(&mut h, 8, 1), Status::SUCCESS);
    assert!(h.c.detach(1));
    h.run();
    h.c.tidy(&h.io);
    h.c.attach(ns(1, mem(MIB), 512), &h.io).unwrap();
    assert_eq!(read(&mut h, 8, 1), Status::SUCCESS);
    die(&mut h);
    assert_eq!(read(&mut h, 8, 1), Status::SUCCESS);
}
