//! Remote engines that are made, or drain their messages, late.

use crate::common::*;
use crate::migration::other_worker::{OtherWorker, wake_flag};
use crate::migration::rules::migrate_to_others;
use crate::migration::world::{ENTRIES, OTHERS, World, config};
use nvme::cmd::io::CopyRange;
use nvme::feature::Fid;
use nvme::regs;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use volume::{Io, IoOptions};
use zerocopy::IntoBytes;

/// Pages of 8 KiB, delayed interrupts, shadow doorbells, formats of descriptors: a remote engine
/// that is made afterwards works with all of them. It is told of a volume that grows, too.
#[test]
fn late_remote_engine_has_current_state() {
    let size = Arc::new(AtomicU64::new(1 << 20));
    let told = size.clone();
    let volume = described(mem(8 << 20), move |info| volume::Info {
        size: told.load(Ordering::Relaxed),
        ..info
    });
    let mut h = Host::with(config(false), vec![ns(1, volume.clone(), 512)]);
    let flag = wake_flag(&Arc::default());
    h.c.set_worker(0, flag.clone().into());
    h.enable();
    h.disable();
    h.run();
    // Everything at the begin of such a page.
    let [asq, acq, eventidx, sq, cq] = [0xa000, 0xc000, 0xe000, 0x1_2000, 0x1_4000];
    h.set64(regs::ASQ, asq);
    h.set64(regs::ACQ, acq);
    h.set32(regs::CC, Host::cc_enabled().with_mps(1).into_bits());
    assert!(h.csts().rdy());
    h.pairs.insert(0, Pair::new(asq, acq, 32));
    assert_eq!(h.configure_shadow(SHADOW, eventidx), Status::SUCCESS);
    h.create_pair_at(1, 16, sq, cq);
    let done = h.set_feature(Fid::INTERRUPT_COALESCING, 255 << 8 | 9);
    assert_eq!(done.status(), Status::SUCCESS);
    let mut behavior = [0; 512];
    behavior[4] = 1 << 2;
    h.write(DATA, &behavior);
    let mut says = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    says.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
    says.set_prps(DATA, 0);
    assert_eq!(h.admin(says).status(), Status::SUCCESS);
    h.quiet();

    let theirs = wake_flag(&Arc::default());
    let setup = h.c.remote_engine(1, theirs.clone().into()).unwrap();
    let io = Rc::new(Io::new(IoOptions::default()));
    let mut other = OtherWorker {
        engine: setup.open(10, &io).unwrap(),
        io,
        flag: theirs,
        wakes: Arc::default(),
        asleep: false,
        raced: false,
    };
    h.beside = Some(Box::new(move |controller, now| {
        let worked = flag.take() && controller.drain_messages();
        other.round(true, now) | worked
    }));
    assert!(h.c.migrate_queue(1, 1));
    h.run();
    assert_eq!(h.c.completion_queues(), [(1, 1)]);

    // The host publishes in memory, and does not ring.
    let mut write = h.rw(NvmOpcode::WRITE, 1, 0, 32, DATA);
    write.set_prps(DATA, DATA + 8192);
    let bytes = pattern(1, 16 << 10);
    h.write(DATA, &bytes);
    let io = |h: &mut Host, command| {
        h.push(1, command);
        let tail = h.pairs[&1].sq.tail;
        h.cell(SHADOW + 8).store(tail.to_le(), Ordering::SeqCst);
        h.until(|h| h.peek(1).is_some());
        let completion = h.reap(1).unwrap();
        h.cell(SHADOW + 12).store(tail.to_le(), Ordering::SeqCst);
        completion.status()
    };
    assert_eq!(io(&mut h, write), Status::SUCCESS);
    assert_eq!(h.vectors[1].take(), 0, "it is delayed");
    let mut read = h.rw(NvmOpcode::READ, 1, 0, 32, DATA + 0x1_0000);
    read.set_prps(DATA + 0x1_0000, DATA + 0x1_2000);
    assert_eq!(io(&mut h, read), Status::SUCCESS);
    assert!(h.read(DATA + 0x1_0000, 16 << 10) == bytes);

    // Of descriptors that a host says it uses.
    let range = CopyRange {
        snsid: 1.into(),
        ..CopyRange::default()
    };
    h.write(DATA, range.as_bytes());
    let mut copy = Command::new(NvmOpcode::COPY.0, 0, 1);
    copy.set_prps(DATA, 0);
    copy.set_slba(1024);
    copy.cdw12 = (2 << 8).into();
    assert_eq!(io(&mut h, copy), Status::SUCCESS);

    let beyond = h.rw(NvmOpcode::READ, 1, 2048, 8, DATA);
    assert!(io(&mut h, beyond).is(Status::LBA_OUT_OF_RANGE));
    size.store(2 << 20, Ordering::Relaxed);
    assert!(h.c.check_sizes());
    h.run();
    assert_eq!(io(&mut h, beyond), Status::SUCCESS);
}

/// The registers are cleared when every worker has stopped: one that has not would take that for a
/// doorbell, and old entries for new ones.
#[test]
fn reset_unknown_to_worker_rings_no_doorbell() {
    let mut w = World::new(true);
    migrate_to_others(&mut w);
    (0..5).for_each(|_| w.submit(2, false));
    w.settle();
    assert_eq!(w.reap(2, 1000), 5);
    let fetched = |w: &World| w.h.c.stats().queues[2].commands.get();
    assert_eq!(fetched(&w), 5);
    w.wake_all();
    w.h.disable();
    for _ in 0..8 {
        w.step(0, true);
        w.step(1, false);
    }
    assert_eq!(fetched(&w), 5);
    w.reset();
    w.verify();
}

/// Memory is taken away under a queue on another worker, or between two: the engine that has it
/// does not find its rings.
#[test]
fn unmap_reaches_queue_on_any_worker() {
    for moves in [false, true] {
        let mut w = World::new(true);
        migrate_to_others(&mut w);
        w.settle();
        w.wake_all();
        assert_eq!(w.worker_of(2), 1);
        if moves {
            assert!(w.migrate_queue(2, 2));
            // It has left, and its next worker does not have it yet.
            (0..4).for_each(|_| {
                w.step(1, true);
            });
        }
        w.h.c.dma_unmap(LOW, LOW_SIZE).unwrap();
        let all = |w: &mut World| {
            for worker in (0..=OTHERS).cycle().take(100) {
                w.step(worker, true);
            }
        };
        all(&mut w);
        assert!(w.h.c.dma_quiesced());
        assert_eq!(w.worker_of(2), 1 + u16::from(moves));
        let before = w.h.c.stats().queues[2].commands.get();
        w.submit(2, false);
        all(&mut w);
        assert_eq!(w.h.c.stats().queues[2].commands.get(), before);
        let memory = w.h.low.clone();
        w.h.c
            .dma_map(LOW, LOW_SIZE, Some((memory, 0)), dma::Prot::RW)
            .unwrap();
        w.verify();
    }
}

/// A disconnected VMM leaves no descriptor behind, on any worker.
#[test]
fn disconnect_releases_receivers_on_every_worker() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    w.h.c.disconnect();
    w.settle();
    for (vector, sink) in w.h.vectors.iter().enumerate() {
        assert_eq!(Arc::strong_count(sink), 1, "vector {vector}");
    }
}

/// What the host's errors take while the controller does not drain its messages is bounded: its
/// commands wait.
#[test]
fn unread_error_reports_are_bounded() {
    let mut w = World::new(true);
    migrate_to_others(&mut w);
    w.wake_all();
    for _ in 0..100 {
        for _ in 1..ENTRIES {
            if w.h.pairs[&3].sq.tail != (w.h.pairs[&3].cq.head + ENTRIES - 1) % ENTRIES {
                w.h.submit(3, Command::new(0x7f, 0, 1));
            }
        }
        (0..4).for_each(|_| {
            w.step(2, true);
        });
        w.h.reap_all(3);
    }
    let done = w.h.c.stats().queues[3].commands.get();
    assert!((100..300).contains(&done), "{done}");
    w.wake_all();
    w.settle();
    assert!(w.h.c.stats().error_log_entries.get() >= done);
}
