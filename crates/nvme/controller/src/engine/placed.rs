//! Flexible Data Placement ("NVMe Base 2.1", 8.1.10): the placement handle of a write, and I/O
//! Management Receive and Send (ibid., 7.3 and 7.4).
//!
//! *Accounting.* A write is counted after its checks, just before it is passed to the volume: the
//! available room in the reclaim unit of its handle shrinks by its blocks, even if the write fails.
//! The volume does not learn the handle, which only counts.
//!
//! *Restart.* A command is recorded, then its blocks are counted, and then the volume gets the
//! request. The next process restarts recorded commands without counting them. The last write of
//! each worker may therefore stay uncounted, if the process ended between the first two steps.

use super::Execution;
use super::slots::Kind;
use crate::placed::PlacementState;
use dma::{Access, SegmentList};
use nvme::cmd::io::{DirectiveType, RwCdw13};
use nvme::cmd::placement::{
    HandleStatus, HandleStatusHeader, IoManagementReceiveCdw10, IoManagementSendCdw10,
    ReceiveOperation, SendOperation,
};
use nvme::log::FdpEventType;
use nvme::{Command, Status};
use placement::Writer;
use std::sync::Arc;
use zerocopy::IntoBytes;

const INVALID: Status = Status::INVALID_FIELD.with_dnr(true);

/// Returns the directive of a write command: Directive Type and Directive Specific.
fn directive(command: &Command, dtype: DirectiveType) -> (DirectiveType, u16) {
    (dtype, RwCdw13::from_bits(command.cdw13.get()).dspec())
}

impl Execution<'_> {
    /// Counts `blocks` against the reclaim unit of the handle that a write command names, if its
    /// namespace has handles. `again`: the previous process has counted the command. Without Data
    /// Placement directives ("NVMe Base 2.1", 8.1.8) the command's directive is ignored; with them,
    /// any other directive is invalid.
    #[inline]
    pub(super) fn place(
        &self,
        index: usize,
        command: &Command,
        dtype: DirectiveType,
        blocks: u64,
        writer: Writer,
        again: bool,
    ) -> Result<(), Status> {
        let ns = self.namespaces.get(index);
        match ns.and_then(|ns| ns.config.placement.as_deref()) {
            None => Ok(()),
            Some(state) => {
                let directive = directive(command, dtype);
                place_in(state, command.nsid.get(), directive, blocks, writer, again)
            }
        }
    }

    /// Returns the data placement state of a command's namespace, with the namespace's index.
    fn placement_of(&self, command: &Command) -> Result<(usize, Arc<PlacementState>), Status> {
        let index = self.namespaces.index_of(command.nsid.get())?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        let placement = ns.config.placement.clone();
        let placement = placement.ok_or(Status::FDP_DISABLED.with_dnr(true))?;
        Ok((index, placement))
    }

    /// Executes I/O Management Receive: reports the remaining blocks of each handle's reclaim unit.
    pub(super) fn io_management_receive(
        &mut self,
        sqid: u16,
        command: &Command,
    ) -> Result<(), Status> {
        let cdw10 = IoManagementReceiveCdw10::from_bits(command.cdw10.get());
        let bytes = (u64::from(command.cdw11.get()) + 1) * 4;
        let (ns, state) = self.placement_of(command)?;
        if cdw10.mo() != ReceiveOperation::HANDLE_STATUS || bytes > self.settings.max_transfer {
            return Err(INVALID);
        }
        let index = self.slot_for(sqid, command, ns)?;
        let mut list = SegmentList::new();
        self.walk(command, bytes, Access::Write, &mut list)?;
        let mut data = statuses(&state);
        // The rest of the buffer after the last descriptor is filled with zeroes.
        data.resize(usize::try_from(bytes).map_err(|_| INVALID)?, 0);
        list.copy_from(0, &data);
        drop(list);
        if let Some(slot) = self.slots.get(index) {
            slot.bytes = bytes;
        }
        self.end(index);
        Ok(())
    }

    /// Executes I/O Management Send: handles get new reclaim units. If any identifier is invalid,
    /// none of the handles changes.
    pub(super) fn io_management_send(
        &mut self,
        sqid: u16,
        command: &Command,
    ) -> Result<(), Status> {
        let cdw10 = IoManagementSendCdw10::from_bits(command.cdw10.get());
        let (ns, state) = self.placement_of(command)?;
        if self.namespaces.get(ns).is_some_and(|ns| ns.read_only) {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let placement = state.get();
        let geometry = *placement.geometry();
        let count = usize::from(cdw10.mos()) + 1;
        if cdw10.mo() != SendOperation::HANDLE_UPDATE || count > usize::from(geometry.handles) {
            return Err(INVALID);
        }
        let mut data = vec![0; count * 2];
        let mut list = SegmentList::new();
        self.walk(command, data.len() as u64, Access::Read, &mut list)?;
        list.copy_to(0, &mut data);
        drop(list);
        let (identifiers, _) = data.as_chunks::<2>();
        let identifiers = identifiers.iter().map(|bytes| u16::from_le_bytes(*bytes));
        let handles = identifiers.map(|id| Some((id, geometry.handle_of(id)?)));
        let handles: Vec<_> = handles.collect::<Option<_>>().ok_or(INVALID)?;
        let index = self.slot_for(sqid, command, ns)?;
        if let Some(slot) = self.slots.get(index) {
            slot.kind = Kind::Other;
        }
        for (identifier, handle) in handles {
            if placement.renew(handle).is_some() {
                let event = FdpEventType::UNIT_NOT_FULLY_WRITTEN;
                state.happened(event, command.nsid.get(), handle, identifier);
            }
        }
        crash::point!("controller.placement.renewed");
        self.end(index);
        Ok(())
    }
}

fn place_in(
    state: &PlacementState,
    nsid: u32,
    (dtype, dspec): (DirectiveType, u16),
    blocks: u64,
    writer: Writer,
    again: bool,
) -> Result<(), Status> {
    let placement = state.get();
    let identifier = match dtype {
        DirectiveType::IDENTIFY => None,
        _ if !placement.is_enabled() => None,
        DirectiveType::DATA_PLACEMENT => Some(dspec),
        _ => return Err(INVALID),
    };
    if again {
        return Ok(());
    }
    crash::point!("controller.placement.recorded");
    let chosen = placement.choose(identifier);
    if let Some(invalid) = chosen.invalid {
        let event = FdpEventType::INVALID_PLACEMENT_IDENTIFIER;
        state.happened(event, nsid, chosen.handle, invalid);
    }
    placement.write(chosen.handle, blocks, writer);
    crash::point!("controller.placement.counted");
    Ok(())
}

/// Returns the Reclaim Unit Handle Status of all handles.
fn statuses(state: &PlacementState) -> Vec<u8> {
    let placement = state.get();
    let handles = placement.geometry().handles;
    let header = HandleStatusHeader {
        nruhsd: handles.into(),
        ..Default::default()
    };
    let mut data = header.as_bytes().to_vec();
    for handle in 0..handles {
        let status = HandleStatus {
            pid: handle.into(),
            ruhid: handle.into(),
            ruamw: placement.left(handle).into(),
            ..Default::default()
        };
        data.extend_from_slice(status.as_bytes());
    }
    data
}
