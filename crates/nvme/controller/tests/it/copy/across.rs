//! Copy from other namespaces of the controller: descriptors of formats 2h and 3h, which a host
//! says it uses by Host Behavior Support.

use super::{BACK, LIST, MIB};
use crate::common::*;
use nvme::cmd::io::CopyRange;
use nvme::feature::{Fid, HostBehavior};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use volume::{Effect, Fault, MemVolume, OpKind};
use zerocopy::{FromBytes, IntoBytes};

/// Bit of format 2h in CDFE.
const CROSS: u16 = 1 << 2;
/// The same of format 3h.
const LONG: u16 = 1 << 3;

/// A source: namespace, first block, blocks.
type From = (u32, u64, u32);

/// A command that copies ranges of several namespaces one behind the other to namespace 1.
fn copy(h: &Host, to: u64, ranges: &[From]) -> Command {
    let mut command = super::copy_from(h, to, ranges);
    command.cdw12 = (command.cdw12.get() | 2 << 8).into();
    command
}

fn say(h: &mut Host, behavior: &HostBehavior) -> Status {
    h.write(PAGE, behavior.as_bytes());
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
    command.set_prps(PAGE, 0);
    plain(h.admin(command).status())
}

/// What the controller knows of its host.
fn known(h: &mut Host, sel: u32) -> HostBehavior {
    h.write(PAGE, &[0xff; 512]);
    let done = h.get_feature(Fid::HOST_BEHAVIOR_SUPPORT, sel, 0);
    assert_eq!(done.status(), Status::SUCCESS);
    HostBehavior::read_from_bytes(&h.read(PAGE, 512)).unwrap()
}

fn uses(formats: u16) -> HostBehavior {
    HostBehavior {
        cdfe: formats.into(),
        ..HostBehavior::default()
    }
}

fn disk(h: &mut Host, nsid: u32, seed: u64, bytes: u64) -> Vec<u8> {
    let data = pattern(seed, bytes as usize);
    super::fill_namespace(h, nsid, &data);
    data
}

/// Blocks of namespace 1.
fn blocks(h: &mut Host, slba: u64, count: u32) -> Vec<u8> {
    let mut read = h.rw(NvmOpcode::READ, 1, slba, count, 0);
    h.prps(&mut read, BACK, u64::from(count) * 512, LIST);
    assert_eq!(h.io(read), Status::SUCCESS);
    h.read(BACK, count as usize * 512)
}

fn part(data: &[u8], slba: usize, count: usize) -> &[u8] {
    &data[slba * 512..(slba + count) * 512]
}

#[test]
fn copy_reads_ranges_of_other_namespaces() {
    let (_dir, file) = super::file();
    let read_only = MemVolume::new(MIB).unwrap().read_only();
    let all = vec![
        ns(1, mem(4 * MIB), 512),
        ns(2, file, 512),
        ns(3, Arc::new(read_only), 512),
    ];
    let mut h = Host::ready_with(all);
    assert_eq!(say(&mut h, &uses(CROSS)), Status::SUCCESS);
    let own = disk(&mut h, 1, 1, 4 * MIB);
    let other = disk(&mut h, 2, 2, 8 * MIB);
    // More than a piece, blocks of the same numbers as the destination's, and one of its own.
    let ranges = [
        (2, 100, 1500),
        (1, 7, 3),
        (2, 4096, 1),
        (3, 0, 2),
        (2, 16383, 1),
    ];
    let command = copy(&h, 4096, &ranges);
    assert_eq!(h.io(command), Status::SUCCESS);
    let mut wanted = part(&other, 100, 1500).to_vec();
    wanted.extend(part(&own, 7, 3));
    wanted.extend(part(&other, 4096, 1));
    wanted.extend([0; 1024]);
    wanted.extend(part(&other, 16383, 1));
    assert!(blocks(&mut h, 4096, 1507) == wanted);
    assert!(
        blocks(&mut h, 4096 + 1507, 1) == part(&own, 4096 + 1507, 1),
        "and no more"
    );
}

#[test]
fn cross_namespace_copy_needs_host_behavior() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(2, mem(MIB), 512)]);
    let page = h.identify(1, 0, 0).1;
    assert_eq!(u16::from_le_bytes([page[534], page[535]]), 3 | CROSS | LONG);
    let try_it = |h: &mut Host| {
        let command = copy(h, 0, &[(2, 0, 1)]);
        plain(h.io(command))
    };
    assert_eq!(try_it(&mut h), Status::INVALID_FIELD);
    // What there is not is not turned on, and nothing else either.
    for wrong in [
        uses(1 << 1),
        uses(CROSS | 1 << 4),
        HostBehavior {
            lbafee: 2,
            ..uses(CROSS)
        },
        HostBehavior {
            acre: 2,
            ..uses(CROSS)
        },
        HostBehavior {
            hdisns: 0x80,
            ..uses(CROSS)
        },
    ] {
        assert_eq!(say(&mut h, &wrong), Status::INVALID_FIELD);
    }
    assert_eq!(known(&mut h, 0), HostBehavior::default());
    assert_eq!(try_it(&mut h), Status::INVALID_FIELD);
    let mut all = HostBehavior {
        acre: 1,
        etdas: 1,
        lbafee: 1,
        hdisns: 1,
        ..uses(CROSS)
    };
    // Reserved: neither looked at nor kept.
    all.reserved6 = [0x5a; 506];
    assert_eq!(say(&mut h, &all), Status::SUCCESS);
    all.reserved6 = [0; 506];
    assert_eq!(
        (known(&mut h, 0), known(&mut h, 1)),
        (all.clone(), HostBehavior::default())
    );
    assert_eq!(try_it(&mut h), Status::SUCCESS);
    let formats = |h: &mut Host, all: &[(u32, Status)]| {
        for (format, status) in all {
            let mut command = copy(h, 0, &[(2, 0, 1)]);
            command.cdw12 = (format << 8).into();
            assert_eq!(plain(h.io(command)), *status, "{format}");
        }
    };
    // Format 1h is of guards that are longer.
    let (field, format) = (Status::INVALID_FIELD, Status::INVALID_FORMAT);
    formats(&mut h, &[(1, format), (3, field), (4, field), (15, field)]);
    assert_eq!(say(&mut h, &uses(LONG)), Status::SUCCESS);
    formats(&mut h, &[(2, field), (3, format)]);
    assert_eq!(say(&mut h, &all), Status::SUCCESS);
    // The next process knows of it, and after a reset it is to be said again.
    h.die();
    assert_eq!(known(&mut h, 0), all);
    assert_eq!(try_it(&mut h), Status::SUCCESS);
    h.disable();
    h.enable();
    h.create_pair(1, 16);
    assert_eq!(known(&mut h, 0), HostBehavior::default());
    assert_eq!(try_it(&mut h), Status::INVALID_FIELD);
}

#[test]
fn copy_from_invalid_source_is_refused() {
    let all = vec![
        ns(1, mem(4 * MIB), 512),
        ns(2, mem(MIB), 512),
        ns(4, mem(MIB), 4096),
    ];
    let mut h = Host::ready_with(all);
    assert_eq!(say(&mut h, &uses(CROSS)), Status::SUCCESS);
    let own = disk(&mut h, 1, 1, 4 * MIB);
    for (range, status) in [
        ((0, 0, 1), Status::INVALID_NAMESPACE_OR_FORMAT),
        ((u32::MAX, 0, 1), Status::INVALID_NAMESPACE_OR_FORMAT),
        ((1 << 20, 0, 1), Status::INVALID_NAMESPACE_OR_FORMAT),
        ((3, 0, 1), Status::INVALID_FIELD),
        ((4, 0, 1), Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT),
        // Each by its own size.
        ((2, 2048, 1), Status::LBA_OUT_OF_RANGE),
        ((2, 2047, 2), Status::LBA_OUT_OF_RANGE),
        ((2, u64::MAX, 1), Status::LBA_OUT_OF_RANGE),
        ((1, 4095, 2), Status::OVERLAPPING_IO_RANGE),
        ((1, 4097, 1), Status::OVERLAPPING_IO_RANGE),
    ] {
        let command = copy(&h, 4096, &[(2, 4, 1), range]);
        assert_eq!(plain(h.io(command)), status, "{range:?}");
    }
    let command = copy(&h, 4096, &[(2, 4, 1)]);
    let only_fast = CopyRange {
        snsid: 2.into(),
        sopt: CopyRange::FAST_COPY_ONLY.into(),
        ..CopyRange::default()
    };
    h.write(PAGE, only_fast.as_bytes());
    assert_eq!(plain(h.io(command)), Status::FAST_COPY_NOT_POSSIBLE);
    assert!(
        blocks(&mut h, 4096, 8) == part(&own, 4096, 8),
        "nothing was copied"
    );
}

/// Nothing is left of a namespace that was detached.
fn has_gone(h: &mut Host) -> bool {
    h.c.tidy(&h.io);
    h.c.has_detached()
}

/// Commands that read a removed namespace end first.
#[test]
fn detach_waits_for_copy_from_namespace() {
    let (source, reads) = faulty(MIB);
    let (target, writes) = faulty(4 * MIB);
    let mut h = Host::ready_with(vec![ns(1, target, 512), ns(2, source, 512)]);
    assert_eq!(say(&mut h, &uses(CROSS)), Status::SUCCESS);
    let data = disk(&mut h, 2, 5, MIB);
    // The write of the first piece waits, and the source is to be read again after it.
    writes.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let command = copy(&h, 0, &[(2, 0, 1024)]);
    h.submit(1, command);
    h.run_held(&writes, 1);
    assert!(h.c.detach(2));
    let other = copy(&h, 4096, &[(2, 0, 1)]);
    assert_eq!(
        plain(h.io(other)),
        Status::INVALID_FIELD,
        "no new command finds it"
    );
    for _ in 0..50 {
        h.round();
        assert!(!has_gone(&mut h), "before its last reader");
    }
    // Its second piece is read, and waits there.
    reads.add(Fault::nth(OpKind::Read, 1, Effect::Hold));
    writes.clear();
    writes.release();
    h.run_held(&reads, 1);
    assert!(!has_gone(&mut h));
    reads.clear();
    reads.release();
    h.until(has_gone);
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    assert!(blocks(&mut h, 0, 1024) == part(&data, 0, 1024));
}

/// The next process begins it anew, by what the host said before.
#[test]
fn cross_namespace_copy_survives_process() {
    let (source, reads) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(2, source, 512)]);
    assert_eq!(say(&mut h, &uses(CROSS)), Status::SUCCESS);
    let data = disk(&mut h, 2, 9, MIB);
    reads.add(Fault::nth(OpKind::Read, 2, Effect::Hold));
    let command = copy(&h, 0, &[(2, 0, 8), (2, 100, 8)]);
    h.submit(1, command);
    h.run_held(&reads, 1);
    reads.clear();
    h.die();
    reads.release();
    h.until(|h| h.peek(1).is_some());
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    let wanted = [part(&data, 0, 8), part(&data, 100, 8)].concat();
    assert!(blocks(&mut h, 0, 16) == wanted);
}

#[test]
fn copy_from_formatting_namespace_is_refused() {
    let (source, faults) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(2, source, 512)]);
    assert_eq!(say(&mut h, &uses(CROSS)), Status::SUCCESS);
    faults.add(Fault::always(OpKind::WriteZeroes, Effect::Hold));
    h.submit(0, Command::new(AdminOpcode::FORMAT_NVM.0, 0, 2));
    h.run_held(&faults, 1);
    let command = copy(&h, 0, &[(2, 0, 1)]);
    assert_eq!(plain(h.io(command)), Status::FORMAT_IN_PROGRESS);
    faults.clear();
    faults.release();
    h.until(|h| h.reap(0).is_some());
    assert_eq!(h.io(command), Status::SUCCESS);
}

/// Abort reaches the volume that the command is at.
#[test]
fn cross_namespace_copy_is_aborted_at_source() {
    let (source, reads) = faulty(MIB);
    let mut h = Host::ready_with(vec![ns(1, mem(4 * MIB), 512), ns(2, source, 512)]);
    assert_eq!(say(&mut h, &uses(CROSS)), Status::SUCCESS);
    reads.add(Fault::nth(OpKind::Read, 2, Effect::Hold));
    let command = copy(&h, 0, &[(2, 0, 8), (2, 8, 8)]);
    let cid = h.submit(1, command);
    h.run_held(&reads, 1);
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    h.submit(0, abort);
    h.run();
    let done = h.reap(1).unwrap();
    assert_eq!(
        (plain(done.status()), done.dw0.get()),
        (Status::ABORT_REQUESTED, 1)
    );
    assert_eq!(h.reap(0).unwrap().dw0.get() & 1, 0, "it was aborted");
    // It is counted where it was to write.
    assert_eq!(h.c.in_flight(), 0);
}
