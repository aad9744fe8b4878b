//! Each command and its statuses, resets, reports.

use crate::common::*;
use crate::zones::world::*;
use controller::{ControllerConfig, NamespaceConfig};
use nvme::cmd::admin::Csi;
use nvme::cmd::zone::Zsa;
use nvme::identify::{
    Descriptor, IdentifyNamespace, IoCommandSets, NamespaceDescriptors, NsidList, ZonedController,
    ZonedNamespace,
};
use nvme::log::CommandsSupported;
use nvme::{Command, NvmOpcode, Status};
use volume::{Effect, Fault, IoErrorKind, OpKind};
use zerocopy::FromBytes;
use zones::{Geometry, Zones};

#[test]
fn identify_reports_zoned_namespace() {
    let zoned = Zones::new(GEOMETRY).unwrap();
    let config = with_zones(ns(2, mem(BYTES + 4096), 512), zoned, None);
    let mut h = Host::with(
        ControllerConfig::default(),
        vec![ns(1, mem(1 << 20), 512), config],
    );
    let list = |h: &mut Host, cns, csi: u32| -> Vec<u32> {
        let (status, page) = h.identify(cns, 0, csi << 24);
        assert_eq!(status, Status::SUCCESS);
        NsidList::read_from_bytes(&page).unwrap().iter().collect()
    };
    // A host that knows the NVM command set only does not see it.
    h.enable();
    assert_eq!(list(&mut h, 2, 0), [1]);
    assert_eq!(list(&mut h, 7, 0), [1]);
    assert_eq!(h.identify(0, 2, 0).1, [0; 4096]);
    enable(&mut h);
    assert_eq!(list(&mut h, 2, 0), [1, 2]);
    assert_eq!(list(&mut h, 7, 0), [1]);
    assert_eq!(list(&mut h, 7, 2), [2]);
    let (_, page) = h.identify(0x1c, 0, 0);
    let sets = IoCommandSets::read_from_bytes(&page).unwrap().combinations[0];
    assert!(sets.nvm() && sets.zns());
    for (nsid, csi) in [(1, Csi::NVM), (2, Csi::ZONED)] {
        let (_, page) = h.identify(3, nsid, 0);
        let page = NamespaceDescriptors::read_from_bytes(&page).unwrap();
        assert!(page.iter().any(|found| found == Descriptor::Csi(csi)));
    }
    let (_, page) = h.identify(0, 2, 0);
    let data = IdentifyNamespace::read_from_bytes(&page).unwrap();
    // What is behind the last zone belongs to none.
    assert_eq!((data.nsze.get(), data.ncap.get()), (512, 512));
    // A controller with Copy says so of all its namespaces ("NVM Command Set 1.1", 4.1.5.1).
    assert!(data.mssrl.get() > 0 && data.mcl.get() > 0);
    assert_eq!(data.dlfeat.drb(), 0);
    let (status, page) = h.identify(5, 2, 2 << 24);
    assert_eq!(status, Status::SUCCESS);
    let data = ZonedNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((data.mar_z.get(), data.mor_z.get()), (2, 1));
    assert_eq!((data.lbafe[0].zsze.get(), data.lbafe[0].zdes), (64, 0));
    assert!(data.ozcs.razb() && !data.ozcs.zrwasup() && data.zoc.get() == 0);
    assert_eq!(plain(h.identify(5, 1, 2 << 24).0), Status::INVALID_FIELD);
    let (status, page) = h.identify(6, 0, 2 << 24);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(ZonedController::read_from_bytes(&page).unwrap().zasl, 0);
    // No other namespace has the commands, and this one has not all of the others.
    assert_eq!(
        plain(h.io(send(Zsa::RESET, 0, false))),
        Status::INVALID_OPCODE
    );
}

/// Of a zoned namespace the log page says what it does.
#[test]
fn every_zoned_opcode_matches_effects_log() {
    let mut z = Zoned::new(GEOMETRY);
    let mut get = Command::new(nvme::AdminOpcode::GET_LOG_PAGE.0, 0, u32::MAX);
    get.cdw10 = (5 | 1023 << 16).into();
    get.cdw14 = (2 << 24).into();
    get.set_prps(PAGE, 0);
    assert_eq!(z.h.admin(get).status(), Status::SUCCESS);
    let log = CommandsSupported::read_from_bytes(&z.h.read(PAGE, 4096)).unwrap();
    for opcode in 0..=0xff {
        let mut command = Command::new(opcode, 0, 1);
        command.set_prps(DATA, 0);
        let invalid = plain(z.h.io(command)) == Status::INVALID_OPCODE;
        let says = log.iocs[usize::from(opcode)];
        assert_eq!(says.csupp(), !invalid, "{}", NvmOpcode(opcode));
    }
    for opcode in [
        NvmOpcode::ZONE_APPEND,
        NvmOpcode::ZONE_MANAGEMENT_SEND,
        NvmOpcode::ZONE_MANAGEMENT_RECEIVE,
    ] {
        assert!(log.iocs[usize::from(opcode.0)].csupp());
    }
    assert!(!log.iocs[usize::from(NvmOpcode::COPY.0)].csupp());
}

#[test]
fn zone_commands_return_status_of_standard() {
    let mut worn = Zones::new(GEOMETRY).unwrap();
    worn.set_worn(6, false);
    worn.set_worn(7, true);
    let mut z = Zoned::with(GEOMETRY, worn);
    assert_eq!(z.write(0, 8), Status::SUCCESS);
    for slba in [0, 7, 9] {
        assert_eq!(z.write(slba, 1), Status::ZONE_INVALID_WRITE, "{slba}");
    }
    assert_eq!(z.write(8, 41), Status::ZONED_BOUNDARY_ERROR);
    assert_eq!(z.append(0, 41), Err(Status::ZONED_BOUNDARY_ERROR));
    assert_eq!(z.append(1, 1), Err(Status::INVALID_FIELD));
    assert_eq!(z.append(8 * 64, 1), Err(Status::LBA_OUT_OF_RANGE));
    assert_eq!(z.write(8 * 64, 1), Status::LBA_OUT_OF_RANGE);
    assert_eq!(z.write(8, 40), Status::SUCCESS);
    assert_eq!(z.write(48, 1), Status::ZONE_IS_FULL);
    assert_eq!(z.append(0, 1), Err(Status::ZONE_IS_FULL));
    assert_eq!(z.write(6 * 64, 1), Status::ZONE_IS_READ_ONLY);
    assert_eq!(z.append(7 * 64, 1), Err(Status::ZONE_IS_OFFLINE));
    let read = z.command(NvmOpcode::READ, 6 * 64, 65);
    assert_eq!(plain(z.h.io(read)), Status::ZONE_IS_OFFLINE);
    assert_eq!(z.blocks(6 * 64, 64).len(), 64 * 512);
    // Two may be open, three active.
    assert_eq!(z.send(Zsa::OPEN, 64), Status::SUCCESS);
    assert_eq!(z.send(Zsa::OPEN, 128), Status::SUCCESS);
    assert_eq!(z.write(192, 1), Status::TOO_MANY_OPEN_ZONES);
    assert_eq!(z.send(Zsa::OPEN, 192), Status::TOO_MANY_OPEN_ZONES);
    assert_eq!(z.send(Zsa::CLOSE, 128), Status::SUCCESS);
    assert_eq!(z.write(192, 1), Status::SUCCESS);
    assert_eq!(z.write(256, 1), Status::TOO_MANY_ACTIVE_ZONES);
    // The one that is implicitly open gives its place.
    assert_eq!(z.write(128, 1), Status::SUCCESS);
    let states = z.states();
    assert_eq!(states[2], (IMPLICIT, 129));
    assert_eq!(states[3], (CLOSED, 193));
    assert_eq!(states[0], (FULL, u64::MAX));
    for (zsa, zone) in [
        (Zsa::CLOSE, 0),
        (Zsa::OPEN, 0),
        (Zsa::FINISH, 6),
        (Zsa::RESET, 7),
        (Zsa::OFFLINE, 1),
    ] {
        let status = z.send(zsa, zone * 64);
        assert_eq!(status, Status::INVALID_ZONE_STATE_TRANSITION, "{zsa}");
    }
    for zsa in [
        Zsa(0),
        Zsa::SET_DESCRIPTOR_EXTENSION,
        Zsa::FLUSH_ZRWA,
        Zsa(0xff),
    ] {
        assert_eq!(z.send(zsa, 0), Status::INVALID_FIELD, "{zsa}");
    }
    assert_eq!(z.send(Zsa::RESET, 1), Status::INVALID_FIELD);
    assert_eq!(z.send(Zsa::RESET, 8 * 64), Status::LBA_OUT_OF_RANGE);
    let open = open_with_zrwa(5 * 64);
    assert_eq!(plain(z.h.io(open)), Status::INVALID_FIELD);
    // Every status that zones have has been seen, but for those of random write areas; a namespace
    // that refuses writes has one more.
    let state = Zones::new(GEOMETRY).unwrap();
    let config = NamespaceConfig {
        read_only: true,
        ..with_zones(ns(1, mem(BYTES), 512), state, None)
    };
    let mut h = Host::with(ControllerConfig::default(), vec![config]);
    enable(&mut h);
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
    for command in [write, send(Zsa::RESET, 0, false)] {
        assert_eq!(plain(h.io(command)), Status::NAMESPACE_WRITE_PROTECTED);
    }
}

#[test]
fn zone_actions_apply_to_one_zone_or_all() {
    let unlimited = Geometry {
        max_open: None,
        max_active: None,
        ..GEOMETRY
    };
    let mut z = Zoned::new(unlimited);
    for zone in 0..4 {
        assert_eq!(z.write(zone * 64, 1 + zone as u32), Status::SUCCESS);
    }
    assert_eq!(z.send(Zsa::OPEN, 4 * 64), Status::SUCCESS);
    assert_eq!(z.send(Zsa::FINISH, 5 * 64), Status::SUCCESS);
    let wp = u64::MAX;
    let before = z.states();
    assert_eq!(before[0], (IMPLICIT, 1));
    assert_eq!(
        &before[3..6],
        [(IMPLICIT, 196), (EXPLICIT, 256), (FULL, wp)]
    );
    assert_eq!(z.send(Zsa::CLOSE, 0), Status::SUCCESS);
    assert_eq!(z.send_all(Zsa::OPEN), Status::SUCCESS);
    assert_eq!(z.states()[..2], [(EXPLICIT, 1), (IMPLICIT, 66)]);
    assert_eq!(z.send_all(Zsa::CLOSE), Status::SUCCESS);
    assert_eq!(z.states()[..5].iter().filter(|s| s.0 == CLOSED).count(), 5);
    assert_eq!(z.send_all(Zsa::FINISH), Status::SUCCESS);
    assert_eq!(z.states()[..6], [(FULL, wp); 6]);
    assert_eq!(z.states()[6], (EMPTY, 6 * 64));
    assert_eq!(z.send_all(Zsa::RESET), Status::SUCCESS);
    let empty: Vec<(u8, u64)> = (0..8).map(|zone| (EMPTY, zone * 64)).collect();
    assert_eq!(z.states(), empty);
    assert_eq!(z.send_all(Zsa::OFFLINE), Status::SUCCESS);
    z.h.die();
    assert_eq!(z.states(), empty);
}

#[test]
fn zone_reports_follow_standard() {
    let mut z = Zoned::new(GEOMETRY);
    assert_eq!(z.write(0, 48), Status::SUCCESS);
    assert_eq!(z.write(128, 5), Status::SUCCESS);
    assert_eq!(z.send(Zsa::OPEN, 3 * 64), Status::SUCCESS);
    // From the zone on that the block lies in.
    let (count, zones) = z.report(2 * 64 + 63, 0, false, 4096).unwrap();
    assert_eq!((count, zones.len()), (6, 6));
    assert_eq!((zones[0].zslba.get(), zones[0].wp.get()), (128, 133));
    for (filter, wanted) in [(1, 5), (2, 1), (3, 1), (4, 0), (5, 1), (6, 0), (7, 0)] {
        let (count, zones) = z.report(0, filter, false, 4096).unwrap();
        assert_eq!((count, zones.len()), (wanted, wanted as usize), "{filter}");
    }
    // There is room for two.
    let (count, zones) = z.report(0, 1, false, 64 * 3 + 60).unwrap();
    assert_eq!((count, zones.len()), (5, 2));
    let (count, zones) = z.report(0, 1, true, 64 * 3 + 60).unwrap();
    assert_eq!((count, zones.len()), (2, 2));
    assert_eq!(zones[1].zslba.get(), 4 * 64);
    // The header alone, and not even that.
    assert_eq!(z.report(0, 0, false, 64).unwrap(), (8, vec![]));
    let mut command = z.h.rw(NvmOpcode::ZONE_MANAGEMENT_RECEIVE, 1, 0, 1, DATA);
    command.cdw12 = 0.into();
    z.h.write(DATA, &[0xee; 16]);
    assert_eq!(z.h.io(command), Status::SUCCESS);
    assert_eq!(z.h.read(DATA, 8), [8, 0, 0, 0, 0xee, 0xee, 0xee, 0xee]);
    assert_eq!(z.report(512, 0, false, 64), Err(Status::LBA_OUT_OF_RANGE));
    assert_eq!(z.report(0, 8, false, 64), Err(Status::INVALID_FIELD));
    // Of extensions nothing can be reported; and not more than a transfer has.
    let mut extended = command;
    extended.cdw13 = 1.into();
    assert_eq!(plain(z.h.io(extended)), Status::INVALID_FIELD);
    command.cdw12 = (1 << 20).into();
    assert_eq!(plain(z.h.io(command)), Status::INVALID_FIELD);
}

/// Appends that are in flight together, each with a place and data of its own.
#[test]
fn concurrent_appends_get_distinct_places() {
    let mut z = Zoned::new(GEOMETRY);
    z.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let mut sent = Vec::new();
    for (number, blocks) in [3u32, 1, 8, 2, 5, 1].into_iter().enumerate() {
        let at = DATA + number as u64 * 8192;
        z.h.write(at, &pattern(number as u64, blocks as usize * 512));
        let mut command = z.h.rw(NvmOpcode::ZONE_APPEND, 1, 64, blocks, at);
        z.h.prps(&mut command, at, u64::from(blocks) * BLOCK, PAGE);
        sent.push((z.h.submit(1, command), number as u64, blocks));
        let faults = z.data.clone();
        z.h.run_held(&faults, number + 1);
    }
    // The zone counts them all.
    assert_eq!(z.states()[1], (IMPLICIT, 64 + 20));
    z.data.clear();
    z.data.release();
    let mut done = Vec::new();
    z.h.until(|h| {
        done.extend(h.reap_all(1));
        done.len() == 6
    });
    let mut at = 64;
    for (cid, seed, blocks) in sent {
        let done = done.iter().find(|done| done.cid.get() == cid).unwrap();
        assert_eq!(placed(done), Ok(at));
        assert_eq!(z.blocks(at, blocks), pattern(seed, blocks as usize * 512));
        at += u64::from(blocks);
    }
}

/// A place beyond 32 bits is in both dwords.
#[test]
fn append_beyond_32_bits_returns_64_bit_place() {
    let geometry = Geometry {
        zones: 4,
        size: 1 << 40,
        capacity: 1 << 40,
        max_open: None,
        max_active: None,
        zrwa: None,
    };
    let config = with_zones(
        ns(1, null(1 << 52), 512),
        Zones::new(geometry).unwrap(),
        None,
    );
    let mut h = Host::with(ControllerConfig::default(), vec![config]);
    enable(&mut h);
    for wanted in [3 << 40, (3 << 40) + 8] {
        let append = h.rw(NvmOpcode::ZONE_APPEND, 1, 3 << 40, 8, DATA);
        assert_eq!(placed(&h.command(1, append)), Ok(wanted));
    }
}

#[test]
fn zone_reset_discards_data() {
    let mut z = Zoned::new(GEOMETRY);
    z.h.write(DATA, &pattern(9, 48 * 512));
    assert_eq!(z.write(0, 48), Status::SUCCESS);
    assert_eq!(z.write(64, 16), Status::SUCCESS);
    assert_eq!(z.blocks(0, 48), pattern(9, 48 * 512));
    assert_eq!(z.send(Zsa::RESET, 0), Status::SUCCESS);
    assert_eq!(z.states()[0], (EMPTY, 0));
    assert_eq!(z.blocks(0, 48), vec![0; 48 * 512]);
    assert_eq!(z.blocks(64, 16), pattern(9, 48 * 512)[..16 * 512]);
    assert_eq!(z.append(0, 4), Ok(0));
    // Reads go over zones' borders.
    assert_eq!(z.blocks(60, 8)[4 * 512..], pattern(9, 48 * 512)[..4 * 512]);
}

/// Format takes the data of all zones, and their write pointers.
#[test]
fn format_empties_zones() {
    let mut z = Zoned::new(GEOMETRY);
    z.h.write(DATA, &pattern(9, 48 * 512));
    assert_eq!(z.write(0, 48), Status::SUCCESS);
    assert_eq!(z.write(64, 16), Status::SUCCESS);
    let format = Command::new(nvme::AdminOpcode::FORMAT_NVM.0, 0, 1);
    assert_eq!(z.h.admin(format).status(), Status::SUCCESS);
    assert_eq!(z.states()[..2], [(EMPTY, 0), (EMPTY, 64)]);
    assert_eq!(z.blocks(64, 16), vec![0; 16 * 512]);
    assert_eq!(z.append(64, 1), Ok(64));
}

/// A zone that is being reset when a format begins is empty after it, too.
#[test]
fn format_waits_for_zone_reset() {
    let mut z = Zoned::new(GEOMETRY);
    assert_eq!(z.write(0, 48), Status::SUCCESS);
    assert_eq!(z.write(64, 16), Status::SUCCESS);
    z.data.add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Hold));
    z.h.submit(1, send(Zsa::RESET, 0, false));
    let faults = z.data.clone();
    z.h.run_held(&faults, 1);
    z.h.submit(0, Command::new(nvme::AdminOpcode::FORMAT_NVM.0, 0, 1));
    for _ in 0..50 {
        z.h.round();
    }
    assert!(z.h.peek(0).is_none(), "it has not waited");
    z.data.release();
    z.h.until(|h| h.peek(0).is_some());
    assert_eq!(z.h.reap(0).unwrap().status(), Status::SUCCESS);
    assert_eq!(z.h.reap(1).unwrap().status(), Status::SUCCESS);
    assert_eq!(z.states()[..2], [(EMPTY, 0), (EMPTY, 64)]);
    for number in 0..2 {
        assert_eq!(z.kept().get(number).unwrap().written, 0, "in the table");
    }
}

/// A write that is still with the volume would overwrite data that is written after the reset.
#[test]
fn zone_reset_waits_for_writes() {
    let mut z = Zoned::new(GEOMETRY);
    z.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    z.h.write(DATA, &pattern(1, 8 * 512));
    let write = z.command(NvmOpcode::WRITE, 0, 8);
    let written = z.h.submit(1, write);
    let faults = z.data.clone();
    z.h.run_held(&faults, 1);
    let reset = z.h.submit(1, send(Zsa::RESET, 0, false));
    for _ in 0..50 {
        z.h.round();
    }
    assert!(z.h.peek(1).is_none());
    // Commands that arrive meanwhile are to be sent again.
    assert_eq!(z.write(8, 1), Status::COMMAND_INTERRUPTED);
    assert_eq!(z.append(0, 1), Err(Status::COMMAND_INTERRUPTED));
    assert_eq!(z.send(Zsa::RESET, 0), Status::COMMAND_INTERRUPTED);
    assert_eq!(z.send_all(Zsa::FINISH), Status::COMMAND_INTERRUPTED);
    // Another zone has no business with it.
    assert_eq!(z.write(64, 1), Status::SUCCESS);
    z.data.release();
    let mut done = Vec::new();
    z.h.until(|h| {
        done.extend(h.reap_all(1));
        done.len() == 2
    });
    let done: Vec<(u16, Status)> = done.iter().map(|d| (d.cid.get(), d.status())).collect();
    assert_eq!(done, [(written, Status::SUCCESS), (reset, Status::SUCCESS)]);
    assert_eq!(z.states()[0], (EMPTY, 0));
    assert_eq!(z.blocks(0, 8), vec![0; 8 * 512]);
}

/// A zone reset that fails, or during a controller reset, leaves the zone as it was.
#[test]
fn failed_zone_reset_leaves_zone_unchanged() {
    let mut z = Zoned::new(GEOMETRY);
    assert_eq!(z.write(0, 8), Status::SUCCESS);
    let error = IoErrorKind::MediaWrite.into();
    z.data
        .add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Fail(error)));
    assert_eq!(z.send(Zsa::RESET, 0), Status::WRITE_FAULT);
    assert_eq!(z.states()[0], (IMPLICIT, 8));
    z.data.clear();
    z.data.add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Hold));
    z.h.submit(1, send(Zsa::RESET, 0, false));
    let faults = z.data.clone();
    z.h.run_held(&faults, 1);
    z.h.disable();
    z.data.release();
    z.h.until(|h| !h.csts().rdy());
    enable(&mut z.h);
    assert_eq!(z.send(Zsa::RESET, 0), Status::SUCCESS);
    assert_eq!(z.states()[0], (EMPTY, 0));
    // A controller-level reset is no loss of power: open zones stay open.
    assert_eq!(z.send(Zsa::OPEN, 64), Status::SUCCESS);
    z.h.disable();
    enable(&mut z.h);
    assert_eq!(z.states()[1], (EXPLICIT, 64));
}

/// A write that fails has moved the write pointer.
#[test]
fn failed_write_moves_write_pointer() {
    let mut z = Zoned::new(GEOMETRY);
    let error = IoErrorKind::MediaWrite.into();
    z.data
        .add(Fault::nth(OpKind::Write, 2, Effect::Fail(error)));
    assert_eq!(z.write(0, 4), Status::SUCCESS);
    assert_eq!(z.write(4, 4), Status::WRITE_FAULT);
    assert_eq!(z.states()[0], (IMPLICIT, 8));
    assert_eq!(z.append(0, 4), Ok(8));
    // A write with inaccessible data does not move the write pointer.
    let mut nowhere = z.command(NvmOpcode::WRITE, 12, 4);
    nowhere.set_prps(0x7000_0000_0000, 0);
    assert_eq!(plain(z.h.io(nowhere)), Status::DATA_TRANSFER_ERROR);
    assert_eq!(z.states()[0], (IMPLICIT, 12));
}

#[test]
fn write_zeroes_and_copy_move_write_pointer() {
    let mut z = Zoned::new(GEOMETRY);
    z.h.write(DATA, &pattern(3, 8 * 512));
    assert_eq!(z.write(0, 8), Status::SUCCESS);
    let zeroes = |z: &Zoned, slba| {
        let mut command = z.h.rw(NvmOpcode::WRITE_ZEROES, 1, slba, 8, 0);
        command.set_prps(0, 0);
        command
    };
    let command = zeroes(&z, 0);
    assert_eq!(plain(z.h.io(command)), Status::ZONE_INVALID_WRITE);
    let command = zeroes(&z, 8);
    assert_eq!(z.h.io(command), Status::SUCCESS);
    assert_eq!(z.states()[0], (IMPLICIT, 16));
    // Dataset Management is advice, and here nobody follows it.
    z.h.write(DATA, &[0; 4]);
    z.h.write(DATA + 4, &8u32.to_le_bytes());
    z.h.write(DATA + 8, &0u64.to_le_bytes());
    let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    command.cdw11 = 4.into();
    command.set_prps(DATA, 0);
    assert_eq!(z.h.io(command), Status::SUCCESS);
    assert_eq!(z.blocks(0, 8), pattern(3, 8 * 512));
    assert_eq!(z.blocks(8, 8), vec![0; 8 * 512]);
    // Compare and Verify read.
    z.h.write(DATA, &pattern(3, 8 * 512));
    let compare = z.command(NvmOpcode::COMPARE, 0, 8);
    assert_eq!(z.h.io(compare), Status::SUCCESS);
    let verify = z.command(NvmOpcode::VERIFY, 0, 64);
    assert_eq!(z.h.io(verify), Status::SUCCESS);
}
