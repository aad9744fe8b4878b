//! A round within a budget: what it does not last for is there in the next round, of whatever
//! queue; a long command is done in pieces between which there are rounds.

use crate::common::*;
use nvme::cmd::io::CopyRange;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use volume::Budget;
use zerocopy::IntoBytes;

fn fetched(h: &Host) -> [u64; 4] {
    [1, 2, 3, 4].map(|qid| h.c.stats().queues[qid].commands.get())
}

fn poll(h: &mut Host, units: u32) -> bool {
    h.c.poll_within(h.now, &mut Budget::new(units))
}

#[test]
fn each_queue_gets_turn_in_short_rounds() {
    let mut h = Host::ready_with(vec![ns(1, mem(1 << 20), 512)]);
    (2..=4).for_each(|qid| h.create_pair(qid, 64));
    h.run();
    let before = fetched(&h);
    let new = |h: &Host| {
        let now = fetched(h);
        [0, 1, 2, 3].map(|at| now[at] - before[at])
    };
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    for qid in 1..=4 {
        for _ in 0..40 {
            h.push(qid, read);
        }
        h.ring_sq(qid);
    }
    // 32 entries of a queue are one batch. The first round begins with the queues that were idle,
    // and so does not say with which one the next one begins.
    for sum in [32, 40, 72, 104, 136, 144, 152, 160] {
        assert!(poll(&mut h, 8));
        assert_eq!(new(&h).iter().sum::<u64>(), sum, "{:?}", new(&h));
        if sum == 136 {
            assert_eq!(new(&h), [40, 32, 32, 32]);
        }
    }
    assert!(!poll(&mut h, 8));
    for qid in 1..=4 {
        assert_eq!(h.reap_all(qid).len(), 40);
    }
}

#[test]
fn large_commands_count_by_data() {
    let mut h = Host::ready_with(vec![ns(1, mem(1 << 20), 512)]);
    let mut read = h.rw(NvmOpcode::READ, 1, 0, 256, DATA);
    h.prps(&mut read, DATA, 128 << 10, PAGE);
    for _ in 0..8 {
        h.push(1, read);
    }
    h.ring_sq(1);
    h.until(|h| fetched(h)[0] == 8);
    let before = fetched(&h)[0];
    for _ in 0..8 {
        h.push(1, read);
    }
    h.ring_sq(1);
    // Eight units each: the third one overdraws, and the one that ends the batch is fetched, too.
    assert!(poll(&mut h, 20));
    assert_eq!(fetched(&h)[0] - before, 4);
    h.run();
    assert_eq!(h.reap_all(1).len(), 16);
}

/// 256 ranges, on a volume that does each within the call.
fn many_ranges(h: &Host) -> Command {
    for i in 0..256u64 {
        let mut range = [0; 16];
        range[4..8].copy_from_slice(&1u32.to_le_bytes());
        range[8..].copy_from_slice(&(i * 2).to_le_bytes());
        h.write(DATA + i * 16, &range);
    }
    let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    command.set_prps(DATA, 0);
    command.cdw10 = 255.into();
    command.cdw11 = 4.into();
    command
}

/// The same of ranges that are copied.
fn many_copies(h: &Host) -> Command {
    for i in 0..128u64 {
        let range = CopyRange {
            slba: (i * 2).into(),
            nlb_z: 1.into(),
            ..CopyRange::default()
        };
        h.write(DATA + i * 32, range.as_bytes());
    }
    let mut command = Command::new(NvmOpcode::COPY.0, 0, 1);
    command.set_prps(DATA, 0);
    command.set_slba(1024);
    command.cdw12 = 127.into();
    command
}

/// Makes a command of many pieces.
type MakeCommand = fn(&Host) -> Command;
const IN_PIECES: [MakeCommand; 2] = [many_ranges, many_copies];

/// A controller in the middle of such a command.
fn in_pieces(make: MakeCommand) -> (Host, u16) {
    let mut h = Host::ready_with(vec![ns(1, mem(1 << 20), 512)]);
    let command = make(&h);
    let cid = h.submit(1, command);
    for _ in 0..10 {
        assert!(poll(&mut h, 32));
    }
    assert!(h.reap(1).is_none() && h.c.in_flight() == 1);
    assert!(h.c.arm(), "it must not sleep");
    (h, cid)
}

#[test]
fn command_in_pieces_lets_others_pass() {
    for make in IN_PIECES {
        others_pass(make);
    }
}

fn others_pass(make: MakeCommand) {
    let (mut h, cid) = in_pieces(make);
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA + 8192);
    let other = h.submit(1, read);
    assert!(poll(&mut h, 64));
    assert_eq!(h.reap(1).unwrap().cid.get(), other);
    h.run();
    let done = h.reap(1).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    // Each in turn.
    let first = h.submit(1, make(&h));
    let second = h.submit(1, make(&h));
    h.run();
    let order: Vec<u16> = h.reap_all(1).iter().map(|done| done.cid.get()).collect();
    assert!(order == [first, second] || order == [second, first]);
}

#[test]
fn command_in_pieces_is_aborted_between_pieces() {
    for make in IN_PIECES {
        aborted_between_two(make);
    }
}

fn aborted_between_two(make: MakeCommand) {
    let (mut h, cid) = in_pieces(make);
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    h.submit(0, abort);
    for _ in 0..4 {
        poll(&mut h, 64);
    }
    let done = h.reap(0).unwrap();
    assert_eq!((plain(done.status()), done.dw0.get()), (Status::SUCCESS, 0));
    assert_eq!(plain(h.reap(1).unwrap().status()), Status::ABORT_REQUESTED);
    h.quiet();
}

#[test]
fn reset_does_not_wait_for_remaining_pieces() {
    for make in IN_PIECES {
        let (mut h, _) = in_pieces(make);
        h.disable();
        assert!(h.csts().rdy(), "it waits for the command");
        poll(&mut h, 32);
        assert!(!h.csts().rdy());
        h.enable();
    }
}
