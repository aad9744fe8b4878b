//! The PCI command register and power state: Bus Master Enable, Memory Space Enable, Interrupt
//! Disable.
//!
//! Without Bus Master Enable the controller fetches, posts, stores and signals nothing; completions
//! wait meanwhile, and with the bit everything continues.

use crate::common::*;
use controller::ControllerConfig;
use nvme::pci::command::{BUS_MASTER, INTERRUPT_DISABLE, MEMORY_SPACE};
use nvme::regs::{self, Csts};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Effect, Fault, OpKind};

/// Offset of the power management control register.
const PM_CONTROL: u64 = 0x44;

fn config(ring: Ring) -> ControllerConfig {
    ControllerConfig {
        mapped_doorbells: ring == Ring::Mapped,
        ..ControllerConfig::default()
    }
}

/// Everything that the controller could write.
fn memory(h: &Host) -> Vec<u8> {
    let mut all = h.read(LOW, LOW_SIZE as usize);
    all.extend(h.read(HIGH, HIGH_SIZE as usize));
    all
}

fn signals(h: &Host) -> u32 {
    h.vectors.iter().map(|v| v.take()).sum()
}

/// Clears Bus Master Enable, and waits for the answer as a VMM does.
fn clear(h: &mut Host) {
    h.set_command(BUS_MASTER, false);
    h.until(|h| h.c.config_settled());
}

#[test]
fn cleared_bus_master_stops_fetch_completion_and_interrupt() {
    for ring in [Ring::Register, Ring::Mapped, Ring::Shadow] {
        let (volume, faults) = faulty(8 << 20);
        let mut h = Host::with(
            config(ring),
            vec![ns(1, volume, 512), ns(2, null(8 << 20), 512)],
        );
        h.enable();
        h.create_pair(1, 64);
        h.create_pair(2, 64);
        if ring == Ring::Shadow {
            assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        // In flight when the bit is cleared: the answer waits for its data.
        faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
        let held = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
        h.write(DATA, &[0xee; 4096]);
        h.submit(1, held);
        h.run_held(&faults, 1);
        h.quiet();
        h.set_command(BUS_MASTER, false);
        h.round();
        assert!(!h.c.config_settled(), "{ring:?}: a read is in flight");
        faults.release();
        h.until(|h| h.c.config_settled());
        let read = h.read(DATA, 4096) == [0; 4096];
        assert!(read, "{ring:?}: its data was not waited for");
        // Submitted meanwhile, to each kind of queue.
        let read = h.rw(NvmOpcode::READ, 1, 8, 8, DATA + 0x1000);
        let at_once = h.rw(NvmOpcode::READ, 2, 8, 8, DATA + 0x2000);
        let mut identify = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
        identify.cdw10 = 1.into();
        identify.set_prps(PAGE, 0);
        h.write(DATA + 0x1000, &[0xee; 0x2000]);
        h.write(PAGE, &[0xee; 4096]);
        for _ in 0..20 {
            h.submit(1, read);
            h.submit(2, at_once);
        }
        h.submit(0, identify);
        let before = memory(&h);
        h.run();
        // The worker can sleep, as soon as it has seen the doorbells.
        h.until(|h| !h.c.needs_polling() && !h.c.arm() && !h.c.recheck());
        assert!(!h.c.is_unannounced());
        h.run();
        // An interrupt's receiver changes, as when the host masks a vector.
        let sink = h.vectors[1].clone();
        h.c.set_msix(1, None);
        h.c.set_msix(1, Some(sink));
        h.run();
        assert!(memory(&h) == before, "{ring:?}: memory was written");
        assert_eq!(signals(&h), 0, "{ring:?}");
        h.set_command(BUS_MASTER, true);
        h.run();
        assert_eq!(h.reap_all(1).len(), 21, "{ring:?}");
        assert_eq!(h.reap_all(2).len(), 20, "{ring:?}");
        assert_eq!(h.reap_all(0).len(), 1, "{ring:?}");
        let each: Vec<bool> = h.vectors.iter().take(3).map(|v| v.take() > 0).collect();
        assert_eq!(each, [true; 3], "{ring:?}");
        assert!(h.read(DATA + 0x1000, 4096) == [0; 4096]);
        // The host continues as if nothing had been.
        let status = h.io(read);
        assert_eq!(status, Status::SUCCESS, "{ring:?}");
    }
}

#[test]
fn unread_entries_are_signalled_after_bus_master_is_set() {
    let mut h = Host::ready();
    h.create_pair(2, 64);
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.submit(1, read);
    h.submit(2, read);
    h.run();
    assert_eq!((h.vectors[1].take(), h.vectors[2].take()), (1, 1));
    // One is read, the other's interrupt was dropped by the VMM.
    assert!(h.reap(2).is_some());
    clear(&mut h);
    h.run();
    h.quiet();
    h.set_command(BUS_MASTER, true);
    h.run();
    assert_eq!((h.vectors[1].take(), h.vectors[2].take()), (1, 0));
    // It is not told twice.
    h.set_command(BUS_MASTER, true);
    h.run();
    assert_eq!(signals(&h), 0);
    assert_eq!(h.reap_all(1).len(), 1);
}

#[test]
fn coalesced_interrupt_survives_cleared_bus_master() {
    let mut h = Host::ready();
    // Ten completions, or 25.5 ms.
    let time = 255 << 8 | 9;
    let set = h.set_feature(nvme::feature::Fid::INTERRUPT_COALESCING, time);
    assert_eq!(set.status(), Status::SUCCESS);
    h.quiet();
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.submit(1, read);
    h.round();
    assert_eq!(h.vectors[1].take(), 0, "it is delayed");
    clear(&mut h);
    h.now += Duration::from_secs(1);
    h.run();
    assert_eq!(h.vectors[1].take(), 0);
    h.set_command(BUS_MASTER, true);
    h.run();
    assert_eq!(h.vectors[1].take(), 1);
}

#[test]
fn pending_message_waits_for_bus_master() {
    let mut h = Host::ready();
    let sink = h.vectors[1].clone();
    h.c.set_msix(1, None);
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.submit(1, read);
    h.run();
    assert!(h.reap(1).is_some());
    clear(&mut h);
    h.c.set_msix(1, Some(sink));
    h.run();
    assert_eq!(h.vectors[1].take(), 0);
    h.set_command(BUS_MASTER, true);
    assert_eq!(h.vectors[1].take(), 1);
}

#[test]
fn command_in_flight_without_bus_master_is_ended_early() {
    // Requests that can be ended early are, after a second; the host is told to send them again.
    let (volume, faults) = faulty(8 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.submit(1, read);
    h.run_held(&faults, 1);
    h.now = Instant::now();
    h.set_command(BUS_MASTER, false);
    h.run();
    assert!(!h.c.config_settled());
    assert!(h.c.deadline().is_some(), "nothing else wakes the worker");
    h.now = Instant::now() + Duration::from_millis(1100);
    h.until(|h| h.c.config_settled());
    h.set_command(BUS_MASTER, true);
    h.run();
    let completion = h.reap(1).unwrap();
    assert!(completion.status().is(Status::COMMAND_INTERRUPTED));
    assert!(!completion.status().dnr());
    assert_eq!(h.io(read), Status::SUCCESS);

    // Others are waited for, but not for longer than a VMM waits.
    let (volume, faults) = faulty(8 << 20);
    let mut h = Host::ready_with(vec![ns(1, stubborn(volume), 512)]);
    faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    h.submit(1, read);
    h.run_held(&faults, 1);
    h.now = Instant::now();
    h.set_command(BUS_MASTER, false);
    let begin = Instant::now();
    for (after, settled) in [(0, false), (1100, false), (2900, false), (3100, true)] {
        h.now = begin + Duration::from_millis(after);
        h.run();
        assert_eq!(h.c.config_settled(), settled, "after {after} ms");
    }
    assert_eq!(h.c.deadline(), None);
    faults.release();
    h.run();
    h.set_command(BUS_MASTER, true);
    h.run();
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
}

#[test]
fn controller_is_enabled_without_bus_master() {
    let mut h = Host::ready();
    assert_eq!(h.use_shadow(), Status::SUCCESS);
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.submit(1, read);
    h.run();
    clear(&mut h);
    let before = memory(&h);
    h.disable();
    h.run();
    assert!(!h.csts().rdy());
    h.set64(regs::ASQ, ASQ);
    h.set64(regs::ACQ, ACQ);
    h.set32(regs::CC, Host::cc_enabled().into_bits());
    assert!(h.csts().rdy());
    h.run();
    assert!(memory(&h) == before);
    // What the host had of the controller's before is nothing to this one.
    h.write(LOW, &vec![0; LOW_SIZE as usize]);
    h.pairs.clear();
    h.pairs.insert(0, Pair::new(ASQ, ACQ, 32));
    // Doorbell Buffer Config waits, as any command.
    let mut shadow = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
    shadow.set_prps(SHADOW, EVENTIDX);
    h.submit(0, shadow);
    h.run();
    assert!(h.peek(0).is_none() && !h.c.shadowed());
    h.set_command(BUS_MASTER, true);
    h.run();
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
    h.create_pair(1, 64);
    h.ring = Ring::Shadow;
    assert_eq!(h.io(read), Status::SUCCESS);
}

#[test]
fn resets_clear_command_register() {
    for how in 0..3 {
        let mut h = Host::ready();
        let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
        h.submit(1, read);
        match how {
            0 => h.c.reset(),
            1 => h.c.config_write(0x68, &[0x10, 0xa8]),
            _ => h.c.disconnect(),
        }
        if how == 2 {
            let low = h.low.clone();
            h.c.dma_map(LOW, LOW_SIZE, Some((low, 0)), dma::Prot::RW)
                .unwrap();
        }
        h.until(|h| !h.c.is_resetting() && h.c.config_settled());
        assert_eq!(h.command_register(), 0);
        assert_eq!(h.c.deadline(), None);
        // The next host has not set the bit yet.
        let before = memory(&h);
        h.set32(regs::AQA, 31 << 16 | 31);
        h.set64(regs::ASQ, ASQ);
        h.set64(regs::ACQ, ACQ);
        h.set32(regs::CC, Host::cc_enabled().into_bits());
        assert!(h.csts().rdy());
        h.set32(Host::doorbell(0, false), 3);
        h.run();
        assert!(memory(&h) == before, "kind {how}");
    }
}

#[test]
fn reset_without_bus_master_leaves_memory_alone() {
    let (volume, faults) = faulty(8 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.submit(1, read);
    h.run_held(&faults, 1);
    h.set_command(BUS_MASTER, false);
    h.disable();
    h.until(|h| h.c.config_settled() && !h.c.is_resetting());
    let before = memory(&h);
    faults.release();
    h.set_command(BUS_MASTER, true);
    h.run();
    assert!(memory(&h) == before, "completions of before the reset");
    h.enable();
    h.create_pair(1, 64);
    assert_eq!(h.io(read), Status::SUCCESS);
}

#[test]
fn abort_waits_for_bus_master() {
    let (volume, faults) = faulty(8 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    let cid = h.submit(1, read);
    h.run_held(&faults, 1);
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    // Begun before the bit was cleared, answered after it was set.
    h.submit(0, abort);
    h.c.poll(h.now);
    clear(&mut h);
    h.run();
    assert!(h.peek(0).is_none() && h.peek(1).is_none());
    // Submitted without the bit, for a command that is submitted without it.
    let cid = h.submit(1, read);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    h.submit(0, abort);
    h.run();
    h.set_command(BUS_MASTER, true);
    h.run();
    let ended: Vec<Status> = h.reap_all(1).iter().map(|c| c.status()).collect();
    assert_eq!(ended.len(), 2);
    assert!(ended[0].is(Status::ABORT_REQUESTED), "{ended:?}");
    assert_eq!(h.reap_all(0).len(), 2);
}

#[test]
fn memory_space_enable_applies_after_first_use() {
    // A client that has never set it: SPDK's, for one.
    let mut h = Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)]);
    h.c.config_write(4, &0x404u16.to_le_bytes());
    assert_ne!(h.reg64(regs::CAP), u64::MAX);
    h.enable();
    h.create_pair(1, 16);
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    assert_eq!(h.io(read), Status::SUCCESS);
    // Set, and clear again: nothing answers.
    h.set_command(MEMORY_SPACE, false);
    assert_eq!(h.reg32(regs::CSTS), u32::MAX);
    assert_eq!(h.reg64(0x3000), u64::MAX);
    h.set32(regs::CC, 0);
    h.submit(1, read);
    h.run();
    assert!(h.peek(1).is_none(), "a doorbell was seen");
    h.set_command(MEMORY_SPACE, true);
    assert!(h.csts().rdy(), "the write was seen");
    h.ring_sq(1);
    h.run();
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
}

#[test]
fn d3hot_stops_registers_and_commands() {
    let mut h = Host::ready();
    let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
    h.quiet();
    h.submit(1, read);
    h.c.config_write(PM_CONTROL, &[0x0b]);
    h.until(|h| h.c.config_settled());
    let before = memory(&h);
    h.run();
    assert!(memory(&h) == before);
    assert_eq!(h.reg32(regs::CSTS), u32::MAX);
    assert_eq!(signals(&h), 0);
    // No_Soft_Reset: everything is as it was.
    h.c.config_write(PM_CONTROL, &[0x08]);
    h.run();
    assert!(Csts::from_bits(h.reg32(regs::CSTS)).rdy());
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    assert_eq!(h.vectors[1].take(), 1);
}

#[test]
fn interrupt_disable_and_status_follow_standard() {
    let mut h = Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)]);
    for vector in 0..h.c.vectors() {
        h.c.set_msix(vector, None);
    }
    let pin = Arc::new(Count::default());
    h.c.set_intx(Some(pin.clone()));
    h.enable();
    let status = |h: &mut Host| {
        let mut bytes = [0; 4];
        h.c.config_read(4, &mut bytes);
        bytes[2] & 8 != 0
    };
    assert!(!status(&mut h));
    h.set_command(INTERRUPT_DISABLE, true);
    h.submit(0, Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0));
    h.run();
    // PCI Local Bus 3.0, 6.2.3: Interrupt Disable does not change Interrupt Status.
    assert_eq!((pin.take(), status(&mut h)), (0, true));
    h.set_command(INTERRUPT_DISABLE, false);
    assert_eq!((pin.take(), status(&mut h)), (1, true));
    // It is no write to memory: Bus Master Enable does not matter.
    clear(&mut h);
    h.c.unmask_intx();
    assert_eq!((pin.take(), status(&mut h)), (1, true));
    h.reap_all(0);
    assert!(!status(&mut h), "consumed, and no round since");
    h.c.unmask_intx();
    h.set_command(BUS_MASTER, true);
    h.run();
    assert_eq!((pin.take(), status(&mut h)), (0, false));
    // Read only.
    h.c.config_write(6, &[0xff, 0xff]);
    assert!(!status(&mut h));
}

#[test]
fn controller_survives_bus_master_toggled_under_load() {
    for ring in [Ring::Register, Ring::Shadow] {
        let (volume, faults) = faulty(8 << 20);
        let mut h = Host::ready_with(vec![ns(1, volume, 512), ns(2, null(8 << 20), 512)]);
        h.create_pair(2, 16);
        if ring == Ring::Shadow {
            assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        let mut seed = 7u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            seed >> 33
        };
        let (mut submitted, mut reaped) = ([0usize; 3], [0usize; 3]);
        for toggle in 0..10_000 {
            for _ in 0..random() % 3 {
                let qid = 1 + (random() % 2) as u16;
                if submitted[usize::from(qid)] - reaped[usize::from(qid)] < 14 {
                    let nsid = 1 + (random() % 2) as u32;
                    let place = random() % 64;
                    let read = h.rw(NvmOpcode::READ, nsid, place * 8, 8, DATA + place * 4096);
                    h.submit(qid, read);
                    submitted[usize::from(qid)] += 1;
                }
            }
            if random() % 16 == 0 {
                faults.add(Fault::nth(OpKind::Any, 1 + random() % 3, Effect::Hold));
            }
            for _ in 0..random() % 3 {
                h.round();
            }
            h.set_command(BUS_MASTER, random() % 2 == 0);
            if random() % 8 == 0 {
                faults.release();
                h.until(|h| h.c.config_settled());
            }
            for qid in 1..=2u16 {
                if random() % 2 == 0 {
                    reaped[usize::from(qid)] += h.reap_all(qid).len();
                }
            }
            if toggle % 1000 == 999 {
                faults.clear();
                faults.release();
                h.quiet();
                clear(&mut h);
                let before = memory(&h);
                h.run();
                assert!(memory(&h) == before && signals(&h) == 0);
                h.set_command(BUS_MASTER, true);
                h.run();
                for qid in 1..=2u16 {
                    reaped[usize::from(qid)] += h.reap_all(qid).len();
                }
                assert_eq!(submitted, reaped, "{ring:?}, toggle {toggle}");
            }
        }
    }
}
