//! I/O commands of the NVM command set ("NVM Command Set 1.1", 3.3): their checks, translation of
//! data addresses, and submission to the volume.

use super::slots::{Kind, RemainingWork};
use super::{Engine, commands};
use crate::ana;
use dma::{Access, DmaError, SegmentList};
use nvme::cmd::io::{RwCdw12, WriteZeroesCdw12};
use nvme::cmd::{Fuse, NSID_BROADCAST, Psdt};
use nvme::{Command, NvmOpcode, Status};
use placement::Writer;
use volume::{Op, Request};

/// Byte range of an I/O command, checked to lie within its namespace.
pub(super) struct Extent {
    /// Index of the namespace in the engine's table.
    pub ns: usize,
    pub slba: u64,
    /// Byte offset in the namespace.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

/// Returns the status of a command after a failed access to its data in guest memory.
pub(crate) fn dma_status(error: DmaError) -> Status {
    match error {
        // Mixing guest memory and the controller memory buffer is not supported: CMBLOC.CDMMMS is 0
        // ("NVMe Base 2.1", 8.2.1).
        DmaError::Mixed => Status::INVALID_USE_OF_CMB.with_dnr(true),
        _ => Status::DATA_TRANSFER_ERROR,
    }
}

fn prp_status(error: dma::prp::PrpError) -> Status {
    match error {
        dma::prp::PrpError::OffsetInvalid { .. } => Status::PRP_OFFSET_INVALID.with_dnr(true),
        dma::prp::PrpError::Dma(error) => dma_status(error),
    }
}

/// Returns the status of a command with an invalid SGL.
pub(super) fn sgl_status(error: dma::sgl::SglError) -> Status {
    use dma::sgl::SglError as E;
    match error {
        E::InvalidSegmentDescriptor => Status::INVALID_SGL_SEGMENT_DESCRIPTOR.with_dnr(true),
        E::InvalidDescriptorCount => Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr(true),
        E::DataLengthInvalid => Status::DATA_SGL_LENGTH_INVALID.with_dnr(true),
        E::DescriptorTypeInvalid(_) => Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr(true),
        E::Dma(error) => dma_status(error),
    }
}

impl Engine {
    /// Starts an I/O command that was fetched from queue `sqid`.
    pub(super) fn execute(&mut self, sqid: u16, command: &Command) {
        let sort = self.sort_of(command.nsid.get());
        let result = match commands::handler(command.nvm_opcode(), self.offer(), sort) {
            // Fused operations are not supported (Identify Controller, FUSES).
            _ if command.flags.fuse() != Fuse::NORMAL => Err(Status::INVALID_FIELD.with_dnr(true)),
            Some(start) => match self.is_gated().then(|| self.barred(command)).flatten() {
                Some(barred) => Err(barred),
                None => start(self, sqid, command),
            },
            None => Err(Status::INVALID_OPCODE.with_dnr(true)),
        };
        let slot = self.starting.take();
        if let Err(status) = result {
            let (cid, nsid) = (command.cid.get(), command.nsid.get());
            let lba = self.first_unreadable(command, status);
            if ana::is_refusal(status) {
                self.passed_by(status, nsid);
            } else {
                self.failed(sqid, cid, status, (nsid, lba));
            }
            self.finish_started(slot, sqid, cid, status);
        }
    }

    /// Returns the controller properties that decide the supported commands.
    pub fn offer(&self) -> commands::Offer {
        commands::Offer {
            placed: self.nsids.any_placed,
            ..self.offer
        }
    }

    pub(super) fn extent(
        &self,
        command: &Command,
        blocks: u64,
        write: bool,
    ) -> Result<Extent, Status> {
        let index = self.namespace_index(command.nsid.get())?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        if write && ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let slba = command.slba();
        if !ns.covers(slba, blocks) {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
        }
        if let Some(zones) = &ns.config.zones {
            // Zone writes are handled by `zoned_write`.
            if write {
                return Err(Status::INVALID_OPCODE.with_dnr(true));
            }
            if zones.any_offline() {
                let checked = zones.lock().check_read(slba, blocks);
                checked.map_err(zones::ZoneRefusal::status)?;
            }
        }
        if !write && ns.watched && ns.marks.first(slba, blocks).is_some() {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        Ok(Extent {
            ns: index,
            slba,
            offset: slba << ns.shift,
            len: blocks << ns.shift,
        })
    }

    /// Allocates a slot for a command, fills it in, and records the command. [`Engine::execute`]
    /// frees the slot if the command cannot be started.
    pub(super) fn slot_for(
        &mut self,
        sqid: u16,
        command: &Command,
        ns: usize,
    ) -> Result<u16, Status> {
        let index = self.slots.alloc().ok_or(Status::INTERNAL_ERROR)?;
        if let Some(slot) = self.slots.get(index) {
            slot.sqid = sqid;
            slot.cid = command.cid.get();
            slot.nsid = command.nsid.get();
            slot.ns = ns;
            slot.fetched_at = self.sampling.fetched_at;
        }
        if self.busy_since.is_none() {
            self.busy_since = Some(self.now);
        }
        let number = self.last_fetched(sqid);
        self.slots.record(index, sqid, number, command);
        self.starting = Some(index);
        Ok(index)
    }

    /// Resolves the command's data pointer into segments of guest memory, `len` bytes in total.
    pub(super) fn walk(
        &self,
        command: &Command,
        len: u64,
        access: Access,
        list: &mut SegmentList,
    ) -> Result<(), Status> {
        list.begin(&self.dma);
        match command.flags.psdt() {
            Psdt::PRP => dma::prp::walk(
                &self.dma,
                command.prp1(),
                command.prp2(),
                len,
                self.page_size,
                access,
                list,
            )
            .map_err(prp_status),
            Psdt::SGL_MPTR_BUFFER | Psdt::SGL_MPTR_SGL => {
                dma::sgl::walk(&self.dma, command.dptr.0, len, access, list).map_err(sgl_status)
            }
            _ => Err(Status::INVALID_FIELD.with_dnr(true)),
        }
    }

    /// Resolves the command's data pointer into the slot's own segment list.
    pub(super) fn walk_into(
        &mut self,
        index: u16,
        command: &Command,
        len: u64,
        access: Access,
    ) -> Result<(), Status> {
        let mut list = match self.slots.get(index) {
            Some(slot) => std::mem::take(&mut slot.list),
            None => return Err(Status::INTERNAL_ERROR),
        };
        let walked = self.walk(command, len, access, &mut list);
        if let Some(slot) = self.slots.get(index) {
            slot.list = list;
        }
        walked
    }

    pub(super) fn read_write(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let write = command.nvm_opcode() == NvmOpcode::WRITE;
        let extent = self.extent(command, cdw12.nlb().into(), write)?;
        if extent.len > self.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, extent.ns)?;
        let access = if write { Access::Read } else { Access::Write };
        self.walk_into(index, command, extent.len, access)?;
        if write {
            let (ns, dtype, blocks) = (extent.ns, cdw12.dtype(), cdw12.nlb().into());
            self.place(ns, command, dtype, blocks, Writer::Host, again)?;
        }
        let op = if write {
            self.watch_write(index);
            Op::Write {
                fua: cdw12.fua() || !self.features.write_cache,
            }
        } else {
            Op::Read
        };
        self.start(index, extent, op, Kind::of_transfer(op));
        Ok(())
    }

    /// Submits the volume request of a command that needs only one, with the slot's list as its
    /// data.
    pub(super) fn start(&mut self, index: u16, extent: Extent, op: Op, kind: Kind) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a command starts without its slot");
        };
        slot.kind = kind;
        slot.bytes = if op.has_data() { extent.len } else { 0 };
        slot.slba = extent.slba;
        let data = std::mem::take(&mut slot.list);
        self.submit(index, extent.ns, op, extent.offset, extent.len, data);
    }

    pub(super) fn submit(
        &mut self,
        index: u16,
        ns: usize,
        op: Op,
        offset: u64,
        len: u64,
        data: SegmentList,
    ) {
        let tag = self.slots.tag(index);
        let Some(ns) = self.namespaces.get_mut(ns) else {
            return self.broken("a slot's namespace is not there");
        };
        let over = ns.queue.submit(Request {
            tag,
            op,
            offset,
            len,
            data,
        });
        crash::point!("controller.submit.submitted");
        if let Some(completion) = over {
            self.complete(completion);
        }
    }

    pub(super) fn flush(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        if command.nsid.get() == NSID_BROADCAST {
            let index = self.slot_for(sqid, command, 0)?;
            if let Some(slot) = self.slots.get(index) {
                slot.work = RemainingWork::FlushAll(0);
                slot.kind = Kind::Flush;
            }
            self.flush_next(index);
            return Ok(());
        }
        let ns = self.namespace_index(command.nsid.get())?;
        let index = self.slot_for(sqid, command, ns)?;
        let extent = Extent {
            ns,
            slba: 0,
            offset: 0,
            len: 0,
        };
        self.start(index, extent, Op::Flush, Kind::Flush);
        Ok(())
    }

    /// Submits the next flush of a command that flushes all namespaces. They are flushed one by
    /// one, because a tag identifies only one request at any time.
    pub(super) fn flush_next(&mut self, index: u16) {
        loop {
            let Some(slot) = self.slots.get(index) else {
                return self.broken("a flush goes on without its slot");
            };
            let RemainingWork::FlushAll(next) = &mut slot.work else {
                return self.broken("a flush goes on in another command's slot");
            };
            let ns = *next;
            *next += 1;
            let tag = self.slots.tag(index);
            let Some(namespace) = self.namespaces.get_mut(ns) else {
                return self.end(index);
            };
            if let Some(slot) = self.slots.get(index) {
                slot.ns = ns;
            }
            let request = Request {
                tag,
                op: Op::Flush,
                offset: 0,
                len: 0,
                data: SegmentList::new(),
            };
            match namespace.queue.submit(request) {
                None => return,
                Some(mut completion) => {
                    if self.waits_for_table(index, &mut completion) {
                        return;
                    }
                    self.flush_done(index, completion.result);
                }
            }
        }
    }

    pub(super) fn write_zeroes(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = WriteZeroesCdw12::from_bits(command.cdw12.get());
        let blocks = cdw12.nlb().into();
        let extent = self.extent(command, blocks, true)?;
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, extent.ns)?;
        self.place(
            extent.ns,
            command,
            cdw12.dtype(),
            blocks,
            Writer::Host,
            again,
        )?;
        let op = Op::WriteZeroes {
            deallocate: cdw12.deac(),
            fua: cdw12.fua() || !self.features.write_cache,
        };
        if let Some(slot) = self.slots.get(index) {
            slot.work = RemainingWork::Zeroes(extent.len);
        }
        self.start(index, extent, op, Kind::Other);
        Ok(())
    }
}
