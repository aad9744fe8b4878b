//! Zoned namespaces: every status, appends that are in flight together, resets, reports, what waits
//! for the table, and what the next process finds.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

use common::*;
use controller::{Controller, ControllerConfig, NamespaceConfig, ZoneTable, ZonedState};
use dma::SharedPages;
use nvme::cmd::admin::Csi;
use nvme::cmd::zone::{ReportHeader, SendCdw13, ZoneDescriptor, Zsa};
use nvme::identify::{
    Descriptor, IdentifyNamespace, IoCommandSets, NamespaceDescriptors, NsidList, ZonedController,
    ZonedNamespace,
};
use nvme::log::CommandsSupported;
use nvme::regs::{self, CcCss};
use nvme::{Command, Completion, NvmOpcode, Status};
use std::sync::Arc;
use volume::{Effect, Fault, Faults, Io, IoErrorKind, IoOptions, OpKind, Volume};
use zerocopy::FromBytes;
use zones::table::{self, Identity};
use zones::{Action, Geometry, Refusal, State, Zones};

/// Eight zones of 64 blocks, 48 of which can be written.
const GEOMETRY: Geometry = Geometry {
    zones: 8,
    size: 64,
    capacity: 48,
    max_open: Some(2),
    max_active: Some(3),
};

const BLOCK: u64 = 512;
const BYTES: u64 = 8 * 64 * BLOCK;
/// Where reports go.
const REPORT: u64 = DATA + (8 << 20);
const IDENTITY: Identity = Identity {
    namespace: [1; 16],
    block: 512,
};

/// A zoned namespace on a volume with faults, and its table, whose file has some, too.
struct Zoned {
    h: Host,
    data: Arc<Faults>,
    file: Arc<Faults>,
    pages: SharedPages,
}

/// What is in the table.
fn kept(pages: &SharedPages, geometry: Geometry) -> Zones {
    let mut bytes = vec![0; pages.len()];
    pages.memory().read(0, &mut bytes).unwrap();
    table::decode(&bytes, geometry, IDENTITY).unwrap()
}

fn with_zones(config: NamespaceConfig, zones: Zones, table: Option<ZoneTable>) -> NamespaceConfig {
    NamespaceConfig {
        zones: Some(Arc::new(ZonedState::new(zones, table))),
        ..config
    }
}

/// As [`Host::enable`], with all command sets (CC.CSS).
fn enable(h: &mut Host) {
    h.enable();
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.write(ACQ, &[0; 32 * 16]);
    h.pairs.insert(0, Pair::new(ASQ, ACQ, 32));
    let cc = Host::cc_enabled().with_css(CcCss::ALL_SUPPORTED);
    h.set32(regs::CC, cc.into_bits());
    h.create_pair(1, 64);
}

impl Zoned {
    fn new(geometry: Geometry) -> Self {
        Self::with(geometry, Zones::new(geometry).unwrap())
    }

    fn with(geometry: Geometry, zones: Zones) -> Self {
        let (volume, data) = faulty(BYTES);
        let (file, faults) = faulty(4096);
        let pages = SharedPages::new(4096).unwrap();
        let bytes = table::encode(&zones, IDENTITY);
        pages.memory().write(0, &bytes).unwrap();
        let file: Arc<dyn Volume> = Arc::new(Cached(file));
        let table = {
            let (pages, file) = (pages.clone(), file.clone());
            move || ZoneTable::new(pages.clone(), geometry.zones, file.clone())
        };
        let config = ns(1, Arc::new(Cached(volume)), 512);
        let config = with_zones(config, zones, table());
        let mut h = Host::with(ControllerConfig::default(), vec![config]);
        let again = pages.clone();
        h.reload = Some(Box::new(move |config| {
            let zones = kept(&again, geometry);
            config.zones = Some(Arc::new(ZonedState::new(zones, table())));
        }));
        enable(&mut h);
        Self {
            h,
            data,
            file: faults,
            pages,
        }
    }

    fn kept(&self) -> Zones {
        kept(&self.pages, GEOMETRY)
    }

    fn command(&self, opcode: NvmOpcode, slba: u64, blocks: u32) -> Command {
        let mut command = self.h.rw(opcode, 1, slba, blocks, DATA);
        let len = u64::from(blocks) * BLOCK;
        self.h.prps(&mut command, DATA, len, PAGE);
        command
    }

    fn write(&mut self, slba: u64, blocks: u32) -> Status {
        let command = self.command(NvmOpcode::WRITE, slba, blocks);
        plain(self.h.io(command))
    }

    fn append(&mut self, start: u64, blocks: u32) -> Result<u64, Status> {
        let command = self.command(NvmOpcode::ZONE_APPEND, start, blocks);
        let done = self.h.command(1, command);
        placed(&done)
    }

    fn send(&mut self, zsa: Zsa, slba: u64) -> Status {
        let command = send(zsa, slba, false);
        plain(self.h.io(command))
    }

    fn send_all(&mut self, zsa: Zsa) -> Status {
        plain(self.h.io(send(zsa, 0, true)))
    }

    /// The report of zones in a buffer of so many bytes.
    fn report(
        &mut self,
        slba: u64,
        filter: u8,
        partial: bool,
        bytes: usize,
    ) -> Result<(u64, Vec<ZoneDescriptor>), Status> {
        let mut command = self
            .h
            .rw(NvmOpcode::ZONE_MANAGEMENT_RECEIVE, 1, slba, 1, REPORT);
        command.cdw12 = (bytes as u32 / 4 - 1).into();
        command.cdw13 = (u32::from(filter) << 8 | u32::from(partial) << 16).into();
        self.h.write(REPORT, &vec![0xee; bytes]);
        let status = plain(self.h.io(command));
        if status != Status::SUCCESS {
            return Err(status);
        }
        let data = self.h.read(REPORT, bytes);
        let (header, rest) = ReportHeader::ref_from_prefix(&data).unwrap();
        let zones = rest.chunks_exact(64);
        let zones = zones.map(|zone| ZoneDescriptor::read_from_bytes(zone).unwrap());
        let there = zones.take_while(|zone| zone.zt == 2).collect();
        Ok((header.zones.get(), there))
    }

    /// States and write pointers, of all zones.
    fn states(&mut self) -> Vec<(u8, u64)> {
        let (count, zones) = self.report(0, 0, false, 4096).unwrap();
        assert_eq!((count, zones.len()), (8, 8));
        let kept = self.kept();
        for (number, zone) in (0..).zip(&zones) {
            assert_eq!(zone.zslba.get(), u64::from(number) * 64);
            assert_eq!(zone.zcap.get(), 48);
            // The table says the same at any time.
            assert_eq!(kept.get(number).unwrap().state.number(), zone.state());
        }
        let states = zones.iter().map(|zone| (zone.state(), zone.wp.get()));
        states.collect()
    }

    fn blocks(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        let mut read = self.command(NvmOpcode::READ, slba, blocks);
        let (at, len) = (DATA + (1 << 20), u64::from(blocks) * BLOCK);
        self.h.prps(&mut read, at, len, PAGE);
        assert_eq!(self.h.io(read), Status::SUCCESS);
        self.h.read(at, len as usize)
    }
}

fn send(zsa: Zsa, slba: u64, all: bool) -> Command {
    let mut command = Command::new(NvmOpcode::ZONE_MANAGEMENT_SEND.0, 0, 1);
    command.set_slba(slba);
    let cdw13 = SendCdw13::new().with_zsa(zsa).with_select_all(all);
    command.cdw13 = cdw13.into_bits().into();
    command
}

/// Where an append went to.
fn placed(done: &Completion) -> Result<u64, Status> {
    plain(done.status()).into_result()?;
    Ok(u64::from(done.dw1.get()) << 32 | u64::from(done.dw0.get()))
}

const EMPTY: u8 = 1;
const IMPLICIT: u8 = 2;
const EXPLICIT: u8 = 3;
const CLOSED: u8 = 4;
const FULL: u8 = 0xe;

#[test]
fn the_host_is_told_what_it_is() {
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
    assert_eq!((data.mssrl.get(), data.mcl.get()), (0, 0));
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
fn every_opcode() {
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
fn every_status() {
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
        Zsa::COMMIT,
        Zsa(0xff),
    ] {
        assert_eq!(z.send(zsa, 0), Status::INVALID_FIELD, "{zsa}");
    }
    assert_eq!(z.send(Zsa::RESET, 1), Status::INVALID_FIELD);
    assert_eq!(z.send(Zsa::RESET, 8 * 64), Status::LBA_OUT_OF_RANGE);
    // Every status that zones have has been seen, on a namespace that refuses writes one more.
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
fn actions_on_one_zone_and_on_all() {
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
fn reports() {
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
fn appends_get_places_of_their_own() {
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
fn far_appends() {
    let geometry = Geometry {
        zones: 4,
        size: 1 << 40,
        capacity: 1 << 40,
        max_open: None,
        max_active: None,
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
fn a_reset_takes_the_data_away() {
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
fn a_format_empties_zones() {
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

/// A write that is still with the volume would be written over what comes after the reset.
#[test]
fn a_reset_waits_for_writes() {
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
    // What comes meanwhile is to come again.
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

/// A reset that fails, or whose controller is reset, leaves the zone as it was.
#[test]
fn resets_that_come_to_nothing() {
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
fn a_failed_write_stays_counted() {
    let mut z = Zoned::new(GEOMETRY);
    let error = IoErrorKind::MediaWrite.into();
    z.data
        .add(Fault::nth(OpKind::Write, 2, Effect::Fail(error)));
    assert_eq!(z.write(0, 4), Status::SUCCESS);
    assert_eq!(z.write(4, 4), Status::WRITE_FAULT);
    assert_eq!(z.states()[0], (IMPLICIT, 8));
    assert_eq!(z.append(0, 4), Ok(8));
    // One whose data cannot be found has not.
    let mut nowhere = z.command(NvmOpcode::WRITE, 12, 4);
    nowhere.set_prps(0x7000_0000_0000, 0);
    assert_eq!(plain(z.h.io(nowhere)), Status::DATA_TRANSFER_ERROR);
    assert_eq!(z.states()[0], (IMPLICIT, 12));
}

#[test]
fn other_commands_that_write() {
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

/// What is to be durable waits for the table's file, behind the data; nothing else does.
#[test]
fn durable_is_with_the_table() {
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
fn appends_of_a_process_that_has_died() {
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
fn completions_that_wait_for_room() {
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
    z.h.pairs.get_mut(&2).unwrap().size = 2;
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
fn a_process_that_begins_anew() {
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
fn controllers_that_cannot_have_zones() {
    let io = Io::new(IoOptions::default());
    let config = || with_zones(ns(1, mem(BYTES), 512), Zones::new(GEOMETRY).unwrap(), None);
    let workers = ControllerConfig {
        workers: 2,
        ..Default::default()
    };
    let error = Controller::new(0, workers, vec![config()], &io)
        .err()
        .unwrap();
    assert!(error.to_string().contains("has zones"), "{error}");
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

/// Random commands, one after the other, of a process that dies wherever it may; a state machine of
/// its own says what becomes of each, and what is written where.
#[test]
fn histories_with_deaths() {
    const POINTS: [&str; 10] = [
        "controller.zone.recorded",
        "controller.zone.taken",
        "controller.zone.changed",
        "controller.zone.reset",
        "controller.record.fields",
        "controller.record.written",
        "controller.record.posted",
        "controller.record.removed",
        "controller.submit.submitted",
        "controller.post.posted",
    ];
    // Which zone is closed for another one is each process's own choice.
    let geometry = Geometry {
        max_open: None,
        max_active: None,
        ..GEOMETRY
    };
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
    for step in 0..4000u64 {
        match random(3) {
            0 => crash::arm(POINTS[random(10) as usize], random(2) + 1),
            1 => z.h.die(),
            _ => {}
        }
        let (zone, blocks) = (random(8), 1 + random(20));
        let (start, len) = (zone * 64, (blocks * BLOCK) as usize);
        let fresh = pattern(step, len);
        let mut put = |at: u64, bytes: &[u8]| {
            data[(at * BLOCK) as usize..][..bytes.len()].copy_from_slice(bytes);
        };
        match random(10) {
            0..4 => {
                let written = model.get(zone as u32).unwrap().written;
                let lba = start + written + u64::from(random(12) == 0);
                z.h.write(DATA, &fresh);
                let wanted = match lba + blocks > 8 * 64 {
                    true => Err(Refusal::OutOfRange),
                    false => model.write(lba, blocks),
                };
                let status = z.write(lba, blocks as u32);
                assert_eq!(status, status_of(wanted), "step {step}");
                if wanted.is_ok() {
                    put(lba, &fresh);
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
            if zone.state != State::Full {
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
    for point in POINTS {
        assert!(
            z.h.crashes.get(point).is_some_and(|n| *n > 2),
            "{point}: {:?}",
            z.h.crashes
        );
    }
}

fn status_of(result: Result<(), Refusal>) -> Status {
    result.map_or_else(|refusal| plain(refusal.status()), |()| Status::SUCCESS)
}
