//! The rules of queues on other workers, one by one.

use crate::common::*;
use crate::migration::other_worker::wake_flag;
use crate::migration::world::{OTHERS, PAIRS, PLACES, WINDOW, World};
use nvme::cmd::admin::AbortResult;
use nvme::regs::{Shn, Shst};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Effect, Fault, OpKind};

/// All queues but the first on other workers.
pub fn migrate_to_others(w: &mut World) {
    for cqid in 2..=PAIRS {
        let worker = 1 + (cqid % OTHERS as u16);
        assert!(w.migrate_queue(cqid, worker));
        w.wake_all();
        w.h.run();
        assert_eq!(w.worker_of(cqid), worker);
    }
}

#[test]
fn queue_migrates_through_all_workers_under_load() {
    let mut w = World::new(false);
    for turn in 0..60u16 {
        for qid in 1..=5 {
            (0..7).for_each(|_| w.submit(qid, turn % 2 == 0));
        }
        let (cqid, worker) = (1 + turn % PAIRS, (turn / PAIRS) % 3);
        if w.worker_of(cqid) != worker {
            assert!(w.migrate_queue(cqid, worker));
        }
        w.settle();
        assert_eq!(w.worker_of(cqid), worker);
        assert!(!w.h.c.is_migrating());
        for cqid in 1..=PAIRS {
            w.reap(cqid, 1000);
        }
    }
    assert!(w.h.c.stats().migrations.get() > 30);
    let stats = w.h.c.stats();
    let fetched: u64 = stats.queues[1..].iter().map(|q| q.commands.get()).sum();
    w.verify();
    assert_eq!(fetched, 60 * 5 * 7);
    assert_eq!(stats.queues[5].worker.get(), stats.queues[1].worker.get());
}

#[test]
fn queue_with_slow_command_stays() {
    let mut w = World::new(false);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, true);
    w.step(0, true);
    assert!(w.migrate_queue(2, 1));
    w.submit(2, true);
    for _ in 0..4 {
        w.step(0, true);
    }
    assert!(w.h.c.is_migrating());
    assert!(!w.h.c.migrate_queue(3, 1), "one at a time");
    w.h.now += Duration::from_secs(1);
    w.settle();
    assert!(!w.h.c.is_migrating(), "cancelled");
    assert_eq!(w.worker_of(2), 0);
    w.verify();
    // The same from a engine.
    migrate_to_others(&mut w);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, true);
    w.settle();
    assert!(w.migrate_queue(2, 0));
    w.h.now += Duration::from_secs(1);
    w.settle();
    assert!(!w.h.c.is_migrating());
    assert_eq!(w.worker_of(2), 1);
    w.verify();
}

fn rounds(w: &mut World) {
    for worker in (0..=OTHERS).cycle().take(100) {
        w.step(worker, true);
    }
}

/// A command of another worker's queue is in flight, until its volume lets it go.
fn one_held_elsewhere(w: &mut World) {
    migrate_to_others(w);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, false);
    rounds(w);
    assert_eq!(w.faults.held(), 1);
}

#[test]
fn unmap_waits_for_command_on_other_worker() {
    let mut w = World::new(true);
    one_held_elsewhere(&mut w);
    w.h.c.dma_unmap(WINDOW, PLACES * 4096).unwrap();
    rounds(&mut w);
    assert!(!w.h.c.dma_quiesced(), "the command is in flight");
    w.faults.release();
    rounds(&mut w);
    assert!(w.h.c.dma_quiesced());
}

#[test]
fn reset_waits_for_command_on_other_worker() {
    let mut w = World::stubborn(true);
    one_held_elsewhere(&mut w);
    w.h.disable();
    rounds(&mut w);
    assert!(w.h.csts().rdy(), "the command is in flight");
    w.faults.release();
    rounds(&mut w);
    assert!(!w.h.csts().rdy());
}

/// The process ends: each worker makes durable what went through it.
#[test]
fn remote_engine_flushes_at_end() {
    let mut w = World::new(true);
    migrate_to_others(&mut w);
    w.submit(2, true);
    w.settle();
    w.wake_all();
    w.faults.add(Fault::nth(OpKind::Flush, 1, Effect::Hold));
    w.others.borrow_mut()[0].engine.flush();
    w.step(1, true);
    assert_eq!(w.faults.held(), 1);
    assert!(!w.others.borrow()[0].engine.is_drained());
    w.faults.release();
    w.step(1, true);
    assert!(w.others.borrow()[0].engine.is_drained());
}

#[test]
fn shutdown_flushes_on_every_worker() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.faults.add(Fault::nth(OpKind::Flush, 3, Effect::Hold));
    (1..=4).for_each(|qid| w.submit(qid, true));
    w.settle();
    w.h.shutdown(Shn::NORMAL);
    w.wake_up();
    for _ in 0..8 {
        (0..=OTHERS).for_each(|worker| {
            w.step(worker, true);
        });
    }
    assert_eq!(
        w.h.csts().shst(),
        Shst::OCCURRING,
        "one worker still flushes"
    );
    w.faults.release();
    w.settle();
    assert_eq!(w.h.csts().shst(), Shst::COMPLETE);
    // A reset afterwards, and everything begins again.
    w.reset();
    w.submit(3, true);
    w.verify();
}

#[test]
fn abort_finds_command_on_other_worker() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    let command = w.h.rw(NvmOpcode::READ, 1, 0, 8, WINDOW);
    let cid = w.h.submit(2, command);
    w.wake_all();
    w.h.until(|h| h.c.stats().queues[2].commands.get() == 1);
    let abort = |w: &mut World, cid: u16| {
        let done = w.h.simple(AdminOpcode::ABORT, u32::from(cid) << 16 | 2);
        AbortResult::from_bits(done.dw0.get()).ianp()
    };
    assert!(abort(&mut w, cid + 100), "there is no such command");
    // The held request is cancelled, so that both end.
    assert!(!abort(&mut w, cid));
    w.h.run();
    let completion = w.h.reap(2).unwrap();
    assert!(completion.status().is(Status::ABORT_REQUESTED));
}

#[test]
fn errors_on_other_worker_reach_error_log() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    let command = Command::new(0x7f, 0, 1);
    for _ in 0..200 {
        let status = w.h.command(3, command).status();
        assert!(status.is(Status::INVALID_OPCODE), "{status}");
    }
    w.h.run();
    assert_eq!(w.h.c.stats().error_log_entries.get(), 200);
    // A doorbell outside its ring.
    w.h.ring_value(3, false, 999);
    w.h.run();
    w.submit(3, true);
    w.verify();
    w.wake_all();
    assert_eq!(w.h.c.stats().error_log_entries.get(), 201);
}

/// A namespace is closed on every worker, and what each of them has in flight is waited for.
#[test]
fn format_waits_for_all_workers() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    w.faults.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    w.h.write(DATA, &[0x5a; 4096]);
    let write = w.h.rw(NvmOpcode::WRITE, 1, 8, 8, DATA);
    w.h.submit(3, write);
    w.h.until(|_| w.faults.held() == 1);
    let cid = w.h.submit(0, Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1));
    for _ in 0..100 {
        w.h.round();
    }
    assert!(w.h.reap(0).is_none(), "it has not waited");
    let read = w.h.rw(NvmOpcode::READ, 1, 8, 8, DATA + 4096);
    for qid in [1, 2] {
        let status = w.h.command(qid, read).status();
        assert!(status.is(Status::FORMAT_IN_PROGRESS), "{qid}: {status}");
    }
    w.faults.release();
    w.h.until(|h| h.peek(0).is_some());
    let done = w.h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    assert_eq!(w.h.reap(3).unwrap().status(), Status::SUCCESS);
    for qid in 1..=PAIRS {
        assert_eq!(w.h.command(qid, read).status(), Status::SUCCESS);
        assert_eq!(w.h.read(DATA + 4096, 4096), vec![0; 4096], "{qid}");
    }
}

#[test]
fn disconnect_leaves_nothing_on_workers() {
    let mut w = World::new(true);
    migrate_to_others(&mut w);
    (1..=4).for_each(|qid| w.submit(qid, false));
    w.step(1, true);
    w.h.c.disconnect();
    let limit = Instant::now() + Duration::from_secs(10);
    while w.h.c.is_resetting() {
        (0..=OTHERS).for_each(|worker| {
            w.step(worker, true);
        });
        assert!(Instant::now() < limit);
    }
    let memory = w.memory();
    w.settle();
    assert!(w.memory() == memory);
    assert!(w.h.c.completion_queues().is_empty());
}

#[test]
fn remote_engine_needs_several_workers() {
    let mut h = Host::ready();
    let flag = wake_flag(&Arc::default());
    assert!(
        h.c.remote_engine(1, flag.clone().into()).is_none(),
        "no worker was named yet"
    );
    h.c.set_worker(0, flag.clone().into());
    assert!(
        h.c.remote_engine(1, flag.into()).is_none(),
        "made for one worker"
    );
    assert_eq!(h.c.has_remote_engine(1), Some(false));
    assert!(!h.c.migrate_queue(1, 1));
    assert_eq!(h.c.completion_queues(), [(1, 0)]);
}

/// The host takes a completed Doorbell Buffer Config for the end of its register writes: every
/// worker looks at the buffers then.
#[test]
fn doorbell_buffer_config_completes_when_every_worker_has_buffers() {
    let mut w = World::new(true);
    migrate_to_others(&mut w);
    w.wake_all();
    let beside = w.h.beside.take();
    let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
    command.set_prps(SHADOW, EVENTIDX);
    w.h.submit(0, command);
    for _ in 0..8 {
        w.step(0, true);
        w.step(1, true);
    }
    assert!(w.h.peek(0).is_none(), "one worker has not followed");
    w.step(2, true);
    w.step(0, true);
    let completion = w.h.reap(0).unwrap();
    assert_eq!(completion.status(), Status::SUCCESS);
    w.h.ring = Ring::Shadow;
    w.h.beside = beside;
    (2..=PAIRS).for_each(|qid| w.submit(qid, true));
    w.verify();
}

/// A command about queues calls a migration off, for it has to find the queue; no other one does.
#[test]
fn queue_commands_cancel_migration() {
    let mut w = World::new(false);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, true);
    w.step(0, true);
    for opcode in 0..=0xff {
        if !w.h.c.is_migrating() {
            assert!(w.migrate_queue(2, 1), "before {opcode:#x}");
        }
        // Nothing that the command could do, nor data that it could take.
        let mut command = Command::new(opcode, 0, 0);
        command.set_prps(1, 1);
        w.h.submit(0, command);
        w.step(0, true);
        w.h.reap(0);
        let concerns_queues = [
            AdminOpcode::CREATE_IO_CQ,
            AdminOpcode::CREATE_IO_SQ,
            AdminOpcode::DELETE_IO_CQ,
            AdminOpcode::DELETE_IO_SQ,
            AdminOpcode::ABORT,
            AdminOpcode::SET_FEATURES,
            AdminOpcode::DOORBELL_BUFFER_CONFIG,
        ]
        .contains(&AdminOpcode(opcode));
        assert_eq!(w.h.c.is_migrating(), !concerns_queues, "{opcode:#x}");
    }
    assert_eq!(w.worker_of(2), 0);
    w.faults.release();
    w.verify();
}

/// What a worker reports of a queue that a reset took away says nothing of the queue that has its
/// number afterwards.
#[test]
fn report_from_before_reset_is_ignored() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    let worker = w.worker_of(2);
    let steps = |w: &mut World| {
        for _ in 0..8 {
            w.step(0, false);
            w.step(usize::from(worker), true);
            w.step(3 - usize::from(worker), true);
        }
    };
    // From here on the controller does not drain its messages.
    let beside = w.h.beside.take();
    let mut command = Command::new(AdminOpcode::DELETE_IO_SQ.0, 0, 0);
    command.cdw10 = 2.into();
    w.h.submit(0, command);
    steps(&mut w);
    w.h.disable();
    steps(&mut w);
    assert!(!w.h.csts().rdy());
    w.up();
    assert!(w.migrate_queue(2, worker));
    steps(&mut w);
    assert_eq!(w.worker_of(2), worker);
    w.h.beside = beside;
    w.settle();
    w.wake_all();
    let refused = w.h.delete(AdminOpcode::DELETE_IO_CQ, 2);
    assert!(refused.is(Status::INVALID_QUEUE_DELETION), "{refused}");
    w.submit(2, true);
    w.verify();
}
