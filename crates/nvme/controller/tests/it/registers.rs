//! Registers, enable, disable, shutdown and the resets.

use crate::common::*;
use controller::{ControllerConfig, pci};
use nvme::aen::{AsyncEvent, ErrorEvent};
use nvme::pci::command;
use nvme::regs::{self, Aqa, Cap, Cc, CcCss, Shn, Shst, Vs};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::time::Instant;
use volume::{Effect, Fault, IoErrorKind, OpKind};

fn fresh() -> Host {
    Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)])
}

#[test]
fn registers_read_alike_in_every_width() {
    let mut h = fresh();
    let cap = h.reg64(regs::CAP);
    assert_eq!(
        cap,
        u64::from(h.reg32(regs::CAP)) | u64::from(h.reg32(regs::CAP + 4)) << 32
    );
    let cap = Cap::from_bits(cap);
    assert_eq!((cap.mqes_z(), cap.cqr(), cap.dstrd()), (4095, true, 0));
    assert!(cap.nssrs() && cap.css().ncss() && cap.crwms());
    assert_eq!(cap.to(), 60);
    assert_eq!(h.reg32(regs::VS), Vs::V2_1.into_bits());
    h.set64(regs::ASQ, 0x1234_5678_9abc_def0);
    assert_eq!(
        h.reg64(regs::ASQ),
        0x1234_5678_9abc_d000,
        "bits 11:0 are reserved"
    );
    h.set32(regs::ACQ, 0x9abc_d000);
    h.set32(regs::ACQ + 4, 0x1234_5678);
    assert_eq!(h.reg64(regs::ACQ), 0x1234_5678_9abc_d000);
    h.set32(regs::AQA, u32::MAX);
    assert_eq!(h.reg32(regs::AQA), 0x0fff_0fff);
    // Single bytes and unaligned reads see the same bytes.
    let whole: Vec<u8> = (0..0x40)
        .map(|i| {
            let mut b = [0];
            h.c.bar0_read(i, &mut b);
            b[0]
        })
        .collect();
    let mut at_once = [0; 0x40];
    h.c.bar0_read(0, &mut at_once);
    assert_eq!(whole, at_once);
    let mut odd = [0; 7];
    h.c.bar0_read(3, &mut odd);
    assert_eq!(odd, at_once[3..10]);
}

#[test]
fn odd_register_writes_change_nothing() {
    let mut h = fresh();
    let before = {
        let mut b = [0; 0x70];
        h.c.bar0_read(0, &mut b);
        b
    };
    for (offset, data) in [
        (regs::AQA, &[0xff; 2][..]),
        (regs::AQA, &[0xff; 1]),
        (regs::AQA, &[]),
        (regs::AQA + 1, &[0xff; 4]),
        (regs::ASQ, &[0xff; 12]),
        (regs::CAP, &[0xff; 8]),
        (regs::VS, &[0xff; 4]),
        (regs::CRTO, &[0xff; 4]),
        (pci::BAR0_SIZE, &[0xff; 8]),
        (pci::BAR0_SIZE - 4, &[0xff; 8]),
        (u64::MAX - 3, &[0xff; 4]),
        (u64::MAX - 3, &[0xff; 8]),
        (pci::MSIX_TABLE_OFFSET, &[0xff; 8]),
        (regs::NSSR, &[1, 2, 3, 4]),
    ] {
        h.c.bar0_write(offset, data);
    }
    let mut after = [0; 0x70];
    h.c.bar0_read(0, &mut after);
    assert_eq!(before, after);
    let mut far = [1; 8];
    h.c.bar0_read(u64::MAX - 2, &mut far);
    assert_eq!(far, [0; 8]);
    h.c.bar0_read(pci::BAR0_SIZE - 4, &mut far);
    assert_eq!(far, [0; 8]);
}

#[test]
fn controller_is_disabled_and_enabled_again() {
    let mut h = fresh();
    assert!(!h.csts().rdy());
    h.enable();
    assert!(h.c.is_ready());
    let aqa = Aqa::from_bits(h.reg32(regs::AQA));
    assert_eq!(
        (aqa.asqs_z(), h.reg64(regs::ASQ)),
        (31, ASQ),
        "readable while enabled"
    );
    assert_eq!(h.identify(1, 0, 0).0, Status::SUCCESS);
    h.disable();
    assert!(!h.csts().rdy());
    assert_eq!(
        h.reg64(regs::ASQ),
        ASQ,
        "a controller reset keeps the admin queue registers"
    );
    // CC is written before EN by some hosts.
    h.set32(regs::CC, Host::cc_enabled().with_en(false).into_bits());
    assert!(!h.csts().rdy());
    h.enable();
    assert_eq!(h.identify(1, 0, 0).0, Status::SUCCESS);
    assert_eq!(h.c.stats().resets.get(), 1);
}

#[test]
fn unsupported_configuration_is_fatal() {
    let good = Host::cc_enabled();
    let aqa = Aqa::new().with_asqs_z(31).with_acqs_z(31);
    for (cc, aqa, asq, acq) in [
        (good.with_mps(5), aqa, ASQ, ACQ),
        (good.with_css(CcCss(1)), aqa, ASQ, ACQ),
        (good.with_css(CcCss::ADMIN_ONLY), aqa, ASQ, ACQ),
        (
            good.with_ams(regs::Ams::WEIGHTED_ROUND_ROBIN),
            aqa,
            ASQ,
            ACQ,
        ),
        (good, aqa.with_asqs_z(0), ASQ, ACQ),
        (good, aqa.with_acqs_z(0), ASQ, ACQ),
        (good.with_mps(4), aqa, ASQ, 0x1_0000), // page of 64 KiB
        (good, aqa, 0x7fff_f000, ACQ),          // nothing there
        (good, aqa, ASQ, 0x7fff_f000),
        (good, aqa, LOW_SIZE - 0x1000 + 0x1000, ACQ),
        (good, aqa.with_asqs_z(4095), LOW_SIZE - 0x1000, ACQ),
        (good, aqa, !0xfff, ACQ),
    ] {
        let mut h = fresh();
        h.set32(regs::AQA, aqa.into_bits());
        h.set64(regs::ASQ, asq);
        h.set64(regs::ACQ, acq);
        h.set32(regs::CC, cc.into_bits());
        assert!(
            h.csts().cfs() && !h.csts().rdy(),
            "{cc:?} {aqa:?} {asq:#x} {acq:#x}"
        );
        h.run();
        h.set32(regs::CC, 0);
        assert!(!h.csts().cfs(), "a reset helps");
        h.enable();
        assert_eq!(h.identify(1, 0, 0).0, Status::SUCCESS);
    }
}

#[test]
fn larger_page_size_applies_to_prps() {
    let mut h = fresh();
    h.set32(
        regs::AQA,
        Aqa::new().with_asqs_z(31).with_acqs_z(31).into_bits(),
    );
    h.set64(regs::ASQ, 0x1_0000);
    h.set64(regs::ACQ, 0x2_0000);
    h.pairs.insert(0, Pair::new(0x1_0000, 0x2_0000, 32));
    h.set_command(command::BUS_MASTER, true);
    h.set32(regs::CC, Host::cc_enabled().with_mps(4).into_bits());
    assert!(h.csts().rdy());
    // A data structure that crosses a 4 KiB boundary needs no second PRP with pages of 64 KiB.
    let mut command = nvme::Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
    command.cdw10 = 1.into();
    command.set_prps(0x3_0800, 0);
    assert_eq!(h.admin(command).status(), Status::SUCCESS);
    assert_eq!(&h.read(0x3_0800 + 24, 5), b"vnvme");
    assert_eq!(
        plain(h.create_cq(1, 16, 0x4_1000, None)),
        Status::PRP_OFFSET_INVALID,
        "queues begin on a page"
    );
}

#[test]
fn normal_and_abrupt_shutdown_complete() {
    for how in [Shn::NORMAL, Shn::ABRUPT] {
        let (volume, faults) = faulty(1 << 20);
        let mut h = Host::ready_with(vec![ns(1, cached(volume), 512)]);
        faults.add(Fault::always(OpKind::Any, Effect::Hold));
        let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
        h.submit(1, write);
        h.run_held(&faults, 1);
        h.shutdown(how);
        assert_eq!(h.csts().shst(), Shst::OCCURRING);
        h.round();
        assert_eq!(faults.held(), 1, "the flush waits for the write");
        faults.release();
        h.run_held(&faults, 1);
        assert!(h.reap(1).is_some(), "the write was over before");
        assert_eq!(h.csts().shst(), Shst::OCCURRING, "the flush is held");
        faults.release();
        h.wait_shutdown();
        assert!(h.csts().rdy(), "shutdown does not touch RDY");
        // Commands are not fetched any more.
        let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
        h.submit(1, read);
        h.run();
        assert!(h.reap(1).is_none());
        faults.clear();
        h.disable();
        assert_eq!(h.csts().shst(), Shst::NORMAL);
        h.c.reset();
        assert_eq!(h.c.stats().unsafe_shutdowns.get(), 0);
        h.enable();
    }
}

#[test]
fn shutdown_while_disabled_or_with_failed_flush_completes() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::with(
        ControllerConfig::default(),
        vec![ns(1, cached(volume), 512)],
    );
    faults.add(Fault::always(
        OpKind::Flush,
        Effect::Fail(IoErrorKind::MediaWrite.into()),
    ));
    h.shutdown(Shn::NORMAL);
    h.wait_shutdown();
    h.set32(regs::CC, 0);
    h.enable();
    assert_eq!(h.csts().shst(), Shst::NORMAL);
    h.run();
    assert_eq!(
        h.csts().shst(),
        Shst::NORMAL,
        "what was left of the shutdown is gone"
    );
}

#[test]
fn reset_and_shutdown_in_one_write_complete() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, cached(volume), 512)]);
    faults.add(Fault::always(OpKind::Flush, Effect::Hold));
    h.set32(regs::CC, Cc::new().with_shn(Shn::NORMAL).into_bits());
    h.run_held(&faults, 1);
    assert_eq!(h.csts().shst(), Shst::OCCURRING);
    faults.release();
    h.wait_shutdown();
    assert!(!h.csts().rdy());
    // EN cleared during a shutdown.
    h.set32(regs::CC, 0);
    h.enable();
    h.shutdown(Shn::NORMAL);
    h.run_held(&faults, 1);
    h.disable();
    faults.release();
    h.until(|h| !h.csts().rdy());
    assert_eq!(h.csts().shst(), Shst::NORMAL);
    faults.clear();
    h.set32(regs::CC, 0);
    h.enable();
    assert_eq!(h.identify(1, 0, 0).0, Status::SUCCESS);
}

#[test]
fn enable_waits_for_draining_reset() {
    let (volume, faults) = faulty(1 << 20);
    // Its cancellation is deaf: the delay runs on.
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    h.submit(1, read);
    h.run_held(&faults, 1);
    h.disable();
    assert!(
        h.csts().rdy() && h.c.is_resetting(),
        "a command is in flight"
    );
    h.set32(regs::CC, Host::cc_enabled().into_bits());
    assert!(h.csts().rdy());
    h.until(|h| !h.c.is_resetting());
    assert!(h.csts().rdy(), "enabled again by itself");
}

#[test]
fn subsystem_reset_works_in_any_state() {
    let mut h = fresh();
    h.set32(regs::NSSR, regs::NSSR_MAGIC);
    assert!(h.csts().nssro() && !h.csts().rdy());
    h.enable();
    assert!(h.csts().nssro(), "until the host clears it");
    h.set32(regs::CSTS, h_csts_nssro());
    assert!(!h.csts().nssro());
    h.set32(regs::NSSR, regs::NSSR_MAGIC);
    assert!(h.csts().nssro() && !h.csts().rdy());
    assert_eq!(
        (h.reg32(regs::CC), h.reg64(regs::ASQ), h.reg32(regs::AQA)),
        (0, 0, 0)
    );
    h.set32(regs::CC, Host::cc_enabled().into_bits());
    assert!(h.csts().cfs());
    h.set32(regs::NSSR, regs::NSSR_MAGIC);
    assert!(!h.csts().cfs());
    h.enable();
    h.shutdown(Shn::NORMAL);
    h.wait_shutdown();
    h.set32(regs::NSSR, regs::NSSR_MAGIC);
    assert_eq!(h.csts().shst(), Shst::NORMAL);
    h.enable();
    assert_eq!(h.identify(1, 0, 0).0, Status::SUCCESS);
}

/// Linux sets the state of a controller back to live between its write to NSSR and its read of
/// CSTS, and ignores events before that. It looks at no register afterwards.
#[test]
fn subsystem_reset_is_announced_when_host_reads_status() {
    let event = AsyncEvent::error(ErrorEvent::PERSISTENT_INTERNAL_ERROR).into_bits();
    let mut h = Host::ready();
    let announced = |h: &mut Host, case: &str| {
        let completion = h.reap(0).expect(case);
        assert_eq!(completion.status(), Status::SUCCESS, "{case}");
        assert_eq!(completion.dw0.get(), event, "{case}");
        assert_eq!(h.vectors[0].take(), 1, "{case}");
        assert!(h.csts().nssro() && !h.csts().rdy(), "{case}");
        assert_eq!(h.reg32(regs::CC), 0, "{case}");
        assert_eq!(h.c.deadline(), None, "{case}");
        h.write(ACQ, &[0; 32 * 16]);
        h.enable();
        h.create_pair(1, 64);
        h.set32(regs::CSTS, h_csts_nssro());
        assert!(!h.csts().nssro() && h.csts().rdy(), "{case}");
    };
    for case in ["read", "read of 8 bytes", "time", "write", "death"] {
        h.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
        h.run();
        h.vectors[0].take();
        h.now = Instant::now();
        h.set32(regs::NSSR, regs::NSSR_MAGIC);
        h.run();
        assert!(h.reap(0).is_none(), "{case}: the host would not look at it");
        let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
        assert_eq!(h.io(read), Status::SUCCESS, "{case}: it has not begun");
        match case {
            "read" => assert!(h.csts().nssro() && !h.csts().rdy()),
            "read of 8 bytes" => assert_eq!(h.reg64(regs::CSTS - 4) >> 32 & 0x11, 0x10),
            "time" => {
                h.now = h.c.deadline().unwrap();
                h.run();
            }
            "write" => h.set32(regs::AQA, 0),
            _ => {
                h.die();
                h.run();
            }
        }
        announced(&mut h, case);
    }
    // Nobody to tell: the reset begins at once.
    h.set32(regs::NSSR, regs::NSSR_MAGIC);
    assert!(h.c.deadline().is_none());
    assert!(h.csts().nssro() && !h.csts().rdy());
    assert!(h.reap(0).is_none());
    // A device reset is more than that.
    h.enable();
    h.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
    h.run();
    h.set32(regs::NSSR, regs::NSSR_MAGIC);
    h.c.reset();
    h.until(|h| !h.c.is_resetting());
    assert!(h.c.deadline().is_none());
}

fn h_csts_nssro() -> u32 {
    regs::Csts::new().with_nssro(true).into_bits()
}

#[derive(Clone, Copy, Debug)]
enum How {
    Controller,
    Subsystem,
    Function,
    Device,
    Gone,
}

#[test]
fn reset_of_any_kind_releases_old_memory() {
    for how in [
        How::Controller,
        How::Subsystem,
        How::Function,
        How::Device,
        How::Gone,
    ] {
        let (volume, faults) = faulty(1 << 20);
        let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
        assert_eq!(h.use_shadow(), Status::SUCCESS);
        faults.add(Fault::always(OpKind::Read, Effect::Hold));
        for i in 0..8 {
            let read = h.rw(NvmOpcode::READ, 1, i, 1, DATA + i * 4096);
            h.submit(1, read);
        }
        h.run_held(&faults, 8);
        for i in 0..4 {
            let read = h.rw(NvmOpcode::READ, 1, i, 1, DATA);
            h.push(1, read);
        }
        match how {
            How::Controller => h.disable(),
            How::Subsystem => h.set32(regs::NSSR, regs::NSSR_MAGIC),
            How::Function => {
                let mut control = [0; 2];
                h.c.config_read(0x68, &mut control);
                control[1] |= 0x80;
                h.c.config_write(0x68, &control);
            }
            How::Device => h.c.reset(),
            How::Gone => h.c.disconnect(),
        }
        h.until(|h| !h.c.is_resetting());
        assert!(!h.csts().rdy());
        assert!(h.c.dma_quiesced());
        // Now the memory belongs to another program.
        h.write(LOW, &vec![0x5a; LOW_SIZE as usize]);
        h.write(HIGH, &vec![0xa5; HIGH_SIZE as usize]);
        faults.release();
        faults.clear();
        for index in 0..130 {
            h.set32(pci::DOORBELL_OFFSET + 4 * index, 5);
        }
        h.run();
        h.c.arm();
        h.c.recheck();
        h.run();
        assert!(
            h.read(LOW, LOW_SIZE as usize).iter().all(|&b| b == 0x5a),
            "{how:?}"
        );
        assert!(
            h.read(HIGH, HIGH_SIZE as usize).iter().all(|&b| b == 0xa5),
            "{how:?}"
        );
        assert_eq!(faults.held(), 0);
        let unsafe_shutdowns = h.c.stats().unsafe_shutdowns.get();
        let lost = matches!(how, How::Function | How::Device | How::Gone);
        assert_eq!(unsafe_shutdowns, u64::from(lost), "{how:?}");
        if matches!(how, How::Gone) {
            continue;
        }
        h.ring = Ring::Register;
        h.write(LOW, &vec![0; LOW_SIZE as usize]);
        h.enable();
        h.create_pair(1, 64);
        let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
        assert_eq!(h.io(read), Status::SUCCESS);
    }
}

#[test]
fn reset_clears_command_register() {
    let mut h = Host::ready();
    h.c.config_write(4, &[0x06, 0x04]);
    let mut b = [0; 2];
    h.c.config_read(4, &mut b);
    assert_eq!(b, [0x06, 0x04]);
    h.c.reset();
    h.c.config_read(4, &mut b);
    assert_eq!(b, [0, 0]);
}

/// QEMU passes the file of `memory-backend-memfd,share=off` like a shared one, and the guest's
/// commands are never in it.
#[test]
fn zeroes_instead_of_first_command_are_fatal() {
    let mut h = fresh();
    h.enable();
    h.write(ASQ, &[0; 64]);
    h.ring_value(0, false, 1);
    h.until(|h| h.csts().cfs());
    h.set32(regs::CC, 0);
    h.run();
    h.enable();
    assert_eq!(h.identify(1, 0, 0).0, Status::SUCCESS);
    // Later ones are commands: Delete I/O Submission Queue of queue 0.
    let status = h.admin([0; 64]).status();
    assert_eq!(plain(status), Status::INVALID_QUEUE_IDENTIFIER);
    assert!(!h.csts().cfs());
}
