//! Queues, doorbells, interrupts, and guest memory that comes and goes.

mod common;

use common::*;
use controller::{ControllerConfig, pci};
use dma::Prot;
use nvme::feature::Fid;
use nvme::regs;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use volume::{Effect, Fault, OpKind};

fn read(h: &Host) -> Command {
    h.rw(NvmOpcode::READ, 1, 0, 1, DATA)
}

#[test]
fn a_full_completion_queue_waits_for_its_head() {
    for ring in [Ring::Register, Ring::Mapped, Ring::Shadow] {
        let config = ControllerConfig {
            mapped_doorbells: ring == Ring::Mapped,
            ..Default::default()
        };
        let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
        h.enable();
        // Four completion entries, 64 submission entries.
        let (sq, cq) = (RINGS, RINGS + 0x1000);
        assert_eq!(h.create_cq(1, 4, cq, Some(1)), Status::SUCCESS);
        assert_eq!(h.create_sq(1, 1, 64, sq), Status::SUCCESS);
        if ring == Ring::Shadow {
            assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        let mut sent = Vec::new();
        h.pairs.insert(1, Pair::new(sq, cq, 64));
        for i in 0..40 {
            let command = h.rw(NvmOpcode::READ, 1, i % 64, 1, DATA);
            sent.push(h.push(1, command));
        }
        h.ring_sq(1);
        h.pairs.get_mut(&1).unwrap().size = 4;
        h.run();
        assert_eq!(
            h.c.stats().queues[1].completions.get(),
            3,
            "one entry stays free"
        );
        // Asleep: the head must wake it, or be seen.
        let mut got = Vec::new();
        for _ in 0..1000 {
            assert!(!h.c.arm() && !h.c.recheck());
            let rung = h.c.stats().queues[1].mmio_doorbells.get();
            let Some(done) = h.reap(1) else { break };
            got.push(done.cid.get());
            if ring == Ring::Shadow && h.c.stats().queues[1].completions.get() < 40 {
                assert!(
                    h.c.stats().queues[1].mmio_doorbells.get() > rung,
                    "a full queue's head rings"
                );
            }
            h.run();
        }
        assert_eq!(got, sent, "{ring:?}: nothing lost, nothing twice, in order");
        let stats = h.c.stats();
        assert_eq!(
            (
                stats.queues[1].commands.get(),
                stats.queues[1].completions.get()
            ),
            (40, 40)
        );
        assert!(!h.csts().cfs());
    }
}

#[test]
fn a_head_that_the_host_failed_to_announce_is_found_by_the_later_look() {
    let mut h = Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)]);
    h.enable();
    let (sq, cq) = (RINGS, RINGS + 0x1000);
    h.create_cq(1, 2, cq, Some(1));
    h.create_sq(1, 1, 64, sq);
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    h.pairs.insert(1, Pair::new(sq, cq, 64));
    for _ in 0..3 {
        let command = read(&h);
        h.push(1, command);
    }
    h.ring_sq(1);
    h.run();
    assert!(!h.c.arm());
    // A host without the barrier: it stored the head, and did not ring.
    h.cell(SHADOW + 3 * 4).store(1u32.to_le(), Ordering::SeqCst);
    assert!(h.c.recheck(), "the completion queue's head");
    h.run();
    assert_eq!(h.c.stats().queues[1].completions.get(), 2);
    // The same for a submission queue's tail.
    h.cell(SHADOW + 3 * 4).store(0u32.to_le(), Ordering::SeqCst);
    h.run();
    assert!(!h.c.arm());
    h.cell(SHADOW + 2 * 4).store(4u32.to_le(), Ordering::SeqCst);
    assert!(h.c.recheck(), "the submission queue's tail");
}

#[test]
fn several_submission_queues_on_one_completion_queue() {
    let mut h = Host::ready();
    for qid in 2..=4u16 {
        let sq = RINGS + u64::from(qid) * RING_STEP;
        assert_eq!(h.create_sq(qid, 1, 16, sq), Status::SUCCESS);
        h.pairs.insert(qid, Pair::new(sq, 0, 16));
    }
    let mut sent = Vec::new();
    for _ in 0..8 {
        for qid in 1..=4 {
            let command = read(&h);
            sent.push((qid, h.submit(qid, command)));
        }
    }
    h.run();
    let mut got: Vec<_> = h
        .reap_all(1)
        .iter()
        .map(|c| (c.sqid.get(), c.cid.get()))
        .collect();
    got.sort();
    sent.sort();
    assert_eq!(got, sent);
    assert_eq!(
        plain(h.delete(AdminOpcode::DELETE_IO_CQ, 1)),
        Status::INVALID_QUEUE_DELETION
    );
    for qid in 1..=3 {
        assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, qid), Status::SUCCESS);
        assert_eq!(
            plain(h.delete(AdminOpcode::DELETE_IO_CQ, 1)),
            Status::INVALID_QUEUE_DELETION
        );
    }
    let command = read(&h);
    h.submit(4, command);
    h.run();
    assert_eq!(h.reap_all(1).len(), 1);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 4), Status::SUCCESS);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 1), Status::SUCCESS);
}

#[test]
fn a_full_queue_does_not_hold_up_its_deletion() {
    let mut h = Host::ready();
    h.create_cq(2, 2, RINGS + 0x9000, None);
    h.create_sq(2, 2, 16, RINGS + 0x8000);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    for _ in 0..8 {
        let command = read(&h);
        h.push(2, command);
    }
    h.ring_sq(2);
    h.run();
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 2), Status::SUCCESS);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 2), Status::SUCCESS);
    h.create_pair(2, 16);
    let command = read(&h);
    assert_eq!(h.command(2, command).status(), Status::SUCCESS);
}

#[test]
fn doorbell_values_that_cannot_be_are_not_used() {
    let mut h = Host::ready();
    let fetched = |h: &Host| h.c.stats().queues[1].commands.get();
    let errors = |h: &Host| h.c.stats().error_log_entries.get();
    for value in [64, 65, 0xffff, 0x10000, u32::MAX] {
        let before = errors(&h);
        h.set32(Host::doorbell(1, false), value);
        h.run();
        h.set32(Host::doorbell(1, true), value);
        h.run();
        // A head is looked at when it matters.
        assert_eq!(fetched(&h), 0, "{value:#x}");
        assert_eq!(errors(&h) - before, 1, "{value:#x}");
        h.set32(Host::doorbell(1, false), 0);
        h.set32(Host::doorbell(1, true), 0);
        h.run();
    }
    // A tail that goes back over entries that were not fetched.
    let (volume, faults) = faulty(1 << 20);
    let config = ControllerConfig {
        max_in_flight: 1,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, volume, 512)]);
    h.enable();
    h.create_pair(1, 64);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    for _ in 0..10 {
        let command = read(&h);
        h.push(1, command);
    }
    h.ring_sq(1);
    h.run_held(&faults, 1);
    let before = errors(&h);
    h.set32(Host::doorbell(1, false), 5);
    h.run_held(&faults, 1);
    assert_eq!(errors(&h) - before, 1);
    faults.clear();
    faults.release();
    h.run();
    assert_eq!(h.reap_all(1).len(), 10);
    // A head that consumes what was never posted, on a full queue.
    let mut h = Host::ready();
    h.create_cq(2, 4, RINGS + 0x9000, None);
    h.create_sq(2, 2, 16, RINGS + 0x8000);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    for _ in 0..8 {
        let command = read(&h);
        h.push(2, command);
    }
    h.ring_sq(2);
    h.run();
    assert_eq!(h.c.stats().queues[2].completions.get(), 3);
    h.set32(Host::doorbell(2, true), 3);
    h.run();
    assert_eq!(h.c.stats().queues[2].completions.get(), 6);
    let before = errors(&h);
    h.set32(Host::doorbell(2, true), 3 + 4);
    h.run();
    assert_eq!(h.c.stats().queues[2].completions.get(), 6);
    assert_eq!(errors(&h) - before, 1);
    // Three entries stand, from index 3 on: index 2 is their end; 3 again consumes none.
    h.set32(Host::doorbell(2, true), 2);
    h.run();
    assert_eq!(h.c.stats().queues[2].completions.get(), 8);
}

#[test]
fn doorbells_of_no_queue_are_events_only_while_enabled() {
    let mut h = Host::with(ControllerConfig::default(), vec![]);
    h.set32(Host::doorbell(3, true), 1);
    h.run();
    assert_eq!(h.c.stats().error_log_entries.get(), 0);
    h.enable();
    for offset in [
        Host::doorbell(3, true),
        Host::doorbell(64, false),
        pci::DOORBELL_OFFSET + 0xffc,
    ] {
        h.set32(offset, 1);
    }
    h.run();
    assert_eq!(h.c.stats().error_log_entries.get(), 3);
}

#[test]
fn msix_one_interrupt_for_a_batch() {
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

#[test]
fn interrupts_coalesce() {
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
fn the_pin_follows_the_heads() {
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
    // Masked by INTMS, the interrupt comes with INTMC.
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
    h.c.config_write(4, &[0, 4]);
    h.submit(0, command);
    h.run();
    assert_eq!(pin.take(), 0);
    h.c.config_write(4, &[0, 0]);
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
fn the_pin_falls_with_a_head_in_the_shadow_buffer() {
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

#[test]
fn doorbell_buffers_that_cannot_be() {
    let mut h = Host::ready();
    for (shadow, eventidx) in [
        (SHADOW + 4, EVENTIDX),
        (SHADOW, EVENTIDX + 0x800),
        (LOW_SIZE, EVENTIDX),
        (SHADOW, HIGH - 4096),
        (!4095, EVENTIDX),
    ] {
        assert_eq!(
            plain(h.configure_shadow(shadow, eventidx)),
            Status::INVALID_FIELD,
            "{shadow:#x} {eventidx:#x}"
        );
        assert!(!h.c.shadowed());
    }
    let command = read(&h);
    assert_eq!(h.io(command), Status::SUCCESS);
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    assert_eq!(
        plain(h.configure_shadow(SHADOW + 4, EVENTIDX)),
        Status::INVALID_FIELD
    );
    assert!(h.c.shadowed(), "what was configured stays");
    for _ in 0..200 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
}

#[test]
fn doorbell_buffer_config_repeated_with_other_buffers() {
    let mut h = Host::ready();
    h.create_pair(2, 16);
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    let command = read(&h);
    for _ in 0..20 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    // A last value in the old buffers, not looked at yet.
    h.push(1, command);
    let tail = h.pairs[&1].tail;
    h.cell(SHADOW + 2 * 4).store(tail.to_le(), Ordering::SeqCst);
    let other = (0xa000, 0xb000);
    h.write(other.0, &[0xff; 0x2000]);
    let mut again = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
    again.set_prps(other.0, other.1);
    let cid = h.push(0, again);
    let tail0 = h.pairs[&0].tail;
    h.set32(Host::doorbell(0, false), tail0);
    h.run();
    assert_eq!(h.reap(0).unwrap().cid.get(), cid);
    assert_eq!(h.reap_all(1).len(), 1, "nothing of the old buffers is lost");
    // From now on the old ones are never touched again.
    h.write(SHADOW, &[0x5a; 0x2000]);
    let ring = |h: &mut Host, index: u64, value: u32| {
        h.cell(other.0 + index * 4)
            .store(value.to_le(), Ordering::SeqCst);
    };
    let head = h.pairs[&1].head;
    ring(&mut h, 3, head);
    for _ in 0..100 {
        h.push(1, command);
        let tail = h.pairs[&1].tail;
        ring(&mut h, 2, tail);
        h.run();
        h.ring = Ring::Register;
        assert!(h.peek(1).is_some());
        let pair = h.pairs.get_mut(&1).unwrap();
        pair.head = (pair.head + 1) % pair.size;
        pair.phase ^= pair.head == 0;
        let head = pair.head;
        ring(&mut h, 3, head);
        h.c.arm();
    }
    assert_eq!(h.read(SHADOW, 0x2000), [0x5a; 0x2000]);
}

#[test]
fn doorbell_buffers_unmapped_and_mapped_back() {
    let mut h = Host::ready();
    // The buffers in a window of their own.
    let window = 0x100_0000_0000;
    h.c.dma_map(window, 0x4000, Some((h.low.clone(), SHADOW)), Prot::RW)
        .unwrap();
    assert_eq!(h.configure_shadow(window, window + 0x1000), Status::SUCCESS);
    h.ring = Ring::Shadow;
    let command = read(&h);
    for _ in 0..70 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    h.c.dma_unmap(window, 0x4000).unwrap();
    assert!(h.c.dma_quiesced());
    assert!(!h.c.shadowed());
    let before = h.read(SHADOW, 0x2000);
    // Registers go on.
    h.ring = Ring::Register;
    for _ in 0..70 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    h.c.arm();
    assert_eq!(h.read(SHADOW, 0x2000), before, "not touched while unmapped");
    h.c.dma_map(window, 0x4000, Some((h.low.clone(), SHADOW)), Prot::RW)
        .unwrap();
    assert!(h.c.shadowed());
    h.run();
    h.ring = Ring::Shadow;
    h.c.arm();
    for _ in 0..70 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
}

#[test]
fn an_unmap_waits_for_commands_in_flight() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let window = 0x100_0000_0000;
    h.c.dma_map(window, 0x4000, Some((h.high.clone(), 0)), Prot::RW)
        .unwrap();
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, window);
    h.submit(1, command);
    h.run_held(&faults, 1);
    h.c.dma_unmap(window, 0x4000).unwrap();
    assert!(!h.c.dma_quiesced(), "a command may still write there");
    // New commands do not find it, and do not delay the answer.
    h.submit(1, command);
    h.run_held(&faults, 1);
    assert_eq!(
        plain(h.reap(1).unwrap().status()),
        Status::DATA_TRANSFER_ERROR
    );
    assert!(!h.c.dma_quiesced());
    faults.clear();
    faults.release();
    h.run();
    assert!(h.c.dma_quiesced());
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    assert!(h.c.dma_unmap(window, 0x4000).is_err(), "it is gone");
}

#[test]
fn a_queue_whose_ring_was_unmapped_stalls_and_goes_on() {
    let mut h = Host::ready();
    let window = 0x100_0000_0000;
    let map = |h: &mut Host, at: u64| {
        let memory = h.low.clone();
        h.c.dma_map(
            window + at,
            0x1000,
            Some((memory, RINGS + 0x8000 + at)),
            Prot::RW,
        )
        .unwrap();
    };
    map(&mut h, 0);
    map(&mut h, 0x1000);
    h.create_cq_in(window);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    let command = read(&h);
    assert_eq!(h.command(2, command).status(), Status::SUCCESS);
    for (gone, stands) in [(0, 0x1000), (0x1000, 0)] {
        h.c.dma_unmap(window + gone, 0x1000).unwrap();
        assert!(h.c.dma_quiesced());
        for _ in 0..3 {
            h.submit(2, command);
        }
        h.run();
        assert!(h.reap(2).is_none(), "without the ring at {gone:#x}");
        let io = read(&h);
        assert_eq!(h.io(io), Status::SUCCESS, "others do not care");
        map(&mut h, gone);
        h.run();
        let done = h.reap_all(2);
        assert_eq!(
            done.len(),
            3,
            "after {gone:#x} came back ({stands:#x} stood)"
        );
        assert!(done.iter().all(|d| d.status().is_success()));
    }
    // All windows away: even the admin queue stands still.
    h.c.dma_unmap_all();
    let low = h.low.clone();
    h.submit(0, Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0));
    h.run();
    assert!(h.reap(0).is_none());
    h.c.dma_map(LOW, LOW_SIZE, Some((low, 0)), Prot::RW)
        .unwrap();
    h.run();
    assert!(h.reap(0).is_some());
}

#[test]
fn windows_without_memory_or_without_write() {
    let mut h = Host::ready();
    let (bare, ro) = (0x100_0000_0000, 0x200_0000_0000);
    h.c.dma_map(bare, 0x10000, None, Prot::RW).unwrap();
    h.c.dma_map(ro, 0x10000, Some((h.high.clone(), 0)), Prot::RO)
        .unwrap();
    let to = |h: &mut Host, opcode, iova| {
        let command = h.rw(opcode, 1, 0, 1, iova);
        plain(h.io(command))
    };
    assert_eq!(
        to(&mut h, NvmOpcode::READ, bare),
        Status::DATA_TRANSFER_ERROR
    );
    assert_eq!(to(&mut h, NvmOpcode::READ, ro), Status::DATA_TRANSFER_ERROR);
    assert_eq!(to(&mut h, NvmOpcode::WRITE, ro), Status::SUCCESS);
    assert_eq!(
        plain(h.create_cq_status(5, ro)),
        Status::DATA_TRANSFER_ERROR
    );
    assert_eq!(
        plain(h.configure_shadow(ro, ro + 0x1000)),
        Status::INVALID_FIELD
    );
}

#[test]
fn sixty_four_queues_of_4096_entries() {
    for ring in [Ring::Register, Ring::Mapped, Ring::Shadow] {
        let config = ControllerConfig {
            mapped_doorbells: ring == Ring::Mapped,
            ..Default::default()
        };
        let mut h = Host::with(
            config,
            vec![ns(1, mem(1 << 20), 512), ns(2, null(1 << 30), 4096)],
        );
        h.enable();
        // Rings of 256 KiB and 64 KiB: they need a memory of their own.
        let rings = dma::Memory::anonymous(64 * 0x50000).unwrap();
        let base = 0x300_0000_0000;
        h.c.dma_map(base, 64 * 0x50000, Some((rings.clone(), 0)), Prot::RW)
            .unwrap();
        for q in 0..64u64 {
            let at = base + q * 0x50000;
            let create = |h: &mut Host, opcode: AdminOpcode, iova, cdw11: u32| {
                let mut command = Command::new(opcode.0, 0, 0);
                command.set_prps(iova, 0);
                command.cdw10 = (4095 << 16 | (q as u32 + 1)).into();
                command.cdw11 = cdw11.into();
                h.admin(command).status()
            };
            let qid = q as u32 + 1;
            assert_eq!(
                create(
                    &mut h,
                    AdminOpcode::CREATE_IO_CQ,
                    at + 0x40000,
                    3 | qid << 16
                ),
                Status::SUCCESS
            );
            assert_eq!(
                create(&mut h, AdminOpcode::CREATE_IO_SQ, at, 1 | qid << 16),
                Status::SUCCESS
            );
        }
        if ring == Ring::Shadow {
            assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        // Every queue is filled to the last entry, twice round.
        let mut tails = [0u32; 64];
        for turn in 0..3u32 {
            for (q, tail) in tails.iter_mut().enumerate() {
                for i in 0..4095u32 {
                    let mut command = h.rw(NvmOpcode::READ, 1 + (i & 1), 0, 1, DATA);
                    command.cid = (i as u16).into();
                    let at = q * 0x50000 + *tail as usize * 64;
                    rings
                        .write(at, zerocopy::IntoBytes::as_bytes(&command))
                        .unwrap();
                    *tail = (*tail + 1) % 4096;
                }
                h.ring_value(q as u16 + 1, false, *tail);
            }
            h.run();
            for (q, tail) in tails.iter().enumerate() {
                let stats = h.c.stats();
                assert_eq!(
                    stats.queues[q + 1].completions.get(),
                    4095 * (u64::from(turn) + 1)
                );
                // All at once: the completion queue was filled to its last entry as well.
                h.ring_value(q as u16 + 1, true, *tail);
            }
        }
        assert!(!h.csts().cfs());
    }
}

#[test]
fn mapped_doorbells_need_polling_and_no_message() {
    let config = ControllerConfig {
        mapped_doorbells: true,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
    assert!(!h.c.needs_polling());
    h.enable();
    assert!(h.c.needs_polling());
    h.create_pair(1, 8);
    let command = read(&h);
    for _ in 0..50 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    assert_eq!(h.c.stats().queues[1].mmio_doorbells.get(), 0);
    // The next client's doorbells start at zero.
    h.c.disconnect();
    let pages = h.c.bar0_pages();
    for i in 0..130 {
        let cell = pages.cell(pci::DOORBELL_OFFSET as usize / 4 + i).unwrap();
        assert_eq!(cell.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn shadow_doorbells_save_the_exits() {
    let mut h = Host::ready();
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    let command = read(&h);
    let rung = h.c.stats().queues[1].mmio_doorbells.get();
    for _ in 0..640 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    let rung = h.c.stats().queues[1].mmio_doorbells.get() - rung;
    assert!(rung <= 2, "{rung} register writes in ten turns of the ring");
    // Asleep, the next one rings.
    assert!(!h.c.arm());
    let before = h.c.stats().queues[1].mmio_doorbells.get();
    h.submit(1, command);
    assert_eq!(h.c.stats().queues[1].mmio_doorbells.get(), before + 1);
}
