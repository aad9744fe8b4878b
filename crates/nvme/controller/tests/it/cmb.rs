//! The controller memory buffer: its registers, what may lie in it, what becomes of it.

use crate::common::*;
use controller::{
    AnaGroup, ConfigError, ControllerConfig, FabricsConfig, MAX_CMB_SIZE, MIN_CMB_SIZE,
};
use dma::Prot;
use nvme::cmd::{Flags, Psdt};
use nvme::log::AnaState;
use nvme::pci::command;
use nvme::regs::{self, Aqa, Cap, Cmbloc, Cmbmsc, Cmbsts, Cmbsz, NSSR_MAGIC};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use volume::{Budget, Effect, Fault, Io, IoOptions, OpKind};

const SIZE: u64 = 1 << 20;
const ON: Cmbmsc = Cmbmsc::new()
    .with_cre(true)
    .with_cmse(true)
    .with_cba(CMB >> 12);

fn config() -> ControllerConfig {
    ControllerConfig {
        cmb_size: Some(SIZE),
        ..Default::default()
    }
}

/// Disabled, with the buffer at [`CMB`].
fn host() -> Host {
    let mut h = Host::with(config(), vec![ns(1, mem(8 << 20), 512)]);
    h.set64(regs::CMBMSC, ON.into_bits());
    h
}

/// Enabled, with a pair of queues in the guest's memory.
fn ready() -> Host {
    let mut h = host();
    h.enable();
    h.create_pair(1, 64);
    h
}

fn cmbmsc(h: &mut Host) -> u64 {
    h.reg64(regs::CMBMSC)
}

#[test]
fn cmb_registers_follow_standard() {
    let mut h = Host::with(config(), vec![ns(1, mem(8 << 20), 512)]);
    assert!(Cap::from_bits(h.reg64(regs::CAP)).cmbs());
    for at in [regs::CMBLOC, regs::CMBSZ, regs::CMBSTS] {
        assert_eq!(h.reg32(at), 0, "before CRE is set");
    }
    assert_eq!(cmbmsc(&mut h), 0);
    // As Linux does first.
    h.set32(regs::CMBMSC, 1);
    let location = Cmbloc::from_bits(h.reg32(regs::CMBLOC));
    let wanted = Cmbloc::new()
        .with_bir(2)
        .with_cdpmls(true)
        .with_cdpcils(true);
    assert_eq!(location, wanted);
    let size = Cmbsz::from_bits(h.reg32(regs::CMBSZ));
    assert_eq!(size.bytes(), SIZE);
    assert!(size.sqs() && size.cqs() && size.lists() && size.rds() && size.wds());
    // Read only.
    for at in [
        regs::CMBLOC,
        regs::CMBSZ,
        regs::CMBSTS,
        regs::CMBEBS,
        regs::CMBSWTP,
    ] {
        let before = h.reg32(at);
        h.set32(at, u32::MAX);
        assert_eq!(h.reg32(at), before, "{at:#x}");
    }
    assert_eq!([regs::CMBEBS, regs::CMBSWTP].map(|at| h.reg32(at)), [0, 0]);
    // The upper half first, then the lower one, which takes effect.
    h.set32(regs::CMBMSC + 4, (CMB >> 32) as u32);
    assert!(h.c.dma().device_memory().is_none());
    h.set32(regs::CMBMSC, CMB as u32 | 0xfff);
    assert_eq!(cmbmsc(&mut h), ON.into_bits(), "bits 11:2 are reserved");
    assert_eq!(h.c.dma().device_memory().unwrap().0, CMB);
    // Without CRE the addresses are valid all the same.
    h.set64(regs::CMBMSC, ON.with_cre(false).into_bits());
    assert_eq!(h.reg32(regs::CMBSZ), 0);
    assert!(h.c.dma().device_memory().is_some());
    h.set64(regs::CMBMSC, ON.with_cmse(false).into_bits());
    assert!(h.c.dma().device_memory().is_none());
    assert_eq!(h.reg32(regs::CMBSZ), size.into_bits());
}

#[test]
fn cmb_address_beyond_end_is_invalid() {
    let mut h = host();
    let last = (u64::MAX - SIZE + 1) >> 12;
    for (cba, valid) in [
        (last, true),
        (last + 1, false),
        (u64::MAX >> 12, false),
        (0, true),
    ] {
        h.set64(regs::CMBMSC, ON.with_cba(cba).into_bits());
        let status = Cmbsts::from_bits(h.reg32(regs::CMBSTS));
        assert_eq!(status.cbai(), !valid, "{cba:#x}");
        let place = h.c.dma().device_memory().map(|(at, _)| at);
        assert_eq!(place, valid.then_some(cba << 12));
    }
    h.set64(
        regs::CMBMSC,
        ON.with_cba(last + 1).with_cmse(false).into_bits(),
    );
    assert_eq!(h.reg32(regs::CMBSTS), 0, "nothing was asked for");
}

#[test]
fn cmb_registers_without_cmb_are_zero() {
    let mut h = Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)]);
    assert!(!Cap::from_bits(h.reg64(regs::CAP)).cmbs());
    h.set64(regs::CMBMSC, ON.into_bits());
    for at in (regs::CMBLOC..=regs::CMBSZ)
        .chain(regs::CMBMSC..=regs::CMBSWTP)
        .step_by(4)
    {
        assert_eq!(h.reg32(at), 0, "{at:#x}");
    }
    assert!(h.c.dma().device_memory().is_none() && h.c.cmb_pages().is_none());
    assert_eq!(h.c.cmb_size(), 0);
    let mut bytes = [0; 4];
    h.c.cmb_write(0, &bytes);
    h.c.cmb_read(0, &mut bytes);
    assert_eq!(bytes, [0xff; 4]);
}

#[test]
fn cmb_size_is_validated() {
    let check = |size, fabrics| {
        ControllerConfig {
            cmb_size: Some(size),
            fabrics,
            ..Default::default()
        }
        .check()
    };
    for size in [MIN_CMB_SIZE, 1 << 20, MAX_CMB_SIZE] {
        check(size, None).unwrap();
    }
    for size in [0, 2048, 3 << 20, 2 * MAX_CMB_SIZE, u64::MAX] {
        let refused = check(size, None);
        assert!(
            matches!(
                refused,
                Err(ConfigError::Range {
                    field: "cmb_size",
                    ..
                })
            ),
            "{size}"
        );
    }
    let fabrics = Some(FabricsConfig {
        in_capsule: 4096,
        queue_entries: 128,
        ana: Arc::new(AnaGroup::new(AnaState::OPTIMIZED)),
    });
    assert!(matches!(
        check(1 << 20, fabrics),
        Err(ConfigError::FabricsMemory)
    ));
}

#[test]
fn cmb_bar_and_function_see_same_bytes() {
    let mut h = host();
    assert_eq!(h.c.cmb_size(), SIZE);
    let mut got = [0; 3];
    h.c.cmb_write(4095, &[1, 2, 3]);
    h.c.cmb_read(4095, &mut got);
    assert_eq!(got, [1, 2, 3]);
    // One that has mapped it sees the same, and so does a command.
    assert_eq!(h.read(CMB + 4095, 3), got);
    h.c.dma().read(CMB + 4095, &mut got).unwrap();
    assert_eq!(got, [1, 2, 3]);
    // Beyond the end nothing is, wherever it begins.
    for at in [SIZE - 2, SIZE, u64::MAX] {
        h.c.cmb_write(at, &[7; 3]);
        h.c.cmb_read(at, &mut got);
        assert_eq!(got, [0xff; 3], "{at:#x}");
    }
    assert_eq!(h.read(CMB + SIZE - 2, 2), [0, 0]);
    h.set_command(command::MEMORY_SPACE, true);
    h.set_command(command::MEMORY_SPACE, false);
    h.c.cmb_write(0, &[7; 3]);
    h.c.cmb_read(4095, &mut got);
    assert_eq!(got, [0xff; 3]);
    h.set_command(command::MEMORY_SPACE, true);
    h.c.cmb_read(0, &mut got);
    assert_eq!(got, [0; 3]);
}

#[test]
fn queues_in_cmb_work() {
    let mut h = host();
    // The admin queues, too.
    h.set_command(command::BUS_MASTER | command::MEMORY_SPACE, true);
    h.set32(
        regs::AQA,
        Aqa::new().with_asqs_z(31).with_acqs_z(31).into_bits(),
    );
    h.set64(regs::ASQ, CMB);
    h.set64(regs::ACQ, CMB + 0x1000);
    h.pairs.insert(0, Pair::new(CMB, CMB + 0x1000, 32));
    h.set32(regs::CC, Host::cc_enabled().into_bits());
    assert!(h.csts().rdy());
    let (sq, cq) = (CMB + 0x10_000, CMB + SIZE - 0x1000);
    assert_eq!(h.create_cq(1, 64, cq, Some(1)), Status::SUCCESS);
    assert_eq!(h.create_sq(1, 1, 64, sq), Status::SUCCESS);
    h.pairs.insert(1, Pair::new(sq, cq, 64));
    let mut data = Vec::new();
    for n in 0..200u64 {
        let bytes = pattern(n, 512);
        h.write(DATA, &bytes);
        let write = h.rw(NvmOpcode::WRITE, 1, n, 1, DATA);
        assert_eq!(h.io(write), Status::SUCCESS);
        data.extend(bytes);
    }
    let mut read = h.rw(NvmOpcode::READ, 1, 0, 200, DATA);
    h.prps(&mut read, DATA, 200 * 512, PAGE);
    assert_eq!(h.io(read), Status::SUCCESS);
    assert_eq!(h.read(DATA, data.len()), data);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 1), Status::SUCCESS);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 1), Status::SUCCESS);
}

#[test]
fn data_and_lists_in_cmb_work() {
    let mut h = ready();
    let bytes = pattern(1, 64 << 10);
    let (there, list) = (CMB + 0x2_0000, CMB + 0x1_0ff0);
    h.write(there, &bytes);
    // Data in it, by a list in it that continues in another page; by one in the guest's memory; and
    // the list in it alone.
    for (n, (at, list)) in [(there, list), (there, PAGE), (DATA, list)]
        .into_iter()
        .enumerate()
    {
        h.write(at, &bytes);
        let mut write = h.rw(NvmOpcode::WRITE, 1, 1000 * n as u64, 128, at);
        h.prps(&mut write, at, 64 << 10, list);
        assert_eq!(h.io(write), Status::SUCCESS, "{n}");
        h.write(at, &[0; 64 << 10]);
        let mut read = h.rw(NvmOpcode::READ, 1, 1000 * n as u64, 128, at);
        h.prps(&mut read, at, 64 << 10, list);
        assert_eq!(h.io(read), Status::SUCCESS, "{n}");
        assert!(h.read(at, 64 << 10) == bytes, "{n}");
    }
    // A segment of SGL descriptors, and an admin command's data.
    h.write(
        CMB,
        &descriptors(&[(there, 4096, 0), (there + 0x4000, 4096, 0)]),
    );
    let mut read = h.rw(NvmOpcode::READ, 1, 0, 16, 0);
    sgl(&mut read, CMB, 32, 0x30);
    assert_eq!(h.io(read), Status::SUCCESS);
    assert_eq!(h.read(there, 4096), bytes[..4096]);
    assert_eq!(h.read(there + 0x4000, 4096), bytes[4096..8192]);
    let mut identify = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
    identify.cdw10 = 1.into();
    identify.set_prps(CMB + 0x8000, 0);
    assert_eq!(h.admin(identify).status(), Status::SUCCESS);
    assert_eq!(h.read(CMB + 0x8000, 2), 0x1234u16.to_le_bytes());
}

fn descriptors(all: &[(u64, u32, u8)]) -> Vec<u8> {
    let one = |&(at, len, kind): &(u64, u32, u8)| {
        let mut bytes = at.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([0, 0, 0, kind]);
        bytes
    };
    all.iter().flat_map(one).collect()
}

fn sgl(command: &mut Command, at: u64, len: u32, kind: u8) {
    command.flags = Flags::new().with_psdt(Psdt::SGL_MPTR_BUFFER);
    command
        .dptr
        .0
        .copy_from_slice(&descriptors(&[(at, len, kind)]));
}

/// What crosses an end of it, and what lies in it in part, is an invalid use of it.
#[test]
fn transfer_partly_in_cmb_is_refused() {
    let mut h = ready();
    // The guest has memory before and behind it, so that only this can be wrong.
    let around = h.high.clone();
    h.c.dma_map(
        CMB - 0x1_0000,
        0x1_0000,
        Some((around.clone(), 0)),
        Prot::RW,
    )
    .unwrap();
    h.c.dma_map(CMB + SIZE, 0x1_0000, Some((around, 0)), Prot::RW)
        .unwrap();
    let wrong = Status::INVALID_USE_OF_CMB.with_dnr(true);
    let end = CMB + SIZE;
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::COMPARE] {
        for at in [end - 4096, CMB - 4096] {
            let mut command = h.rw(opcode, 1, 0, 16, at);
            h.prps(&mut command, at, 8192, PAGE);
            assert_eq!(h.io(command), wrong, "PRPs, {opcode} at {at:#x}");
            let mut command = h.rw(opcode, 1, 0, 24, at);
            h.prps(&mut command, at, 3 * 4096, PAGE);
            assert_eq!(h.io(command), wrong, "a list, {opcode} at {at:#x}");
            let mut command = h.rw(opcode, 1, 0, 16, 0);
            sgl(&mut command, at, 8192, 0);
            assert_eq!(h.io(command), wrong, "an SGL, {opcode} at {at:#x}");
        }
    }
    let mut command = h.rw(NvmOpcode::READ, 1, 0, 16, 0);
    command.set_prps(DATA, CMB);
    assert_eq!(h.io(command), wrong);
    let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
    command.cdw10 = 1.into();
    command.set_prps(end - 2048, end);
    assert_eq!(h.admin(command).status(), wrong);
}

#[test]
fn queue_partly_in_cmb_is_refused() {
    let mut h = ready();
    let around = h.high.clone();
    let end = CMB + SIZE;
    h.c.dma_map(end, 0x1_0000, Some((around.clone(), 0)), Prot::RW)
        .unwrap();
    h.c.dma_map(CMB - 0x1_0000, 0x1_0000, Some((around, 0)), Prot::RW)
        .unwrap();
    let wrong = Status::INVALID_USE_OF_CMB.with_dnr(true);
    // The completion queue: 16 entries are less than a page, so it never crosses the end.
    let mut cq = Command::new(AdminOpcode::CREATE_IO_CQ.0, 0, 0);
    cq.cdw10 = (511 << 16 | 2).into();
    cq.cdw11 = 1.into();
    for at in [end - 0x1000, CMB - 0x1000] {
        cq.set_prps(at, 0);
        assert_eq!(h.admin(cq).status(), wrong);
        assert_eq!(h.create_sq(2, 1, 256, at), wrong);
    }
    for at in [end - 0x2000, end, CMB, CMB - 0x2000] {
        cq.set_prps(at, 0);
        assert_eq!(h.admin(cq).status(), Status::SUCCESS, "{at:#x}");
        assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 2), Status::SUCCESS);
        assert_eq!(h.create_sq(2, 1, 128, at), Status::SUCCESS, "{at:#x}");
        assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 2), Status::SUCCESS);
    }
    // An admin queue has no command to be refused with.
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.set32(
        regs::AQA,
        Aqa::new().with_asqs_z(255).with_acqs_z(31).into_bits(),
    );
    h.set64(regs::ASQ, end - 0x1000);
    h.set32(regs::CC, Host::cc_enabled().into_bits());
    assert!(h.csts().cfs() && !h.csts().rdy());
}

/// The guest's memory at the same addresses is hidden, until the buffer is moved.
#[test]
fn cmb_hides_guest_memory_until_moved() {
    let mut h = ready();
    let base = HIGH + 0x10_0000;
    let (ours, theirs) = (pattern(1, 512), pattern(2, 512));
    h.write(CMB, &ours);
    h.write(base, &theirs);
    let write = |h: &mut Host, cba: u64, data: &[u8]| {
        h.set64(regs::CMBMSC, ON.with_cba(cba >> 12).into_bits());
        let command = h.rw(NvmOpcode::WRITE, 1, 0, 1, base);
        assert_eq!(h.io(command), Status::SUCCESS);
        let command = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
        assert_eq!(h.io(command), Status::SUCCESS);
        assert!(h.read(DATA, 512) == data, "at {cba:#x}");
    };
    write(&mut h, base, &ours);
    write(&mut h, CMB, &theirs);
    write(&mut h, base, &ours);
    // Unmapping and mapping guest memory in its place changes nothing.
    h.c.dma_unmap(HIGH, HIGH_SIZE).unwrap();
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, base);
    assert_eq!(h.io(command), Status::SUCCESS);
    h.c.dma_map(HIGH, HIGH_SIZE, Some((h.high.clone(), 0)), Prot::RW)
        .unwrap();
    assert_eq!(h.io(command), Status::SUCCESS);
    assert!(h.read(base, 512) == theirs, "it was not written to");
}

/// Without CMSE its addresses are the guest's: queues there stand still, and go on when it is back.
#[test]
fn queues_in_cmb_wait_while_cmse_is_clear() {
    let mut h = ready();
    h.create_pair_at(2, 16, CMB + 0x1000, CMB + 0x2000);
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    assert_eq!(h.command(2, command).status(), Status::SUCCESS);
    h.set64(regs::CMBMSC, ON.with_cmse(false).into_bits());
    h.submit(2, command);
    h.run();
    assert!(h.peek(2).is_none(), "its queue is nowhere");
    assert_eq!(h.io(command), Status::SUCCESS, "others are not concerned");
    let there = h.rw(NvmOpcode::READ, 1, 0, 1, CMB);
    assert_eq!(plain(h.io(there)), Status::DATA_TRANSFER_ERROR);
    assert_eq!(
        plain(h.create_sq(3, 1, 16, CMB)),
        Status::DATA_TRANSFER_ERROR
    );
    h.set64(regs::CMBMSC, ON.into_bits());
    h.run();
    assert_eq!(h.reap(2).unwrap().status(), Status::SUCCESS);
    assert_eq!(h.command(2, command).status(), Status::SUCCESS);
    assert_eq!(h.io(there), Status::SUCCESS);
    // It moves away from under the queue, and back: nothing else is there meanwhile.
    h.set64(regs::CMBMSC, ON.with_cba((CMB + SIZE) >> 12).into_bits());
    h.submit(2, command);
    h.run();
    assert!(h.peek(2).is_none());
    h.set64(regs::CMBMSC, ON.into_bits());
    h.run();
    assert_eq!(h.reap(2).unwrap().status(), Status::SUCCESS);
}

#[test]
fn shadow_doorbells_in_cmb_work() {
    let mut h = ready();
    assert_eq!(h.configure_shadow(CMB, CMB + 0x1000), Status::SUCCESS);
    assert!(h.c.shadowed());
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    h.push(1, command);
    h.write(CMB + 8, &1u32.to_le_bytes());
    h.run();
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    h.set64(regs::CMBMSC, ON.with_cmse(false).into_bits());
    assert!(!h.c.shadowed(), "registers go on");
    assert_eq!(h.io(command), Status::SUCCESS);
}

/// Commands in flight have what they began with.
#[test]
fn commands_in_flight_keep_cmb_address() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::with(config(), vec![ns(1, volume, 512)]);
    h.set64(regs::CMBMSC, ON.into_bits());
    h.enable();
    h.create_pair(1, 64);
    let bytes = pattern(3, 512);
    h.write(DATA, &bytes);
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
    assert_eq!(h.io(write), Status::SUCCESS);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, CMB);
    h.submit(1, read);
    h.run_held(&faults, 1);
    h.set64(regs::CMBMSC, 0);
    faults.clear();
    faults.release();
    h.run();
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    assert!(h.read(CMB, 512) == bytes);
}

#[test]
fn cmb_after_each_reset_follows_standard() {
    let mut h = ready();
    let on = ON.into_bits();
    h.write(CMB, &[5; 8]);
    let file = h.c.cmb_pages().unwrap().fd().as_raw_fd();
    h.disable();
    h.until(|h| !h.csts().rdy());
    assert_eq!(cmbmsc(&mut h), on, "a Controller Reset");
    h.enable();
    // Function level reset: bit 15 of Device Control.
    h.outliving(|h| h.c.config_write(0x68, &0xa810u16.to_le_bytes()));
    h.until(|h| !h.c.is_resetting());
    assert_eq!(cmbmsc(&mut h), on, "a Function Level Reset");
    assert!(h.c.dma().device_memory().is_some());
    h.enable();
    h.create_pair_at(1, 16, CMB + 0x1000, CMB + 0x2000);
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, CMB);
    assert_eq!(h.io(command), Status::SUCCESS);
    h.set32(regs::NSSR, NSSR_MAGIC);
    h.until(|h| !h.c.is_resetting());
    assert_eq!(cmbmsc(&mut h), 0, "an NVM Subsystem Reset");
    assert!(h.c.dma().device_memory().is_none());
    h.set64(regs::CMBMSC, on);
    h.write(CMB, &[5; 8]);
    h.outliving(|h| h.c.reset());
    h.until(|h| !h.c.is_resetting());
    assert_eq!(cmbmsc(&mut h), 0, "the VMM's reset");
    assert_eq!(
        h.c.cmb_pages().unwrap().fd().as_raw_fd(),
        file,
        "the client is the same"
    );
    assert_eq!(h.read(CMB, 8), [5; 8]);
}

/// The one before may still have mapped what it had.
#[test]
fn cmb_of_next_client_is_new_file() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::with(config(), vec![ns(1, stubborn(volume), 512)]);
    h.set64(regs::CMBMSC, ON.into_bits());
    h.enable();
    h.create_pair(1, 64);
    let before = h.c.cmb_pages().unwrap().clone();
    before.memory().write(0, &[5; 8]).unwrap();
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, CMB);
    h.submit(1, read);
    h.run_held(&faults, 1);
    h.c.disconnect();
    let now = h.c.cmb_pages().unwrap().clone();
    assert!(!now.memory().is_same(before.memory()));
    before.memory().write(8, &[6; 8]).unwrap();
    assert_eq!(cmbmsc(&mut h), 0);
    h.set64(regs::CMBMSC, ON.into_bits());
    let mut got = [0; 16];
    h.c.dma().read(CMB, &mut got).unwrap();
    assert_eq!(got, [0; 16]);
    // What was in flight ends in the old one.
    faults.clear();
    faults.release();
    h.run();
    h.c.dma().read(CMB, &mut got).unwrap();
    assert_eq!(got, [0; 16]);
    let mut old = [1; 8];
    before.memory().read(0, &mut old).unwrap();
    assert_eq!(old, [0; 8], "the read of zeroes has come");
}

/// Queues, a list and data in it; and the process dies at every crash point that is passed.
#[test]
fn cmb_survives_process_at_every_crash_point() {
    let mut h = host();
    h.die();
    assert_eq!(cmbmsc(&mut h), ON.into_bits());
    assert!(h.c.dma().device_memory().is_some());
    h.enable();
    h.die();
    h.create_pair_at(1, 16, CMB + 0x1000, CMB + 0x2000);
    let (list, data) = (CMB + 0x3000, CMB + 0x10_000);
    let step = |h: &mut Host, n: u64| {
        let bytes = pattern(n, 12 << 10);
        h.write(data, &bytes);
        let mut write = h.rw(NvmOpcode::WRITE, 1, 24 * n, 24, data);
        h.prps(&mut write, data, 12 << 10, list);
        assert_eq!(h.io(write), Status::SUCCESS);
        h.write(data, &[0; 12 << 10]);
        let mut read = h.rw(NvmOpcode::READ, 1, 24 * n, 24, data);
        h.prps(&mut read, data, 12 << 10, list);
        h.submit(1, read);
        h.set64(regs::CMBMSC, ON.with_cmse(false).into_bits());
        h.set64(regs::CMBMSC, ON.into_bits());
        h.until(|h| h.peek(1).is_some());
        assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
        assert!(h.read(data, 12 << 10) == bytes, "{n}");
    };
    crash::disarm();
    step(&mut h, 0);
    let points: Vec<&'static str> = crash::passed().iter().map(|point| *point.0).collect();
    for (n, point) in (1..).zip(points.iter().cycle().take(3 * points.len())) {
        crash::disarm();
        crash::arm(point, 1 + n / points.len() as u64);
        step(&mut h, n);
        crash::disarm();
        assert!(h.crashes.contains_key(point), "{point} is not passed again");
    }
    assert!(points.len() >= 4, "{points:?}");
    h.set64(regs::CMBMSC, 0);
    h.die();
    assert_eq!(cmbmsc(&mut h), 0);
    assert!(h.c.dma().device_memory().is_none());
}

/// Engines on other workers find it where it is, those that are made later, too.
#[test]
fn cmb_is_visible_to_other_workers() {
    let config = ControllerConfig {
        workers: 3,
        mapped_doorbells: true,
        ..config()
    };
    let mut h = Host::with(config, vec![ns(1, mem(8 << 20), 512)]);
    let waker = || std::task::Waker::noop().clone();
    h.c.set_worker(0, waker());
    let io = Rc::new(Io::new(IoOptions::default()));
    let early = h.c.remote_engine(1, waker()).unwrap();
    let mut early = early.open(11, &io).unwrap();
    h.set64(regs::CMBMSC, ON.into_bits());
    assert!(!h.c.receivers_settled(), "one does not know yet");
    early.drain_messages();
    assert!(h.c.receivers_settled());
    let late = h.c.remote_engine(2, waker()).unwrap().open(12, &io);
    let mut engines = [early, late.unwrap()];
    h.enable();
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, CMB + 0x8000);
    for qid in [1, 2] {
        let sq = CMB + 0x1_0000 * u64::from(qid);
        h.create_pair_at(qid, 16, sq, sq + 0x1000);
    }
    let mut turn = |h: &mut Host| {
        for _ in 0..8 {
            h.round();
            for engine in &mut engines {
                engine.drain_messages();
                engine.poll(h.now, &mut Budget::unlimited());
            }
            h.c.drain_messages();
        }
    };
    for qid in [1, 2] {
        assert!(h.c.migrate_queue(qid, qid));
        turn(&mut h);
        assert_eq!(
            h.c.stats().queues[usize::from(qid)].worker.get(),
            u64::from(qid)
        );
        h.submit(qid, command);
        turn(&mut h);
        assert_eq!(h.reap(qid).unwrap().status(), Status::SUCCESS);
    }
    h.set64(regs::CMBMSC, 0);
    turn(&mut h);
    for qid in [1, 2] {
        h.submit(qid, command);
        turn(&mut h);
        assert!(h.peek(qid).is_none(), "queue {qid} is nowhere");
    }
    h.set64(regs::CMBMSC, ON.into_bits());
    turn(&mut h);
    for qid in [1, 2] {
        assert_eq!(h.reap(qid).unwrap().status(), Status::SUCCESS);
    }
}
