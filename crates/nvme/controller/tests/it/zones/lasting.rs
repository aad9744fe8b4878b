//! What waits for the table, and what the next process finds.

use crate::common::*;
use crate::zones::world::*;
use controller::{Controller, NamespaceConfig};
use nvme::cmd::zone::Zsa;
use nvme::{Command, NvmOpcode, Status};
use volume::{Effect, Fault, Io, IoErrorKind, IoOptions, OpKind};
use zones::{Action, Geometry, ZoneRefusal, ZoneState, Zones};

/// What is to be durable waits for the table's file, behind the data; nothing else does.
#[test]
fn durable_write_flushes_zone_table_after_data() {
    let mut z = Zoned::new(GEOMETRY);
    z.file.add(Fault::always(OpKind::Flush, Effect::Hold));
    assert_eq!(z.write(0, 1), Status::SUCCESS);
    assert_eq!(z.append(0, 1), Ok(1));
    let fua = |mut command: Command| {
        command.cdw12 = (command.cdw12.get() | 1 << 30).into();
        command
    };
    let commands = [
        Command::new(NvmOpcode::FLUSH.0, 0, 1),
        Command::new(NvmOpcode::FLUSH.0, 0, u32::MAX),
        fua(z.command(NvmOpcode::WRITE, 2, 1)),
        fua(z.command(NvmOpcode::ZONE_APPEND, 0, 1)),
        send(Zsa::OPEN, 64, false),
        send(Zsa::RESET, 0, false),
    ];
    for (number, command) in commands.into_iter().enumerate() {
        z.h.submit(1, command);
        let faults = z.file.clone();
        z.h.run_held(&faults, 1);
        assert!(z.h.peek(1).is_none(), "{number}");
        z.file.release();
        let mut done = None;
        z.h.until(|h| {
            done = h.reap(1);
            done.is_some()
        });
        let done = done.unwrap();
        assert_eq!(done.status(), Status::SUCCESS, "{number}");
        if number == 3 {
            assert_eq!(placed(&done), Ok(3));
        }
    }
    z.file.clear();
    // A table that cannot be written is an error of the command.
    let error = IoErrorKind::NotDurable.into();
    z.file
        .add(Fault::always(OpKind::Flush, Effect::Fail(error)));
    let flush = Command::new(NvmOpcode::FLUSH.0, 0, 1);
    assert_eq!(plain(z.h.io(flush)), Status::WRITE_FAULT);
    assert_eq!(z.send(Zsa::FINISH, 64), Status::WRITE_FAULT);
    z.file.clear();
    // The host's own order: a write cache that is off makes each write durable.
    let off = z.h.set_feature(nvme::feature::Fid::VOLATILE_WRITE_CACHE, 0);
    assert_eq!(off.status(), Status::SUCCESS);
    z.file.add(Fault::nth(OpKind::Flush, 1, Effect::Hold));
    let write = z.command(NvmOpcode::WRITE, 128, 1);
    z.h.submit(1, write);
    let faults = z.file.clone();
    z.h.run_held(&faults, 1);
    assert!(z.h.peek(1).is_none());
    z.file.release();
    z.h.until(|h| h.reap(1).is_some());
}

/// Appends that were in flight when the process died go where they would have gone.
#[test]
fn appends_of_dead_process_keep_their_place() {
    let mut z = Zoned::new(GEOMETRY);
    z.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let mut sent = Vec::new();
    for number in 0..4u64 {
        let at = DATA + number * 4096;
        z.h.write(at, &pattern(number, 2 * 512));
        let append = z.h.rw(NvmOpcode::ZONE_APPEND, 1, 0, 2, at);
        sent.push(z.h.submit(1, append));
    }
    let faults = z.data.clone();
    z.h.run_held(&faults, 4);
    z.data.clear();
    z.h.die();
    assert_eq!(z.h.recovery.replayed, 4);
    let mut done = Vec::new();
    z.h.until(|h| {
        done.extend(h.reap_all(1));
        done.len() == 4
    });
    for (number, cid) in (0..).zip(sent) {
        let done = done.iter().find(|done| done.cid.get() == cid).unwrap();
        assert_eq!(placed(done), Ok(number * 2));
        assert_eq!(z.blocks(number * 2, 2), pattern(number, 2 * 512));
    }
    assert_eq!(z.states()[0], (IMPLICIT, 8));
    assert_eq!(z.append(0, 1), Ok(8));
}

/// A completion that waits for room still says where the append went, in the next process.
#[test]
fn append_place_survives_full_cq_and_process() {
    let mut z = Zoned::new(GEOMETRY);
    z.h.create_cq(2, 2, RINGS + 2 * RING_STEP + 0x1000, Some(2));
    assert_eq!(
        z.h.create_sq(2, 2, 16, RINGS + 2 * RING_STEP),
        Status::SUCCESS
    );
    let (sq, cq) = (RINGS + 2 * RING_STEP, RINGS + 2 * RING_STEP + 0x1000);
    z.h.pairs.insert(2, Pair::new(sq, cq, 16));
    for number in 0..3 {
        let append = z.h.rw(NvmOpcode::ZONE_APPEND, 1, 64 * number, 3, DATA);
        z.h.submit(2, append);
        z.h.run();
    }
    // The ring of two has room for one.
    z.h.pairs.get_mut(&2).unwrap().cq.size = 2;
    z.h.die();
    let mut done = Vec::new();
    z.h.until(|h| {
        done.extend(h.reap(2));
        done.len() == 3
    });
    let places: Vec<_> = done.iter().map(placed).collect();
    assert_eq!(places, [Ok(0), Ok(64), Ok(128)]);
}

/// Another process that begins anew finds the zones as far as they were written, and none open.
#[test]
fn zones_survive_cold_start_closed() {
    let mut z = Zoned::new(GEOMETRY);
    assert_eq!(z.write(0, 8), Status::SUCCESS);
    assert_eq!(z.write(64, 48), Status::SUCCESS);
    assert_eq!(z.send(Zsa::OPEN, 128), Status::SUCCESS);
    let zones = z.kept();
    assert_eq!(zones.open(), 2);
    let mut z = Zoned::with(GEOMETRY, zones);
    let states = z.states();
    assert_eq!(states[..3], [(CLOSED, 8), (FULL, u64::MAX), (EMPTY, 128)]);
}

#[test]
fn unsupported_zoned_configuration_is_refused() {
    let io = Io::new(IoOptions::default());
    let config = || with_zones(ns(1, mem(BYTES), 512), Zones::new(GEOMETRY).unwrap(), None);
    let short = NamespaceConfig {
        volume: mem(BYTES - 4096),
        ..config()
    };
    let error = Controller::new(0, Default::default(), vec![short], &io)
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("zones need 262144 bytes"),
        "{error}"
    );
}

#[test]
fn random_histories_with_deaths_match_model() {
    // Which zone is closed for another one is each process's own choice.
    histories(Geometry {
        max_open: None,
        max_active: None,
        ..GEOMETRY
    });
}

/// Random commands, one after the other, of a process that dies wherever it may; a state machine of
/// its own says what becomes of each, and what is written where.
pub fn histories(geometry: Geometry) {
    const POINTS: [&str; 11] = [
        "controller.zone.recorded",
        "controller.zone.taken",
        "controller.zone.sent",
        "controller.zone.changed",
        "controller.zone.reset",
        "controller.record.fields",
        "controller.record.written",
        "controller.record.posted",
        "controller.record.removed",
        "controller.submit.submitted",
        "controller.post.posted",
    ];
    let mut z = Zoned::new(geometry);
    let mut model = Zones::new(geometry).unwrap();
    let mut data = vec![0u8; BYTES as usize];
    let mut seed = 1u64;
    let mut random = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let died = |h: &Host, before: u32| h.crashes.values().sum::<u32>() > before;
    // Openings with an area, and flushes of it, that a process has died within.
    let mut died_within = [0u32; 2];
    for step in 0..4000u64 {
        match random(3) {
            0 => crash::arm(POINTS[random(11) as usize], random(2) + 1),
            1 => z.h.die(),
            _ => {}
        }
        let (zone, blocks) = (random(8), 1 + random(20));
        let (start, len) = (zone * 64, (blocks * BLOCK) as usize);
        let fresh = pattern(step, len);
        let mut put = |at: u64, bytes: &[u8]| {
            data[(at * BLOCK) as usize..][..bytes.len()].copy_from_slice(bytes);
        };
        let deaths: u32 = z.h.crashes.values().sum();
        let empty = model.get(zone as u32).unwrap().state == ZoneState::Empty;
        // Areas are for empty zones: these get some, and the others are made empty for it.
        let choice = match random(if geometry.zrwa.is_some() { 15 } else { 10 }) {
            4..7 if empty && geometry.zrwa.is_some() => 10,
            10..12 if !empty => 7,
            choice => choice,
        };
        match choice {
            0..4 => {
                let written = model.get(zone as u32).unwrap().written;
                let lba = if model.get(zone as u32).unwrap().zrwa {
                    start + written + random(20)
                } else {
                    start + written + u64::from(random(12) == 0)
                };
                z.h.write(DATA, &fresh);
                let closed = model
                    .get((lba / 64) as u32)
                    .is_some_and(|z| z.state == ZoneState::Closed);
                let wanted = if lba + blocks > 8 * 64 {
                    Err(ZoneRefusal::OutOfRange)
                } else {
                    model.write(lba, blocks)
                };
                let status = z.write(lba, blocks as u32);
                assert_eq!(status, status_of(wanted), "step {step}");
                if wanted.is_ok() {
                    put(lba, &fresh);
                    // A process that finds the record alone leaves the zone closed.
                    let number = (lba / 64) as u32;
                    if closed && died(&z.h, deaths) && z.states()[number as usize].0 == CLOSED {
                        assert!(model.get(number).unwrap().zrwa, "step {step}");
                        model.act(number, Action::Close).unwrap();
                    }
                }
            }
            4..7 => {
                z.h.write(DATA, &fresh);
                let wanted = model.check_append(start, blocks);
                let found = z.append(start, blocks as u32);
                assert_eq!(found, wanted.map_err(|r| plain(r.status())), "step {step}");
                if let Ok(at) = wanted {
                    model.write(at, blocks).unwrap();
                    put(at, &fresh);
                }
            }
            7 => {
                let wanted = model.begin_reset(zone as u32);
                let status = z.send(Zsa::RESET, start);
                assert_eq!(status, status_of(wanted.map(|_| ())), "step {step}");
                let (at, blocks) = wanted.unwrap();
                model.end_reset(zone as u32);
                put(at, &vec![0; (blocks * BLOCK) as usize]);
            }
            10..12 => {
                let wanted = model.open_with_zrwa(zone as u32);
                let status = z.open_with_zrwa(start);
                assert_eq!(status, status_of(wanted), "step {step}");
                died_within[0] += u32::from(died(&z.h, deaths) && wanted.is_ok());
            }
            12.. => {
                let written = model.get(zone as u32).unwrap().written;
                let last = [3, 7, 3, 7, random(9)][random(5) as usize];
                let lba = (start + written + last).min(8 * 64 - 1);
                let wanted = model.flush(lba);
                let status = z.send(Zsa::FLUSH_ZRWA, lba);
                assert_eq!(status, status_of(wanted), "step {step}, {lba}");
                died_within[1] += u32::from(died(&z.h, deaths) && wanted.is_ok());
            }
            _ => {
                let actions = [
                    (Zsa::OPEN, Action::Open),
                    (Zsa::CLOSE, Action::Close),
                    (Zsa::FINISH, Action::Finish),
                ];
                let (zsa, action) = actions[random(3) as usize];
                let wanted = model.act(zone as u32, action);
                assert_eq!(z.send(zsa, start), status_of(wanted), "step {step}, {zsa}");
            }
        }
        crash::disarm();
        let states = z.states();
        for (number, (state, pointer)) in (0..).zip(states) {
            let zone = model.get(number).unwrap();
            assert_eq!(state, zone.state.number(), "zone {number}, step {step}");
            let area = z.kept().get(number).unwrap().zrwa;
            assert_eq!(area, zone.zrwa, "zone {number}, step {step}");
            if zone.state != ZoneState::Full {
                assert_eq!(
                    pointer,
                    u64::from(number) * 64 + zone.written,
                    "step {step}"
                );
            }
        }
        assert_eq!(
            z.blocks(start, 64),
            data[(start * BLOCK) as usize..][..64 * 512]
        );
    }
    if geometry.zrwa.is_some() {
        assert!(died_within.iter().all(|n| *n > 10), "{died_within:?}");
    }
    for point in POINTS {
        assert!(
            z.h.crashes.get(point).is_some_and(|n| *n > 2),
            "{point}: {:?}",
            z.h.crashes
        );
    }
}
