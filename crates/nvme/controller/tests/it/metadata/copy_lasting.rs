//! Copy of blocks with metadata beside other commands, with volumes that fail, what is durable, and
//! what the next process finds.

use crate::common::*;
use crate::metadata::world::*;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use volume::{Effect, Fault, IoErrorKind, OpKind};

/// The command that ends next.
fn next(p: &mut Protected) -> (u16, Status) {
    let mut done = None;
    p.h.until(|h| {
        done = h.reap(1);
        done.is_some()
    });
    let done = done.unwrap();
    (done.cid.get(), plain(done.status()))
}

/// A Copy with a held read or write, and commands that have to wait for it; then one that has not.
fn waits_for_copy(kind: OpKind, waiting: NvmOpcode, slba: u64) {
    let mut p = Protected::new(usual());
    let old = p.written(1, 8, 2);
    p.written(2, 40, 2);
    p.data.add(Fault::nth(kind, 1, Effect::Hold));
    let command = p.copy(0, 40, [PRACT | ALL, PRACT], &[from(8, 2)]);
    let copy = p.h.submit(1, command);
    let faults = p.data.clone();
    p.h.run_held(&faults, 1);
    p.fill(3, slba, 2);
    let other = p.command(waiting, slba, 2, ALL);
    let other = p.h.submit(1, other);
    let beside = p.command(NvmOpcode::VERIFY, 20, 2, 0);
    let beside = p.h.submit(1, beside);
    assert_eq!(next(&mut p), (beside, Status::SUCCESS));
    for _ in 0..20 {
        p.h.round();
    }
    assert!(p.h.peek(1).is_none(), "{waiting:?}");
    p.data.clear();
    p.data.release();
    let ended = [next(&mut p), next(&mut p)];
    assert!(ended.contains(&(copy, Status::SUCCESS)), "{ended:?}");
    assert!(ended.contains(&(other, Status::SUCCESS)), "{ended:?}");
    let (mut data, mut metadata) = old;
    if slba == 40 && waiting == NvmOpcode::WRITE {
        (data, metadata) = p.fill(3, 40, 2);
    }
    p.protect(&data, &mut metadata, 40);
    assert!(p.read(40, 2, ALL) == (data, metadata), "{waiting:?}");
}

#[test]
fn commands_wait_for_overlapping_copy() {
    waits_for_copy(OpKind::Read, NvmOpcode::WRITE, 8);
    waits_for_copy(OpKind::Write, NvmOpcode::WRITE, 40);
    waits_for_copy(OpKind::Write, NvmOpcode::READ, 40);
}

/// A copy waits for what others write of its source, and for what they read of its destination.
#[test]
fn copy_waits_for_overlapping_commands() {
    for (kind, opcode, slba) in [
        (OpKind::Write, NvmOpcode::WRITE, 8),
        (OpKind::Write, NvmOpcode::WRITE, 41),
        (OpKind::Read, NvmOpcode::READ, 41),
    ] {
        let mut p = Protected::new(usual());
        p.written(1, 8, 2);
        p.written(2, 40, 2);
        let newest = p.fill(3, slba, 1);
        p.data.add(Fault::nth(kind, 1, Effect::Hold));
        let other = p.command(opcode, slba, 1, ALL);
        p.h.submit(1, other);
        let faults = p.data.clone();
        p.h.run_held(&faults, 1);
        let command = p.copy(0, 40, [PRACT | ALL, PRACT], &[from(8, 2)]);
        p.h.submit(1, command);
        for _ in 0..50 {
            p.h.round();
        }
        assert!(p.h.peek(1).is_none(), "{opcode:?} {slba}");
        p.data.clear();
        p.data.release();
        let ended = [next(&mut p), next(&mut p)];
        assert!(ended.iter().all(|(_, status)| *status == Status::SUCCESS));
        let (source, copied) = (p.read(8, 2, ALL), p.read(40, 2, ALL));
        assert!(source.0 == copied.0, "{opcode:?} {slba}");
        assert!(slba != 8 || source.0[..512] == newest.0, "the newest");
    }
}

/// One that waits can be aborted, and a reset ends it.
#[test]
fn waiting_copy_is_aborted_and_reset() {
    let mut p = Protected::new(usual());
    p.written(1, 8, 2);
    p.fill(2, 8, 2);
    p.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let write = p.command(NvmOpcode::WRITE, 8, 2, ALL);
    p.h.submit(1, write);
    let faults = p.data.clone();
    p.h.run_held(&faults, 1);
    let command = p.copy(0, 40, [0, 0], &[from(8, 2)]);
    let copy = p.h.submit(1, command);
    p.h.round();
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(copy) << 16 | 1).into();
    p.h.submit(0, abort);
    assert_eq!(next(&mut p), (copy, Status::ABORT_REQUESTED));
    p.h.submit(1, command);
    p.h.round();
    p.h.disable();
    p.data.clear();
    p.data.release();
    p.h.until(|h| !h.csts().rdy());
    p.h.enable();
    p.h.create_pair(1, 16);
    assert_eq!(p.copied(command).0, Status::SUCCESS);
}

/// A copy that fails where it is written leaves each block as it was, or as it was to be; so does
/// the next one, which finds them in doubt.
#[test]
fn failed_copy_leaves_old_or_new_blocks() {
    let mut p = Protected::new(usual());
    p.written(1, 8, 2);
    p.written(2, 16, 2);
    let old = p.written(3, 40, 2);
    for source in [8, 16, 8] {
        let failed = Effect::Fail(IoErrorKind::NotDurable.into());
        p.data.add(Fault::always(OpKind::Write, failed));
        let command = p.copy(0, 40, [ALL, 0], &[from(source, 2)]);
        assert_eq!(p.copied(command), (Status::WRITE_FAULT, 0));
        p.data.clear();
        assert!(p.read(40, 2, ALL) == old, "{source}");
    }
    let failed = Effect::Fail(IoErrorKind::MediaRead.into());
    p.data.add(Fault::nth(OpKind::Read, 2, failed));
    let command = p.copy(0, 41, [ALL, 0], &[from(8, 1), from(16, 1)]);
    // What is in doubt is read first, and written anyway.
    assert_eq!(p.copied(command), (Status::SUCCESS, 0));
    p.data.clear();
    let failed = Effect::Fail(IoErrorKind::MediaRead.into());
    p.data.add(Fault::nth(OpKind::Read, 2, failed));
    let command = p.copy(0, 50, [ALL, 0], &[from(8, 1), from(16, 1)]);
    assert_eq!(p.copied(command), (Status::UNRECOVERED_READ_ERROR, 1));
}

/// What a copy wrote is not in doubt: nobody has to read it before it is written again.
#[test]
fn successful_copy_leaves_no_block_in_doubt() {
    let mut p = Protected::new(usual());
    p.written(1, 8, 2);
    p.written(2, 40, 2);
    let command = p.copy(0, 40, [ALL, 0], &[from(8, 2)]);
    assert_eq!(p.copied(command), (Status::SUCCESS, 0));
    p.data.add(Fault::always(OpKind::Read, Effect::Hold));
    p.fill(3, 40, 2);
    let write = p.command(NvmOpcode::WRITE, 40, 2, ALL);
    p.h.submit(1, write);
    assert_eq!(next(&mut p).1, Status::SUCCESS);
}

/// What is to be durable waits for the file, once.
#[test]
fn durable_copy_flushes_metadata_file_once() {
    let mut p = Protected::new(usual());
    p.written(1, 8, 4);
    p.file.add(Fault::always(OpKind::Flush, Effect::Hold));
    let mut command = p.copy(0, 40, [ALL, 0], &[from(8, 2), from(10, 2)]);
    assert_eq!(p.copied(command).0, Status::SUCCESS);
    command.cdw12 = (command.cdw12.get() | 1 << 30).into();
    p.h.submit(1, command);
    let faults = p.file.clone();
    p.h.run_held(&faults, 1);
    assert!(p.h.peek(1).is_none());
    p.file.clear();
    p.file.release();
    assert_eq!(next(&mut p).1, Status::SUCCESS);
    let error = Effect::Fail(IoErrorKind::NotDurable.into());
    p.file.add(Fault::always(OpKind::Flush, error));
    assert_eq!(p.copied(command), (Status::WRITE_FAULT, 1));
}

/// The record of a command has no tags: the host sends it again.
#[test]
fn copy_of_dead_process_is_sent_again() {
    let mut p = Protected::new(usual());
    let old = p.written(1, 8, 2);
    p.written(2, 40, 2);
    for kind in [OpKind::Read, OpKind::Write] {
        p.data.add(Fault::nth(kind, 1, Effect::Hold));
        let command = p.copy(0, 40, [ALL, 0], &[from(8, 2)]);
        p.h.submit(1, command);
        let faults = p.data.clone();
        p.h.run_held(&faults, 1);
        p.data.clear();
        p.h.die();
        p.data.release();
        assert_eq!(next(&mut p).1, Status::COMMAND_INTERRUPTED);
        assert_eq!(p.copied(command).0, Status::SUCCESS);
        assert!(p.read(40, 2, GUARD) == old);
    }
}
