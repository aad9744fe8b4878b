//! A zoned namespace on a volume with faults, and its host.

use crate::common::*;
use controller::{ControllerConfig, NamespaceConfig, ZoneTable, ZonedState};
use dma::SharedPages;
use nvme::cmd::zone::{ReportHeader, SendCdw13, ZoneDescriptor, Zsa};
use nvme::regs::{self, CcCss};
use nvme::{Command, Completion, NvmOpcode, Status};
use std::sync::Arc;
use volume::{Faults, Volume};
use zerocopy::FromBytes;
use zones::table::{self, Identity};
use zones::{Geometry, ZoneRefusal, Zones, Zrwa};

/// Eight zones of 64 blocks, 48 of which can be written.
pub const GEOMETRY: Geometry = Geometry {
    zones: 8,
    size: 64,
    capacity: 48,
    max_open: Some(2),
    max_active: Some(3),
    zrwa: None,
};

/// The same, of which one may have a Zone Random Write Area of eight blocks.
pub const RANDOM: Geometry = Geometry {
    zrwa: Some(Zrwa {
        size: 8,
        granularity: 4,
        resources: Some(1),
    }),
    ..GEOMETRY
};

pub const BLOCK: u64 = 512;
pub const BYTES: u64 = 8 * 64 * BLOCK;
/// Where reports go.
pub const REPORT: u64 = DATA + (8 << 20);
pub const IDENTITY: Identity = Identity {
    namespace: [1; 16],
    block: 512,
};

/// A zoned namespace on a volume with faults, and its table, in a file with faults, too.
pub struct Disk {
    pub namespace: NamespaceConfig,
    pub data: Arc<Faults>,
    pub file: Arc<Faults>,
    pub pages: SharedPages,
    /// Of the table.
    pub volume: Arc<dyn Volume>,
}

impl Disk {
    pub fn new(geometry: Geometry, zones: Zones) -> Self {
        let (volume, data) = faulty(BYTES);
        let (file, faults) = faulty(4096);
        let pages = SharedPages::new(4096).unwrap();
        let bytes = table::encode(&zones, IDENTITY);
        pages.memory().write(0, &bytes).unwrap();
        let file: Arc<dyn Volume> = cached(file);
        let table = ZoneTable::new(pages.clone(), geometry.zones, file.clone());
        Disk {
            namespace: with_zones(ns(1, cached(volume), 512), zones, table),
            data,
            file: faults,
            pages,
            volume: file,
        }
    }
}

/// Such a namespace, and its host.
pub struct Zoned {
    pub h: Host,
    pub data: Arc<Faults>,
    pub file: Arc<Faults>,
    pub pages: SharedPages,
    geometry: Geometry,
}

/// What is in the table.
pub fn kept(pages: &SharedPages, geometry: Geometry) -> Zones {
    let mut bytes = vec![0; pages.len()];
    pages.memory().read(0, &mut bytes).unwrap();
    table::decode(&bytes, geometry, IDENTITY).unwrap()
}

pub fn with_zones(
    config: NamespaceConfig,
    zones: Zones,
    table: Option<ZoneTable>,
) -> NamespaceConfig {
    NamespaceConfig {
        zones: Some(Arc::new(ZonedState::new(zones, table))),
        ..config
    }
}

/// As [`Host::enable`], with all command sets (CC.CSS).
pub fn enable(h: &mut Host) {
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
    pub fn new(geometry: Geometry) -> Self {
        Self::with(geometry, Zones::new(geometry).unwrap())
    }

    pub fn with(geometry: Geometry, zones: Zones) -> Self {
        Self::of(ControllerConfig::default(), geometry, zones)
    }

    pub fn of(config: ControllerConfig, geometry: Geometry, zones: Zones) -> Self {
        let disk = Disk::new(geometry, zones);
        let mut h = Host::with(config, vec![disk.namespace]);
        let (again, volume) = (disk.pages.clone(), disk.volume);
        h.reload = Some(Box::new(move |config| {
            let zones = kept(&again, geometry);
            let table = ZoneTable::new(again.clone(), geometry.zones, volume.clone());
            config.zones = Some(Arc::new(ZonedState::new(zones, table)));
        }));
        enable(&mut h);
        Self {
            h,
            data: disk.data,
            file: disk.file,
            pages: disk.pages,
            geometry,
        }
    }

    pub fn kept(&self) -> Zones {
        kept(&self.pages, self.geometry)
    }

    pub fn command(&self, opcode: NvmOpcode, slba: u64, blocks: u32) -> Command {
        let mut command = self.h.rw(opcode, 1, slba, blocks, DATA);
        let len = u64::from(blocks) * BLOCK;
        self.h.prps(&mut command, DATA, len, PAGE);
        command
    }

    pub fn write(&mut self, slba: u64, blocks: u32) -> Status {
        let command = self.command(NvmOpcode::WRITE, slba, blocks);
        plain(self.h.io(command))
    }

    pub fn append(&mut self, start: u64, blocks: u32) -> Result<u64, Status> {
        let command = self.command(NvmOpcode::ZONE_APPEND, start, blocks);
        let done = self.h.command(1, command);
        placed(&done)
    }

    pub fn send(&mut self, zsa: Zsa, slba: u64) -> Status {
        let command = send(zsa, slba, false);
        plain(self.h.io(command))
    }

    /// Open Zone with ZRWAA.
    pub fn open_with_zrwa(&mut self, slba: u64) -> Status {
        plain(self.h.io(open_with_zrwa(slba)))
    }

    /// Which zones have a Zone Random Write Area.
    pub fn areas(&mut self) -> Vec<usize> {
        let (_, zones) = self.report(0, 0, false, 4096).unwrap();
        let areas = zones.iter().enumerate();
        let areas = areas.filter(|(_, zone)| zone.za & ZoneDescriptor::ZRWAV != 0);
        areas.map(|(number, _)| number).collect()
    }

    pub fn send_all(&mut self, zsa: Zsa) -> Status {
        plain(self.h.io(send(zsa, 0, true)))
    }

    /// The report of zones in a buffer of so many bytes.
    pub fn report(
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
    pub fn states(&mut self) -> Vec<(u8, u64)> {
        let (count, zones) = self.report(0, 0, false, 4096).unwrap();
        assert_eq!((count, zones.len()), (8, 8));
        let kept = self.kept();
        for (number, zone) in (0..).zip(&zones) {
            assert_eq!(zone.zslba.get(), u64::from(number) * 64);
            assert_eq!(zone.zcap.get(), 48);
            // The table says the same at any time.
            let kept = kept.get(number).unwrap();
            assert_eq!(kept.state.number(), zone.state());
            assert_eq!(zone.za, if kept.zrwa { ZoneDescriptor::ZRWAV } else { 0 });
        }
        let states = zones.iter().map(|zone| (zone.state(), zone.wp.get()));
        states.collect()
    }

    pub fn blocks(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        let mut read = self.command(NvmOpcode::READ, slba, blocks);
        let (at, len) = (DATA + (1 << 20), u64::from(blocks) * BLOCK);
        self.h.prps(&mut read, at, len, PAGE);
        assert_eq!(self.h.io(read), Status::SUCCESS);
        self.h.read(at, len as usize)
    }
}

pub fn send(zsa: Zsa, slba: u64, all: bool) -> Command {
    let mut command = Command::new(NvmOpcode::ZONE_MANAGEMENT_SEND.0, 0, 1);
    command.set_slba(slba);
    let cdw13 = SendCdw13::new().with_zsa(zsa).with_select_all(all);
    command.cdw13 = cdw13.into_bits().into();
    command
}

pub fn open_with_zrwa(slba: u64) -> Command {
    let mut command = send(Zsa::OPEN, slba, false);
    let cdw13 = SendCdw13::from_bits(command.cdw13.get()).with_zsaso(true);
    command.cdw13 = cdw13.into_bits().into();
    command
}

/// Where an append went to.
pub fn placed(done: &Completion) -> Result<u64, Status> {
    plain(done.status()).into_result()?;
    Ok(u64::from(done.dw1.get()) << 32 | u64::from(done.dw0.get()))
}

pub const EMPTY: u8 = 1;
pub const IMPLICIT: u8 = 2;
pub const EXPLICIT: u8 = 3;
pub const CLOSED: u8 = 4;
pub const FULL: u8 = 0xe;

/// What a command ends with.
pub fn status_of(result: Result<(), ZoneRefusal>) -> Status {
    result.map_or_else(|refusal| plain(refusal.status()), |()| Status::SUCCESS)
}
