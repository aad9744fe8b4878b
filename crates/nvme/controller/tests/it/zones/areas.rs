//! Zone Random Write Areas: what is written where, every status, and what the next process finds.

use crate::common::*;
use crate::zones::world::*;
use controller::ControllerConfig;
use nvme::cmd::zone::Zsa;
use nvme::identify::ZonedNamespace;
use nvme::{Command, NvmOpcode, Status};
use volume::{Effect, Fault, OpKind};
use zerocopy::FromBytes;
use zones::{Geometry, Zones, Zrwa};

#[test]
fn identify_reports_zrwa() {
    let zoned = Zones::new(RANDOM).unwrap();
    let config = with_zones(ns(1, mem(BYTES), 512), zoned, None);
    let mut h = Host::with(ControllerConfig::default(), vec![config]);
    enable(&mut h);
    let (status, page) = h.identify(5, 1, 2 << 24);
    assert_eq!(status, Status::SUCCESS);
    let data = ZonedNamespace::read_from_bytes(&page).unwrap();
    assert!(data.ozcs.zrwasup() && data.zrwacap.expflushsup());
    let sizes = (data.zrwasz.get(), data.zrwafg.get(), data.numzrwa_z.get());
    assert_eq!(sizes, (8, 4, 0));
    // Without areas nothing of them is said.
    let mut z = Zoned::new(GEOMETRY);
    let (_, page) = z.h.identify(5, 1, 2 << 24);
    assert_eq!(page[20..2816], vec![0; 2796]);
}

/// Blocks are written in any order, again, and read; the pointer advances when it has to.
#[test]
fn zrwa_writes_in_any_order_move_pointer() {
    let mut z = Zoned::new(RANDOM);
    assert_eq!(z.open_with_zrwa(64), Status::SUCCESS);
    assert_eq!(z.areas(), [1]);
    for (seed, slba, blocks) in [(1, 64 + 4, 4), (2, 64, 2), (3, 64 + 5, 2), (4, 64, 8)] {
        let bytes = pattern(seed, blocks as usize * 512);
        z.h.write(DATA, &bytes);
        assert_eq!(z.write(slba, blocks), Status::SUCCESS);
        assert_eq!(z.states()[1], (EXPLICIT, 64));
        assert_eq!(z.blocks(slba, blocks), bytes);
    }
    // One block beyond the area moves the pointer by a whole granule.
    z.h.write(DATA, &pattern(5, 512));
    assert_eq!(z.write(64 + 8, 1), Status::SUCCESS);
    assert_eq!(z.states()[1], (EXPLICIT, 64 + 4));
    assert_eq!(z.blocks(64, 9)[8 * 512..], pattern(5, 512));
    assert_eq!(z.write(64 + 3, 1), Status::ZONE_INVALID_WRITE);
    assert_eq!(z.write(64 + 4, 1), Status::SUCCESS);
    // As far as twice the area, and no farther.
    assert_eq!(z.write(64 + 4 + 16, 1), Status::ZONE_INVALID_WRITE);
    assert_eq!(z.write(64 + 4 + 15, 2), Status::ZONE_INVALID_WRITE);
    assert_eq!(z.write(64 + 4 + 15, 1), Status::SUCCESS);
    assert_eq!(z.states()[1], (EXPLICIT, 64 + 12));
    let mut zeroes = z.h.rw(NvmOpcode::WRITE_ZEROES, 1, 64 + 12, 8, 0);
    zeroes.set_prps(0, 0);
    assert_eq!(z.h.io(zeroes), Status::SUCCESS);
    assert_eq!(z.blocks(64 + 12, 8), vec![0; 8 * 512]);
    assert_eq!(z.states()[1], (EXPLICIT, 64 + 12));
    // A flush of a part, and of all.
    assert_eq!(z.send(Zsa::FLUSH_ZRWA, 64 + 15), Status::SUCCESS);
    assert_eq!(z.states()[1], (EXPLICIT, 64 + 16));
    assert_eq!(z.send(Zsa::FLUSH_ZRWA, 64 + 23), Status::SUCCESS);
    assert_eq!(z.states()[1], (EXPLICIT, 64 + 24));
    // The last of the zone, which the area does not reach beyond: it is full by a flush.
    assert_eq!(z.write(64 + 24, 16), Status::SUCCESS);
    assert_eq!(z.write(64 + 40, 8), Status::SUCCESS);
    assert_eq!(z.write(64 + 40, 9), Status::ZONED_BOUNDARY_ERROR);
    assert_eq!(z.states()[1], (EXPLICIT, 64 + 40));
    assert_eq!(z.send(Zsa::FLUSH_ZRWA, 64 + 47), Status::SUCCESS);
    assert_eq!(z.states()[1], (FULL, u64::MAX));
    assert_eq!(z.areas(), [0usize; 0]);
}

#[test]
fn zrwa_commands_return_status_of_standard() {
    let mut worn = Zones::new(RANDOM).unwrap();
    worn.set_worn(7, true);
    let mut z = Zoned::with(RANDOM, worn);
    assert_eq!(z.open_with_zrwa(0), Status::SUCCESS);
    assert_eq!(z.open_with_zrwa(0), Status::INVALID_ZONE_OPERATION_REQUEST);
    assert_eq!(z.open_with_zrwa(64), Status::ZRWA_RESOURCES_UNAVAILABLE);
    assert_eq!(z.states()[1], (EMPTY, 64));
    assert_eq!(z.open_with_zrwa(1), Status::INVALID_FIELD);
    assert_eq!(z.open_with_zrwa(512), Status::LBA_OUT_OF_RANGE);
    assert_eq!(
        z.open_with_zrwa(7 * 64),
        Status::INVALID_ZONE_STATE_TRANSITION
    );
    assert_eq!(z.append(0, 1), Err(Status::INVALID_ZONE_OPERATION_REQUEST));
    for (lba, status) in [
        (8, Status::INVALID_ZONE_OPERATION_REQUEST),
        (64, Status::INVALID_ZONE_OPERATION_REQUEST),
        (7 * 64, Status::INVALID_ZONE_OPERATION_REQUEST),
        (2, Status::INVALID_FIELD),
        (512, Status::LBA_OUT_OF_RANGE),
    ] {
        assert_eq!(z.send(Zsa::FLUSH_ZRWA, lba), status, "{lba}");
    }
    for mut command in [open_with_zrwa(0), send(Zsa::FLUSH_ZRWA, 3, false)] {
        // Select All.
        command.cdw13 = (command.cdw13.get() | 1 << 8).into();
        assert_eq!(plain(z.h.io(command)), Status::INVALID_FIELD);
    }
    assert_eq!(z.states()[0], (EXPLICIT, 0));
    // Written already, and another one: neither has an area.
    assert_eq!(z.write(128, 1), Status::SUCCESS);
    assert_eq!(
        z.open_with_zrwa(128),
        Status::INVALID_ZONE_OPERATION_REQUEST
    );
    assert_eq!(z.send(Zsa::OPEN, 128), Status::SUCCESS);
    assert_eq!(z.open_with_zrwa(192), Status::TOO_MANY_OPEN_ZONES);
    // Closed it keeps the area, and a flush or a write opens it.
    for again in 0..2 {
        assert_eq!(z.send(Zsa::CLOSE, 0), Status::SUCCESS);
        assert_eq!(z.states()[0].0, CLOSED);
        assert_eq!(z.areas(), [0]);
        let status = match again {
            0 => z.write(0, 4),
            _ => z.send(Zsa::FLUSH_ZRWA, 3),
        };
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(z.states()[0], (IMPLICIT, again * 4));
    }
    // Finished it has none.
    assert_eq!(z.send(Zsa::FINISH, 0), Status::SUCCESS);
    assert_eq!(z.areas(), [0usize; 0]);
    assert_eq!(z.open_with_zrwa(0), Status::INVALID_ZONE_STATE_TRANSITION);
    assert_eq!(z.open_with_zrwa(64), Status::SUCCESS);
    assert_eq!(z.send(Zsa::RESET, 64), Status::SUCCESS);
    assert_eq!(z.areas(), [0usize; 0]);
    assert_eq!(z.states()[1], (EMPTY, 64));
}

/// A reset discards the data of an area, though the write pointer was never there.
#[test]
fn zone_reset_discards_zrwa_data() {
    for finish in [false, true] {
        let mut z = Zoned::new(RANDOM);
        assert_eq!(z.open_with_zrwa(64), Status::SUCCESS);
        z.h.write(DATA, &pattern(9, 4 * 512));
        assert_eq!(z.write(64 + 4, 4), Status::SUCCESS);
        if finish {
            assert_eq!(z.send(Zsa::FINISH, 64), Status::SUCCESS);
            assert_eq!(z.blocks(64 + 4, 4), pattern(9, 4 * 512));
        }
        assert_eq!(z.send(Zsa::RESET, 64), Status::SUCCESS);
        assert_eq!(z.blocks(64, 48), vec![0; 48 * 512], "finished: {finish}");
    }
}

/// What is to be durable waits for the table.
#[test]
fn zrwa_flush_is_durable() {
    let mut z = Zoned::new(RANDOM);
    z.file.add(Fault::always(OpKind::Flush, Effect::Hold));
    for command in [open_with_zrwa(0), send(Zsa::FLUSH_ZRWA, 3, false)] {
        z.h.submit(1, command);
        let faults = z.file.clone();
        z.h.run_held(&faults, 1);
        assert!(z.h.peek(1).is_none());
        z.file.release();
        let mut done = None;
        z.h.until(|h| {
            done = h.reap(1);
            done.is_some()
        });
        assert_eq!(done.unwrap().status(), Status::SUCCESS);
    }
}

/// Writes that were in flight in a process that has died, while the pointer went on: all of them
/// are taken.
#[test]
fn zrwa_writes_of_dead_process_are_repeated() {
    let mut z = Zoned::new(RANDOM);
    assert_eq!(z.open_with_zrwa(0), Status::SUCCESS);
    z.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let places = [(0u64, 2u32), (3, 3), (8, 4), (12, 8)];
    let mut sent = Vec::new();
    for (number, (slba, blocks)) in (0..).zip(places) {
        let at = DATA + number * 8192;
        z.h.write(at, &pattern(number, blocks as usize * 512));
        let mut write = z.h.rw(NvmOpcode::WRITE, 1, slba, blocks, at);
        z.h.prps(&mut write, at, u64::from(blocks) * BLOCK, PAGE);
        sent.push(z.h.submit(1, write));
    }
    let faults = z.data.clone();
    z.h.run_held(&faults, 4);
    assert_eq!(z.states()[0], (EXPLICIT, 12));
    // Closed meanwhile, it stays so.
    let close = z.h.submit(1, send(Zsa::CLOSE, 0, false));
    z.h.until(|h| h.reap(1).is_some_and(|done| done.cid.get() == close));
    z.data.clear();
    z.h.die();
    assert_eq!(z.h.recovery.replayed, 4);
    let mut done = Vec::new();
    z.h.until(|h| {
        done.extend(h.reap_all(1));
        done.len() == 4
    });
    for cid in sent {
        let done = done.iter().find(|done| done.cid.get() == cid).unwrap();
        assert_eq!(done.status(), Status::SUCCESS);
    }
    for (number, (slba, blocks)) in (0..).zip(places) {
        let wanted = pattern(number, blocks as usize * 512);
        assert_eq!(z.blocks(slba, blocks), wanted);
    }
    assert_eq!(z.states()[0], (CLOSED, 12));
    assert_eq!(z.areas(), [0]);
    assert_eq!(z.write(12 + 15, 1), Status::SUCCESS);
}

/// Another process that begins anew finds the area, and what it holds.
#[test]
fn zrwa_survives_cold_start() {
    let mut z = Zoned::new(RANDOM);
    assert_eq!(z.open_with_zrwa(128), Status::SUCCESS);
    assert_eq!(z.write(128 + 4, 4), Status::SUCCESS);
    let zones = z.kept();
    let mut z = Zoned::with(RANDOM, zones);
    assert_eq!(z.states()[2], (CLOSED, 128));
    assert_eq!(z.areas(), [2]);
    assert_eq!(z.open_with_zrwa(0), Status::ZRWA_RESOURCES_UNAVAILABLE);
    assert_eq!(z.write(128, 4), Status::SUCCESS);
    assert_eq!(z.send(Zsa::FLUSH_ZRWA, 128 + 7), Status::SUCCESS);
    assert_eq!(z.states()[2], (IMPLICIT, 128 + 8));
    // Format takes it.
    let format = Command::new(nvme::AdminOpcode::FORMAT_NVM.0, 0, 1);
    assert_eq!(z.h.admin(format).status(), Status::SUCCESS);
    assert_eq!(z.areas(), [0usize; 0]);
    assert_eq!(z.open_with_zrwa(0), Status::SUCCESS);
}

/// As [`crate::zones::lasting`] has it, with areas.
#[test]
fn random_zrwa_histories_with_deaths_match_model() {
    let zrwa = Zrwa {
        resources: None,
        ..RANDOM.zrwa.unwrap()
    };
    crate::zones::lasting::histories(Geometry {
        max_open: None,
        max_active: None,
        zrwa: Some(zrwa),
        ..GEOMETRY
    });
}
