//! What waits for the file, damage from below, and what the next process finds.

use crate::metadata::world::*;
use dma::{Buffer, SegmentList};
use nvme::{Command, NvmOpcode, Status};
use volume::{Effect, Fault, Io, IoErrorKind, IoOptions, Op, OpKind, Request};

/// The bytes of the volume below, from that block on.
pub fn raw(p: &Protected, slba: u64, bytes: &mut [u8]) {
    let done = below(p, Op::Read, slba, bytes);
    bytes.copy_from_slice(&done);
}

/// Other bytes there.
pub fn overwrite(p: &Protected, slba: u64, bytes: &[u8]) {
    below(p, Op::Write { fua: false }, slba, bytes);
}

fn below(p: &Protected, op: Op, slba: u64, bytes: &[u8]) -> Buffer {
    let io = Io::new(IoOptions::default());
    let mut queue = p.below.open(&io).unwrap();
    let request = Request::transfer(
        1,
        op,
        slba * u64::from(p.layout.block),
        SegmentList::owned(Buffer::from_slice(bytes)),
    );
    let done = queue.submit(request).unwrap();
    done.result.unwrap();
    done.data.into_buffer().unwrap()
}

/// Data that was changed below, zeroed, or moved from another block, has the guard's error, or that
/// of the medium where the guard is not checked or cannot tell.
#[test]
fn damaged_data_is_detected() {
    let mut p = Protected::new(usual());
    let (data, _) = p.fill(1, 8, 2);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::SUCCESS);
    let mut torn = data[512..].to_vec();
    torn[7] ^= 0x10;
    overwrite(&p, 9, &torn);
    for opcode in [NvmOpcode::READ, NvmOpcode::VERIFY] {
        assert_eq!(p.status(opcode, 8, 2, ALL), Status::GUARD_CHECK_ERROR);
        let unchecked = p.status(opcode, 8, 2, 0);
        assert_eq!(unchecked, Status::UNRECOVERED_READ_ERROR);
    }
    assert_eq!(p.read(8, 1, ALL).0, data[..512]);
    // A write heals it.
    let healed = p.fill(2, 9, 1);
    assert_eq!(p.status(NvmOpcode::WRITE, 9, 1, ALL), Status::SUCCESS);
    assert_eq!(p.read(9, 1, ALL), healed);
}

/// A write that fails leaves each block as it was, or as it was to be.
#[test]
fn failed_write_leaves_old_or_new_blocks() {
    let mut p = Protected::new(usual());
    let old = p.fill(1, 8, 2);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::SUCCESS);
    let failed = Effect::Fail(IoErrorKind::NotDurable.into());
    p.data.add(Fault::always(OpKind::Write, failed));
    p.fill(2, 8, 2);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::WRITE_FAULT);
    p.data.clear();
    assert_eq!(p.read(8, 2, ALL), old);
}

/// What is to be durable waits for the file, behind the data; nothing else does.
#[test]
fn durable_write_flushes_metadata_file_after_data() {
    let mut p = Protected::new(usual());
    p.file.add(Fault::always(OpKind::Flush, Effect::Hold));
    p.fill(1, 2, 1);
    assert_eq!(p.status(NvmOpcode::WRITE, 2, 1, ALL), Status::SUCCESS);
    let fua = 1 << 30;
    let commands = [
        Command::new(NvmOpcode::FLUSH.0, 0, 1),
        Command::new(NvmOpcode::FLUSH.0, 0, u32::MAX),
        p.command(NvmOpcode::WRITE, 2, 1, ALL | fua),
        p.command(NvmOpcode::WRITE_ZEROES, 2, 1, PRACT | fua),
    ];
    for (number, command) in commands.into_iter().enumerate() {
        p.h.submit(1, command);
        let faults = p.file.clone();
        p.h.run_held(&faults, 1);
        assert!(p.h.peek(1).is_none(), "{number}");
        p.file.release();
        let mut done = None;
        p.h.until(|h| {
            done = h.reap(1);
            done.is_some()
        });
        assert_eq!(done.unwrap().status(), Status::SUCCESS, "{number}");
    }
    p.file.clear();
    let error = Effect::Fail(IoErrorKind::NotDurable.into());
    p.file.add(Fault::always(OpKind::Flush, error));
    p.fill(1, 2, 1);
    let status = p.status(NvmOpcode::WRITE, 2, 1, ALL | fua);
    assert_eq!(status, Status::WRITE_FAULT);
}

/// Commands on the same blocks come one after the other; reads do beside each other, and others
/// pass.
#[test]
fn overlapping_commands_are_serialized() {
    let mut p = Protected::new(usual());
    p.data.add(Fault::always(OpKind::Write, Effect::Hold));
    for seed in 0..3 {
        p.fill(seed, 8, 2);
        let write = p.command(NvmOpcode::WRITE, 8, 2, ALL);
        p.h.submit(1, write);
        // Its data is the process's by then, or its turn has not come.
        let faults = p.data.clone();
        p.h.run_held(&faults, 1);
    }
    let beside = p.command(NvmOpcode::READ, 20, 2, 0);
    let cid = p.h.submit(1, beside);
    let mut done = None;
    p.h.until(|h| {
        done = h.reap(1);
        done.is_some()
    });
    assert_eq!(done.unwrap().cid.get(), cid);
    p.data.clear();
    p.data.release();
    p.fill(7, 8, 2);
    let mut ended = 0;
    p.h.until(|h| {
        ended += h.reap_all(1).len();
        ended == 3
    });
    p.read(8, 2, ALL);
}

/// Data that takes more memory than there is waits; all of it is read.
#[test]
fn metadata_memory_is_bounded() {
    let mut p = Protected::new(layout(4096, 8, None));
    p.data.add(Fault::always(OpKind::Read, Effect::Hold));
    p.h.create_pair(2, 64);
    // 256 KiB each: 64 of them are 16 MiB.
    for qid in [1, 2] {
        for _ in 0..40 {
            let read = p.command(NvmOpcode::READ, 0, 64, 0);
            p.h.submit(qid, read);
        }
    }
    let faults = p.data.clone();
    p.h.run_held(&faults, 64);
    p.data.clear();
    p.data.release();
    let mut ended = 0;
    p.h.until(|h| {
        ended += h.reap_all(1).len() + h.reap_all(2).len();
        ended == 80
    });
}

/// A command that was in flight when the process died is sent again by its host.
#[test]
fn command_of_dead_process_is_sent_again() {
    let mut p = Protected::new(usual());
    let old = p.fill(1, 8, 2);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::SUCCESS);
    p.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let new = p.fill(2, 8, 2);
    let write = p.command(NvmOpcode::WRITE, 8, 2, ALL);
    p.h.submit(1, write);
    let faults = p.data.clone();
    p.h.run_held(&faults, 1);
    p.data.clear();
    p.h.die();
    let mut done = None;
    p.h.until(|h| {
        done = h.reap(1);
        done.is_some()
    });
    let status = done.unwrap().status();
    assert_eq!(status, Status::COMMAND_INTERRUPTED);
    assert!(!status.dnr());
    assert_eq!(p.read(8, 2, ALL), old);
    p.put(&new.0, &new.1);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::SUCCESS);
    assert_eq!(p.read(8, 2, ALL), new);
}
