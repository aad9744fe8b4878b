//! A namespace with placement handles on a volume with faults, and its host.

use crate::common::*;
use controller::{ControllerConfig, NamespaceConfig, PlacementState, PlacementTable};
use dma::SharedPages;
use nvme::cmd::placement::{HandleStatus, HandleStatusHeader};
use nvme::log::{FdpEvent, FdpEventsHeader, FdpStatistics, Lid};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use placement::{Geometry, Identity, table};
use std::sync::Arc;
use volume::Faults;
use zerocopy::FromBytes;

/// Three handles, units of 64 blocks.
pub const GEOMETRY: Geometry = Geometry {
    handles: 3,
    unit: 64,
    block: 512,
};
pub const BYTES: u64 = 1 << 20;
/// Where statuses go.
pub const STATUS: u64 = DATA + (8 << 20);
/// Directive Type of Write: Data Placement.
pub const PLACED: u32 = 2;

/// NSID 1 has handles, NSID 2 has none.
pub struct Placed {
    pub h: Host,
    pub data: Arc<Faults>,
}

pub fn state(pages: &SharedPages) -> Arc<PlacementState> {
    let table = PlacementTable::new(pages, GEOMETRY.handles, None).unwrap();
    Arc::new(PlacementState::new(GEOMETRY, table).unwrap())
}

pub fn pages() -> SharedPages {
    let pages = SharedPages::new(8192).unwrap();
    let namespace = [1; 16];
    let bytes = table::encode(&GEOMETRY, Identity { namespace });
    pages.memory().write(0, &bytes).unwrap();
    pages
}

pub fn with_handles(config: NamespaceConfig, state: Arc<PlacementState>) -> NamespaceConfig {
    NamespaceConfig {
        placement: Some(state),
        ..config
    }
}

impl Placed {
    pub fn new() -> Self {
        Self::with(pages())
    }

    pub fn with(pages: SharedPages) -> Self {
        let (volume, data) = faulty(BYTES);
        let namespaces = vec![
            with_handles(ns(1, volume, 512), state(&pages)),
            ns(2, mem(BYTES), 512),
        ];
        let mut h = Host::with(ControllerConfig::default(), namespaces);
        h.reload = Some(Box::new(move |config| {
            if config.nsid == 1 {
                config.placement = Some(state(&pages));
            }
        }));
        h.enable();
        h.create_pair(1, 64);
        Self { h, data }
    }

    /// A command on blocks, with a directive.
    pub fn command(
        &self,
        opcode: NvmOpcode,
        slba: u64,
        blocks: u32,
        dtype: u32,
        id: u16,
    ) -> Command {
        let mut command = self.h.rw(opcode, 1, slba, blocks, DATA);
        self.h
            .prps(&mut command, DATA, u64::from(blocks) * 512, PAGE);
        command.cdw12 = (command.cdw12.get() | dtype << 20).into();
        command.cdw13 = (u32::from(id) << 16).into();
        command
    }

    /// Writes by a Placement Identifier, or without one.
    pub fn write(&mut self, id: Option<u16>, blocks: u32) -> Status {
        let dtype = id.map_or(0, |_| PLACED);
        let command = self.command(NvmOpcode::WRITE, 0, blocks, dtype, id.unwrap_or(0));
        plain(self.h.io(command))
    }

    pub fn update(&mut self, ids: &[u16]) -> Status {
        let command = self.update_command(ids);
        plain(self.h.io(command))
    }

    pub fn update_command(&self, ids: &[u16]) -> Command {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.h.write(DATA, &bytes);
        let mut command = Command::new(NvmOpcode::IO_MANAGEMENT_SEND.0, 0, 1);
        command.cdw10 = (1 | (ids.len() as u32 - 1) << 16).into();
        self.h.prps(&mut command, DATA, bytes.len() as u64, PAGE);
        command
    }

    /// I/O Management Receive into a buffer of so many bytes.
    pub fn receive(&mut self, nsid: u32, mo: u32, bytes: usize) -> Result<Vec<u8>, Status> {
        let mut command = Command::new(NvmOpcode::IO_MANAGEMENT_RECEIVE.0, 0, nsid);
        command.cdw10 = mo.into();
        command.cdw11 = (bytes as u32 / 4 - 1).into();
        self.h.prps(&mut command, STATUS, bytes as u64, PAGE);
        self.h.write(STATUS, &vec![0xee; bytes + 4]);
        plain(self.h.io(command)).into_result()?;
        assert_eq!(self.h.read(STATUS + bytes as u64, 4), [0xee; 4]);
        Ok(self.h.read(STATUS, bytes))
    }

    /// RUAMW of each handle.
    pub fn left(&mut self) -> Vec<u64> {
        let data = self.receive(1, 1, 4096).unwrap();
        let (header, rest) = HandleStatusHeader::ref_from_prefix(&data).unwrap();
        let count = usize::from(header.nruhsd.get());
        let statuses = rest.chunks_exact(32).take(count);
        let statuses = statuses.map(|bytes| HandleStatus::read_from_bytes(bytes).unwrap());
        let left = (0..).zip(statuses).map(|(number, status)| {
            assert_eq!((status.pid.get(), status.ruhid.get()), (number, number));
            status.ruamw.get()
        });
        left.collect()
    }

    pub fn log(&mut self, lid: Lid, group: u16, lsp: u32, len: usize) -> Result<Vec<u8>, Status> {
        let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0);
        let numd = (len / 4 - 1) as u32;
        command.cdw10 = (u32::from(lid.0) | lsp << 8 | numd << 16).into();
        command.cdw11 = (u32::from(group) << 16).into();
        self.h.prps(&mut command, DATA, len as u64, PAGE);
        plain(self.h.admin(command).status()).into_result()?;
        Ok(self.h.read(DATA, len))
    }

    /// HBMW and MBMW.
    pub fn bytes(&mut self) -> (u128, u128) {
        let page = self.log(Lid::FDP_STATISTICS, 1, 0, 64).unwrap();
        let statistics = FdpStatistics::read_from_bytes(&page).unwrap();
        assert_eq!(statistics.mbe.get(), 0);
        (statistics.hbmw.get(), statistics.mbmw.get())
    }

    /// Host events.
    pub fn events(&mut self) -> Vec<FdpEvent> {
        let page = self.log(Lid::FDP_EVENTS, 1, 1, 4096).unwrap();
        let (header, rest) = FdpEventsHeader::ref_from_prefix(&page).unwrap();
        let events = rest.chunks_exact(64).take(header.numfdpe.get() as usize);
        let events = events.map(|event| FdpEvent::read_from_bytes(event).unwrap());
        events.collect()
    }

    /// Set Features, FDP Events.
    pub fn set_events(&mut self, nsid: u32, handle: u16, types: &[u8], on: bool) -> Status {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, nsid);
        command.cdw10 = 0x1e.into();
        command.cdw11 = (u32::from(handle) | (types.len() as u32) << 16).into();
        command.cdw12 = u32::from(on).into();
        self.h.write(PAGE, types);
        command.set_prps(PAGE, 0);
        plain(self.h.admin(command).status())
    }

    /// Get Features, FDP Events: types and whether they are enabled.
    pub fn get_events(
        &mut self,
        nsid: u32,
        handle: u16,
        sel: u32,
        room: u32,
    ) -> Result<(u32, Vec<(u8, u8)>), Status> {
        let mut command = Command::new(AdminOpcode::GET_FEATURES.0, 0, nsid);
        command.cdw10 = (0x1e | sel << 8).into();
        command.cdw11 = (u32::from(handle) | room << 16).into();
        command.set_prps(PAGE, 0);
        self.h.write(PAGE, &[0xee; 64]);
        let done = self.h.admin(command);
        plain(done.status()).into_result()?;
        let data = self.h.read(PAGE, 64);
        let pairs = data.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        Ok((
            done.dw0.get(),
            pairs.take_while(|pair| *pair != (0xee, 0xee)).collect(),
        ))
    }

    /// Features of the controller with dwords 11 and 12.
    pub fn feature(
        &mut self,
        opcode: AdminOpcode,
        cdw10: u32,
        cdw11: u32,
        cdw12: u32,
    ) -> Completion {
        let mut command = Command::new(opcode.0, 0, 0);
        command.cdw10 = cdw10.into();
        command.cdw11 = cdw11.into();
        command.cdw12 = cdw12.into();
        command.set_prps(PAGE, 0);
        self.h.admin(command)
    }

    /// Directive Receive or Send: dwords 11 and 12.
    pub fn directive(&mut self, opcode: AdminOpcode, nsid: u32, cdw11: u32, cdw12: u32) -> Status {
        let mut command = Command::new(opcode.0, 0, nsid);
        command.cdw10 = 1023.into();
        command.cdw11 = cdw11.into();
        command.cdw12 = cdw12.into();
        command.set_prps(PAGE, 0);
        plain(self.h.admin(command).status())
    }

    /// Directives supported, enabled and persistent, as bits.
    pub fn directives(&mut self, nsid: u32) -> (u8, u8, u8) {
        self.h.write(PAGE, &[0xee; 4096]);
        let status = self.directive(AdminOpcode::DIRECTIVE_RECEIVE, nsid, 1, 0);
        assert_eq!(status, Status::SUCCESS);
        let page = self.h.read(PAGE, 4096);
        let rest = (1..4096).filter(|at| ![32, 64].contains(at));
        assert!(rest.into_iter().all(|at| page[at] == 0));
        (page[0], page[32], page[64])
    }

    /// Enables the Data Placement directive, or disables it.
    pub fn enable(&mut self, nsid: u32, on: bool) -> Status {
        let cdw12 = PLACED << 8 | u32::from(on);
        self.directive(AdminOpcode::DIRECTIVE_SEND, nsid, 1, cdw12)
    }
}
