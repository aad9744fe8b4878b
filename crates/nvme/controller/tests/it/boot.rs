//! Boot Partitions: read by registers before the controller is enabled, and by their log page.

use crate::common::*;
use controller::{
    AnaGroup, BootImage, ConfigError, Controller, ControllerConfig, FabricsConfig, MAX_BOOT_IMAGE,
};
use nvme::Status;
use nvme::log::{AnaState, Lid};
use nvme::pci::command;
use nvme::regs::{self, BootReadStatus, Bpinfo, Bprsel, Cap, NSSR_MAGIC};
use std::sync::Arc;
use volume::{Io, IoOptions};

/// Two units of 128 KiB, the last one not whole.
const BYTES: usize = (128 << 10) + 5000;
const SIZE: usize = 256 << 10;
const BUFFER: u64 = HIGH + (1 << 20);

fn image() -> Vec<u8> {
    pattern(7, BYTES)
}

fn config() -> ControllerConfig {
    ControllerConfig {
        boot: Some(BootImage::new(&image()).unwrap()),
        ..Default::default()
    }
}

/// Never enabled: its function answers, and may write to memory.
fn firmware() -> Host {
    let mut h = Host::with(config(), vec![ns(1, mem(8 << 20), 512)]);
    h.set_command(command::MEMORY_SPACE | command::BUS_MASTER, true);
    h
}

fn info(h: &mut Host) -> Bpinfo {
    Bpinfo::from_bits(h.reg32(regs::BPINFO))
}

/// Reads so many units of 4 KiB.
fn read(h: &mut Host, id: bool, offset: u32, units: u16) -> BootReadStatus {
    let select = Bprsel::new()
        .with_bpid(id)
        .with_bprof(offset)
        .with_bprsz(units);
    h.set32(regs::BPRSEL, select.into_bits());
    assert_eq!(h.reg32(regs::BPRSEL), select.into_bits());
    info(h).brs()
}

#[test]
fn firmware_reads_boot_partitions_without_queues() {
    let mut h = firmware();
    assert!(Cap::from_bits(h.reg64(regs::CAP)).bps());
    let at_first = Bpinfo::new().with_bpsz(2);
    assert_eq!(info(&mut h), at_first);
    h.set64(regs::BPMBL, BUFFER | 0xfff);
    assert_eq!(h.reg64(regs::BPMBL), BUFFER, "bits 11:0 are reserved");
    assert_eq!(info(&mut h), at_first, "no read was asked for");
    let mut all = image();
    all.resize(SIZE, 0);
    for id in [false, true] {
        h.write(BUFFER, &vec![0xee; SIZE + 4096]);
        let units = (SIZE / 4096) as u16;
        assert_eq!(read(&mut h, id, 0, units), BootReadStatus::SUCCESS);
        assert_eq!(h.read(BUFFER, SIZE), all);
        assert_eq!(h.read(BUFFER + SIZE as u64, 4096), [0xee; 4096]);
        // A piece in the middle.
        assert_eq!(read(&mut h, id, 32, 2), BootReadStatus::SUCCESS);
        assert_eq!(h.read(BUFFER, 8192), all[128 << 10..136 << 10]);
        assert_eq!(h.read(BUFFER + 8192, 4096), all[8192..12288]);
    }
    // Nothing, from its end on.
    let end = (SIZE / 4096) as u32;
    assert_eq!(read(&mut h, false, end, 0), BootReadStatus::SUCCESS);
    // BPINFO is read only.
    h.set32(regs::BPINFO, u32::MAX);
    assert_eq!(info(&mut h), at_first.with_brs(BootReadStatus::SUCCESS));
}

#[test]
fn invalid_boot_read_is_error_and_moves_nothing() {
    let mut h = firmware();
    h.set64(regs::BPMBL, BUFFER);
    h.write(BUFFER, &[0xee; 8192]);
    let end = (SIZE / 4096) as u32;
    for (offset, units) in [
        (end, 1),
        (end - 1, 2),
        (0, 1023),
        (0xf_ffff, 1023),
        (0xf_ffff, 0),
    ] {
        let status = read(&mut h, false, offset, units);
        assert_eq!(status, BootReadStatus::ERROR, "{offset} {units}");
    }
    // Not the guest's memory, and its end.
    let last = HIGH + HIGH_SIZE - 4096;
    for buffer in [0xdead_0000_0000, last, !0xfff] {
        h.set64(regs::BPMBL, buffer);
        assert_eq!(
            read(&mut h, false, 0, 2),
            BootReadStatus::ERROR,
            "{buffer:x}"
        );
    }
    h.set64(regs::BPMBL, BUFFER);
    h.set_command(command::BUS_MASTER, false);
    assert_eq!(read(&mut h, false, 0, 1), BootReadStatus::ERROR);
    assert_eq!(h.read(BUFFER, 8192), [0xee; 8192]);
    h.set_command(command::BUS_MASTER, true);
    assert_eq!(read(&mut h, false, 0, 1), BootReadStatus::SUCCESS);
    assert_eq!(h.read(BUFFER, 4096), image()[..4096]);
}

#[test]
fn boot_registers_survive_reset_and_process() {
    let mut h = firmware();
    h.set64(regs::BPMBL, BUFFER);
    assert_eq!(read(&mut h, true, 1, 1), BootReadStatus::SUCCESS);
    let seen = |h: &mut Host| {
        let registers = [regs::BPINFO, regs::BPRSEL, regs::BPMBL, regs::BPMBL + 4];
        registers.map(|at| h.reg32(at))
    };
    let before = seen(&mut h);
    h.enable();
    assert_eq!(seen(&mut h), before);
    h.die();
    assert_eq!(seen(&mut h), before);
    h.disable();
    assert_eq!(seen(&mut h), before);
    h.set32(regs::NSSR, NSSR_MAGIC);
    h.until(|h| !h.c.is_resetting());
    assert_eq!(seen(&mut h), [2, 0, 0, 0]);
}

#[test]
fn boot_log_page_has_header_and_image() {
    let mut h = firmware();
    h.enable();
    let lid = Lid::BOOT_PARTITION.0;
    let mut page = vec![0; 16];
    (page[0], page[4]) = (lid, 2);
    page.extend(image());
    page.resize(16 + SIZE, 0);
    let (status, head) = h.log(lid, 4096, 0, false);
    assert_eq!((status, &head[..]), (Status::SUCCESS, &page[..4096]));
    // All of it, in pieces that begin anywhere.
    for offset in [0, 4, 12, 16, 20, 100_000, SIZE - 4, SIZE + 12] {
        let len = 100_000.min(page.len() - offset);
        let (status, data) = h.log(lid, len, offset as u64, false);
        assert_eq!(status, Status::SUCCESS, "{offset}");
        assert!(data == page[offset..offset + len], "{offset}");
    }
    // Behind its end there is nothing.
    let (status, data) = h.log(lid, 4096, 16 + SIZE as u64, false);
    assert_eq!((status, data), (Status::SUCCESS, vec![0; 4096]));
    for offset in [20 + SIZE as u64, u64::MAX - 3, 2] {
        let (status, _) = h.log(lid, 4096, offset, false);
        assert_eq!(plain(status), Status::INVALID_FIELD, "{offset}");
    }
}

/// However long the page is, a command has no more of it than of data.
#[test]
fn boot_log_page_part_is_limited_by_mdts() {
    let config = ControllerConfig {
        mdts: 4,
        ..config()
    };
    let mut h = Host::with(config, vec![ns(1, mem(8 << 20), 512)]);
    h.enable();
    let lid = Lid::BOOT_PARTITION.0;
    for (len, wanted) in [
        (64 << 10, Status::SUCCESS),
        ((64 << 10) + 4, Status::INVALID_FIELD),
        (256 << 10, Status::INVALID_FIELD),
        (4 << 20, Status::INVALID_FIELD),
    ] {
        let (status, _) = h.log(lid, len, 0, false);
        assert_eq!(plain(status), wanted, "{len}");
    }
}

#[test]
fn boot_registers_without_image_are_zero() {
    let mut h = Host::ready();
    assert!(!Cap::from_bits(h.reg64(regs::CAP)).bps());
    h.set64(regs::BPMBL, BUFFER);
    h.set32(regs::BPRSEL, 1);
    let registers = [regs::BPINFO, regs::BPRSEL, regs::BPMBL, regs::BPMBL + 4];
    assert_eq!(registers.map(|at| h.reg32(at)), [0; 4]);
    let (status, _) = h.log(Lid::BOOT_PARTITION.0, 512, 0, false);
    assert_eq!(plain(status), Status::INVALID_LOG_PAGE);
}

#[test]
fn boot_image_size_is_bounded() {
    assert!(BootImage::new(&[]).is_err());
    assert!(BootImage::new(&vec![0; MAX_BOOT_IMAGE + 1]).is_err());
    assert_eq!(BootImage::new(&[1]).unwrap().size(), 128 << 10);
    let largest = BootImage::new(&vec![0; MAX_BOOT_IMAGE]).unwrap();
    assert_eq!(largest.size(), MAX_BOOT_IMAGE as u64);
}

/// Hosts that come over a network have no such registers.
#[test]
fn fabrics_subsystem_has_no_boot_partitions() {
    let fabrics = FabricsConfig {
        in_capsule: 4096,
        queue_entries: 128,
        ana: Arc::new(AnaGroup::new(AnaState::OPTIMIZED)),
    };
    let config = ControllerConfig {
        fabrics: Some(fabrics),
        ..config()
    };
    let io = Io::new(IoOptions::default());
    let made = Controller::new(3, config, vec![ns(1, mem(8 << 20), 512)], &io);
    assert!(matches!(made, Err(ConfigError::FabricsBoot)));
}
