//! Doorbells: registers, mapped cells, shadow buffers, and values that cannot be.

use crate::common::*;
use controller::{ControllerConfig, pci};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::atomic::Ordering;
use volume::{Effect, Fault, OpKind};

fn read(h: &Host) -> Command {
    h.rw(NvmOpcode::READ, 1, 0, 1, DATA)
}

#[test]
fn unannounced_cq_head_is_found_later() {
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
fn invalid_doorbell_value_is_ignored() {
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
    // A tail that moves backwards over entries that were not fetched.
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
fn doorbell_of_missing_queue_is_event_only_while_enabled() {
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
fn invalid_doorbell_buffers_are_refused() {
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
fn doorbell_buffer_config_moves_to_other_buffers() {
    let mut h = Host::ready();
    h.create_pair(2, 16);
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    let command = read(&h);
    for _ in 0..20 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    // A last value in the old buffers, not looked at yet.
    h.push(1, command);
    let tail = h.pairs[&1].sq.tail;
    h.cell(SHADOW + 2 * 4).store(tail.to_le(), Ordering::SeqCst);
    let other = (0xa000, 0xb000);
    h.write(other.0, &[0xff; 0x2000]);
    let mut again = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
    again.set_prps(other.0, other.1);
    let cid = h.push(0, again);
    let tail0 = h.pairs[&0].sq.tail;
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
    let head = h.pairs[&1].cq.head;
    ring(&mut h, 3, head);
    for _ in 0..100 {
        h.push(1, command);
        let tail = h.pairs[&1].sq.tail;
        ring(&mut h, 2, tail);
        h.run();
        h.ring = Ring::Register;
        assert!(h.peek(1).is_some());
        let pair = h.pairs.get_mut(&1).unwrap();
        pair.cq.advance();
        let head = pair.cq.head;
        ring(&mut h, 3, head);
        h.c.arm();
    }
    assert_eq!(h.read(SHADOW, 0x2000), [0x5a; 0x2000]);
}

#[test]
fn cq_head_in_old_buffers_is_kept() {
    let mut h = Host::ready();
    h.create_cq(2, 4, RINGS + 0x9000, None);
    h.create_sq(2, 2, 16, RINGS + 0x8000);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    assert_eq!(h.configure_shadow(SHADOW, EVENTIDX), Status::SUCCESS);
    let command = read(&h);
    let send = |h: &mut Host, shadow: u64| {
        for _ in 0..3 {
            h.push(2, command);
        }
        let tail = h.pairs[&2].sq.tail;
        h.cell(shadow + 4 * 4).store(tail.to_le(), Ordering::SeqCst);
        h.run();
    };
    send(&mut h, SHADOW);
    assert_eq!(h.c.stats().queues[2].completions.get(), 3);
    // All consumed; nobody has looked at it yet.
    h.cell(SHADOW + 5 * 4).store(3u32.to_le(), Ordering::SeqCst);
    assert_eq!(h.configure_shadow(0xa000, 0xb000), Status::SUCCESS);
    send(&mut h, 0xa000);
    assert_eq!(h.c.stats().queues[2].completions.get(), 6);
}

#[test]
fn mapped_doorbells_are_polled_without_messages() {
    let config = ControllerConfig {
        mapped_doorbells: true,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
    assert!(!h.c.is_unannounced());
    h.enable();
    assert!(h.c.is_unannounced());
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
fn shadow_doorbells_save_exits() {
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
