//! Bus Master Enable, with queues on several workers.

use crate::common::*;
use crate::migration::other_worker::wake_flag;
use crate::migration::rules::migrate_to_others;
use crate::migration::world::{PAIRS, World};
use nvme::pci::command::BUS_MASTER;
use std::rc::Rc;
use std::sync::Arc;
use volume::{Budget, Effect, Fault, Io, IoOptions, OpKind};

#[test]
fn bus_master_stops_and_resumes_every_worker() {
    for mapped in [false, true] {
        let mut w = World::new(mapped);
        migrate_to_others(&mut w);
        w.settle();
        w.faults.add(Fault::nth(OpKind::Any, 2, Effect::Hold));
        for qid in 1..=5 {
            (0..4).for_each(|_| w.submit(qid, false));
        }
        for worker in 0..3 {
            w.step(worker, true);
        }
        assert_eq!(w.faults.held(), 1);
        w.wake_up();
        w.h.set_command(BUS_MASTER, false);
        for _ in 0..3 {
            for worker in 0..3 {
                w.step(worker, true);
            }
        }
        assert!(!w.h.c.config_settled(), "a read is in flight somewhere");
        w.stop_mastering();
        for qid in 1..=5 {
            (0..4).for_each(|_| w.submit(qid, true));
        }
        let memory = w.memory();
        assert!(!w.migrate_queue(2, 0), "moved without the bit");
        w.settle();
        assert!(w.asleep && w.others.borrow().iter().all(|other| other.asleep));
        assert!(w.memory() == memory);
        w.h.quiet();
        w.master();
        w.settle();
        for qid in 1..=PAIRS {
            assert!(w.h.vectors[usize::from(qid)].take() > 0, "queue {qid}");
        }
        w.verify();
    }
}

/// The interrupt of before is one that the VMM may have dropped.
#[test]
fn unread_entries_on_other_workers_are_signalled() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    for qid in 2..=PAIRS {
        w.submit(qid, false);
    }
    w.settle();
    w.reap(3, 10);
    w.h.quiet();
    w.stop_mastering();
    w.master();
    w.settle();
    let told = |q: usize| w.h.vectors[q].take();
    assert_eq!([told(2), told(3), told(4)], [1, 0, 1]);
    w.verify();
}

/// Neither of the two engines has such a queue when the bit is set.
#[test]
fn queue_between_workers_is_signalled_on_arrival() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.submit(2, false);
    w.settle();
    let worker = w.worker_of(2);
    assert!(w.migrate_queue(2, 0));
    // It has left there, and has not arrived here.
    w.step(worker.into(), true);
    w.h.quiet();
    w.h.set_command(BUS_MASTER, false);
    w.h.set_command(BUS_MASTER, true);
    assert_eq!(w.h.vectors[2].take(), 0);
    w.settle();
    assert_eq!(w.worker_of(2), 0);
    assert_eq!(w.h.vectors[2].take(), 1);
    w.verify();
}

#[test]
fn remote_engine_created_without_bus_master_waits() {
    let mut h = Host::with(
        crate::migration::world::config(false),
        vec![ns(1, mem(1 << 20), 512)],
    );
    h.c.set_worker(0, wake_flag(&Arc::default()).into());
    h.enable();
    h.create_pair(1, 16);
    assert!(h.use_shadow().is_success());
    h.set_command(BUS_MASTER, false);
    let setup = h.c.remote_engine(1, wake_flag(&Arc::default()).into());
    let io = Rc::new(Io::new(IoOptions::default()));
    let mut engine = setup.unwrap().open(11, &io).unwrap();
    assert!(!engine.shadowed() && !engine.arm());
    h.set_command(BUS_MASTER, true);
    engine.drain_messages();
    assert!(h.c.migrate_queue(1, 1));
    for _ in 0..4 {
        h.round();
        engine.drain_messages();
        engine.poll(h.now, &mut Budget::unlimited());
        h.c.drain_messages();
    }
    assert!(
        engine.shadowed(),
        "the queue is there, with its shadow doorbells"
    );
}
