//! Interrupts of queues on several workers.

use crate::common::*;
use crate::migration::other_worker::wake_flag;
use crate::migration::rules::migrate_to_others;
use crate::migration::world::{PAIRS, World, config};
use controller::pci;
use nvme::Status;
use nvme::feature::Fid;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use volume::{Io, IoOptions};

/// The pending bit array's first byte.
fn pending(h: &mut Host) -> u8 {
    let mut pba = [0; 1];
    h.c.bar0_read(pci::MSIX_PBA_OFFSET, &mut pba);
    pba[0]
}

#[test]
fn pin_combines_all_queues() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    let pin = Arc::<Count>::default();
    for vector in 0..w.h.c.vectors() {
        w.h.c.set_msix(vector, None);
    }
    w.h.c.set_intx(Some(pin.clone()));
    w.wake_all();
    w.h.run();
    assert!((2..=PAIRS).all(|cqid| w.worker_of(cqid) == 0));
    assert!(
        !w.h.c.migrate_queue(2, 1),
        "the pin is one worker's business"
    );
    w.submit(2, true);
    w.settle();
    assert_eq!(pin.take(), 1);
    w.verify();
}

#[test]
fn interrupts_from_every_worker_wait_for_receivers() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.settle();
    w.h.quiet();
    for qid in 2..=PAIRS {
        w.submit(qid, true);
        w.settle();
        assert_eq!(w.h.vectors[usize::from(qid)].take(), 1, "queue {qid}");
    }
    w.h.c.set_msix(3, None);
    w.settle();
    w.submit(3, true);
    w.settle();
    assert_eq!(pending(&mut w.h), 1 << 3);
    let sink = w.h.vectors[3].clone();
    assert_eq!(sink.take(), 0);
    w.h.c.set_msix(3, Some(sink.clone()));
    w.settle();
    assert_eq!(sink.take(), 1);
    assert_eq!(pending(&mut w.h), 0);
    w.verify();
}

/// One worker learns late of receivers that were added and removed: the interrupt that another one
/// could not deliver is not given to them.
#[test]
fn pending_interrupt_skips_removed_receiver() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.settle();
    w.wake_all();
    let (gone, new) = (Arc::<Count>::default(), Arc::<Count>::default());
    w.h.c.set_msix(3, Some(gone.clone()));
    w.h.c.set_msix(3, None);
    assert_eq!((w.worker_of(2), w.worker_of(3)), (1, 2));
    w.step(2, true);
    w.submit(3, true);
    for _ in 0..8 {
        w.step(0, true);
        w.step(2, true);
    }
    assert_eq!(pending(&mut w.h), 1 << 3);
    w.step(1, true);
    w.step(0, true);
    assert_eq!((gone.take(), pending(&mut w.h)), (0, 1 << 3));
    w.h.c.set_msix(3, Some(new.clone()));
    assert_eq!((new.take(), pending(&mut w.h)), (1, 0));
    w.verify();
}

/// The VMM is answered when every worker knows that a receiver is removed: one that does not may
/// still signal it.
#[test]
fn receiver_removal_waits_for_every_worker() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.settle();
    w.wake_all();
    w.h.quiet();
    assert!(w.h.c.receivers_settled());
    w.h.c.set_msix(3, None);
    w.submit(3, true);
    (0..8).for_each(|_| {
        w.step(2, false);
    });
    assert_eq!(w.h.vectors[3].take(), 1, "it did not know");
    w.step(1, true);
    assert!(!w.h.c.receivers_settled());
    w.step(2, true);
    assert!(w.h.c.receivers_settled());
    w.submit(3, true);
    w.settle();
    assert_eq!((w.h.vectors[3].take(), pending(&mut w.h)), (0, 1 << 3));
    w.verify();
}

/// A worker that does not know of the receiver yet leaves the interrupt, and it gets there.
#[test]
fn late_worker_interrupt_reaches_receiver() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.settle();
    w.wake_all();
    w.h.c.set_msix(3, None);
    w.settle();
    w.wake_all();
    let sink = Arc::<Count>::default();
    w.h.c.set_msix(3, Some(sink.clone()));
    w.submit(3, true);
    for _ in 0..8 {
        w.step(2, false);
    }
    assert_eq!((sink.take(), pending(&mut w.h)), (0, 1 << 3));
    w.settle();
    assert_eq!((sink.take(), pending(&mut w.h)), (1, 0));
    w.verify();
}

/// A worker that opens its engine late is told of a reset that is long over: what is pending since
/// then stays so.
#[test]
fn late_remote_engine_keeps_pending_interrupt() {
    let mut h = Host::with(config(false), vec![ns(1, mem(8 << 20), 512)]);
    let flag = wake_flag(&Arc::default());
    h.c.set_worker(0, flag.clone().into());
    h.enable();
    let setup = h.c.remote_engine(1, flag.into()).unwrap();
    h.disable();
    h.run();
    h.enable();
    h.create_pair(1, 16);
    h.c.set_msix(1, None);
    let command = h.rw(nvme::NvmOpcode::READ, 1, 0, 1, DATA);
    assert_eq!(h.io(command), Status::SUCCESS);
    assert_eq!(pending(&mut h), 1 << 1);
    let _engine = setup
        .open(10, &Rc::new(Io::new(IoOptions::default())))
        .unwrap();
    assert_eq!(pending(&mut h), 1 << 1);
}

/// An interrupt that is being held back when its queue moves is sent by the worker that leaves off.
#[test]
fn coalesced_interrupt_survives_migration() {
    let mut w = World::new(false);
    w.wake_all();
    // Ten completions, or 25 ms.
    let coalescing = 255 << 8 | 9;
    let done = w.h.set_feature(Fid::INTERRUPT_COALESCING, coalescing);
    assert_eq!(done.status(), Status::SUCCESS);
    w.h.quiet();
    for (done, worker) in (1..).zip([1, 2, 0]) {
        w.submit(2, true);
        w.wake_all();
        w.h.until(|h| h.c.stats().queues[2].completions.get() == done);
        w.h.run();
        assert_eq!(w.h.vectors[2].take(), 0);
        assert!(w.migrate_queue(2, worker));
        w.wake_all();
        w.h.run();
        assert_eq!(w.worker_of(2), worker);
        assert_eq!(w.h.vectors[2].take(), 1, "to {worker}");
    }
    w.verify();
}

/// A worker that has nothing else to do sleeps until a delayed interrupt is due.
#[test]
fn coalesced_interrupt_is_sent_by_sleeping_worker() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    let done = w.h.set_feature(Fid::INTERRUPT_COALESCING, 255 << 8 | 9);
    assert_eq!(done.status(), Status::SUCCESS);
    w.h.quiet();
    w.submit(2, true);
    let before = w.h.now;
    w.settle();
    assert_eq!(w.h.vectors[2].take(), 1);
    assert_eq!(w.h.now - before, Duration::from_micros(25_500));
}
