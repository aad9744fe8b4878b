//! Interrupts: MSI-X, coalescing, and the level of the pin.

use crate::common::*;
use controller::{ControllerConfig, MAX_IO_QUEUES, pci};
use nvme::feature::Fid;
use nvme::regs;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::Duration;

fn read(h: &Host) -> Command {
    h.rw(NvmOpcode::READ, 1, 0, 1, DATA)
}

fn pin_host() -> (Host, Arc<Count>) {
    let mut h = Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)]);
    for v in 0..h.c.vectors() {
        h.c.set_msix(v, None);
    }
    let pin: Arc<Count> = Arc::default();
    h.c.set_intx(Some(pin.clone()));
    h.enable();
    (h, pin)
}

#[test]
fn msix_sends_one_interrupt_per_batch() {
    let mut h = Host::ready();
    h.quiet();
    for _ in 0..20 {
        let command = read(&h);
        h.push(1, command);
    }
    h.ring_sq(1);
    h.run();
    assert_eq!(h.vectors[1].take(), 1);
    assert_eq!(h.vectors[0].take(), 0);
    assert_eq!(h.c.stats().queues[1].interrupts.get(), 1);
    // Without a receiver it is pending.
    h.c.set_msix(1, None);
    h.reap_all(1);
    let command = read(&h);
    h.submit(1, command);
    h.run();
    assert_eq!(h.reg32(pci::MSIX_PBA_OFFSET), 2);
    let sink: Arc<Count> = Arc::default();
    h.c.set_msix(1, Some(sink.clone()));
    assert_eq!((sink.take(), h.reg32(pci::MSIX_PBA_OFFSET)), (1, 0));
    // A queue that wants no interrupts gets none.
    h.create_cq(2, 16, RINGS + 0x9000, None);
    h.create_sq(2, 2, 16, RINGS + 0x8000);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    h.run();
    h.quiet();
    let command = read(&h);
    h.submit(2, command);
    h.run();
    assert!(h.reap(2).is_some());
    assert_eq!(h.vectors.iter().map(|v| v.take()).sum::<u32>(), 0);
}

/// Each of them has commands and interrupts of its own, in the next process, too.
#[test]
fn maximum_queues_work_and_survive_process() {
    let config = ControllerConfig {
        io_queues: MAX_IO_QUEUES,
        ..ControllerConfig::default()
    };
    let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
    h.enable();
    assert_eq!(h.c.vectors(), 129);
    for qid in 1..=128 {
        let at = DATA + (8 << 20) + u64::from(qid) * RING_STEP;
        h.create_pair_at(qid, 16, at, at + 0x1000);
    }
    assert_eq!(
        plain(h.create_cq(129, 16, RINGS, Some(1))),
        Status::INVALID_QUEUE_IDENTIFIER
    );
    for dies in [false, true] {
        if dies {
            h.die();
        }
        h.quiet();
        for qid in 1..=128 {
            let command = read(&h);
            h.submit(qid, command);
            h.run();
            assert_eq!(h.reap(qid).unwrap().status(), Status::SUCCESS, "{qid}");
            let told: Vec<u32> = h.vectors.iter().map(|vector| vector.take()).collect();
            assert_eq!((told[usize::from(qid)], told.iter().sum()), (1, 1), "{qid}");
        }
    }
    // Without a receiver it is pending, wherever its bit is.
    for qid in [1, 31, 32, 63, 64, 65, 127, 128] {
        h.c.set_msix(qid, None);
        let command = read(&h);
        h.submit(qid, command);
        h.run();
        let word = pci::MSIX_PBA_OFFSET + u64::from(qid / 32) * 4;
        assert_eq!(h.reg32(word), 1 << (qid % 32), "{qid}");
        let sink: Arc<Count> = Arc::default();
        h.c.set_msix(qid, Some(sink.clone()));
        assert_eq!((sink.take(), h.reg32(word)), (1, 0), "{qid}");
    }
}

#[test]
fn interrupts_are_coalesced() {
    let mut h = Host::ready();
    // Four completions or 1 ms.
    h.set_feature(Fid::INTERRUPT_COALESCING, 10 << 8 | 3);
    h.quiet();
    let send = |h: &mut Host| {
        let command = read(h);
        h.submit(1, command);
        h.run();
    };
    for _ in 0..3 {
        send(&mut h);
    }
    assert_eq!(h.vectors[1].take(), 0);
    let due = h.c.deadline().unwrap();
    assert_eq!(due, h.now + Duration::from_millis(1));
    send(&mut h);
    assert_eq!(
        (h.vectors[1].take(), h.c.deadline()),
        (1, None),
        "the fourth"
    );
    send(&mut h);
    h.now += Duration::from_micros(999);
    h.run();
    assert_eq!(h.vectors[1].take(), 0);
    h.now += Duration::from_micros(1);
    h.run();
    assert_eq!((h.vectors[1].take(), h.c.deadline()), (1, None), "in time");
    // Not the admin queue; not a vector that opted out.
    h.simple(AdminOpcode::KEEP_ALIVE, 0);
    h.run();
    assert_eq!(h.vectors[0].take(), 1);
    h.set_feature(Fid::INTERRUPT_VECTOR_CONFIG, 1 | 1 << 16);
    send(&mut h);
    assert_eq!(h.vectors[1].take(), 1);
}

#[test]
fn pin_follows_cq_heads() {
    let (mut h, pin) = pin_host();
    let command = Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0);
    h.submit(0, command);
    h.submit(0, command);
    h.run();
    assert_eq!(pin.take(), 1);
    h.reap(0);
    h.run();
    h.c.unmask_intx();
    assert_eq!(pin.take(), 1, "one entry is left");
    h.reap(0);
    h.run();
    h.c.unmask_intx();
    assert_eq!(pin.take(), 0, "consumed");
    // Masked by INTMS, the interrupt is sent with INTMC.
    h.set32(regs::INTMS, 1);
    assert_eq!((h.reg32(regs::INTMS), h.reg32(regs::INTMC)), (1, 1));
    h.submit(0, command);
    h.run();
    assert_eq!(pin.take(), 0);
    h.set32(regs::INTMC, 1);
    assert_eq!((pin.take(), h.reg32(regs::INTMS)), (1, 0));
    h.reap(0);
    h.run();
    h.c.unmask_intx();
    // Disabled in the command register.
    h.c.config_write(4, &[6, 4]);
    h.submit(0, command);
    h.run();
    assert_eq!(pin.take(), 0);
    h.c.config_write(4, &[6, 0]);
    assert_eq!(pin.take(), 1);
    // Masked by the VMM.
    h.reap(0);
    h.run();
    h.c.unmask_intx();
    h.c.mask_intx();
    h.submit(0, command);
    h.run();
    assert_eq!(pin.take(), 0);
    h.c.unmask_intx();
    assert_eq!(pin.take(), 1);
}

#[test]
fn pin_falls_with_cq_head_in_shadow_buffer() {
    let (mut h, pin) = pin_host();
    h.create_pair(1, 64);
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    h.reap_all(0);
    h.run();
    h.c.unmask_intx();
    pin.take();
    for _ in 0..10 {
        let command = read(&h);
        h.submit(1, command);
        h.run();
        assert_eq!(pin.take(), 1);
        assert!(!h.c.arm() && !h.c.recheck());
        // Asleep: the head has to ring, or the level stays high.
        let rung = h.c.stats().queues[1].mmio_doorbells.get();
        assert!(h.reap(1).is_some());
        assert!(h.c.stats().queues[1].mmio_doorbells.get() > rung);
        h.run();
        h.c.unmask_intx();
        assert_eq!(pin.take(), 0);
    }
}
