//! I/O commands of the NVM command set ("NVM Command Set 1.1", 3.3): checked, walked, handed to the volume, completed.

use super::slots::{Kind, Work};
use super::{Engine, Event};
use dma::{Access, Buffer, SegmentList};
use nvme::cmd::io::{DsmCdw10, DsmCdw11, DsmRange, RwCdw12, WriteZeroesCdw12};
use nvme::cmd::{Fuse, NSID_BROADCAST, Psdt};
use nvme::{Command, NvmOpcode, Status};
use volume::{IoError, IoErrorKind, Op, Request};
use zerocopy::FromBytes;

/// A range of a namespace that was checked to lie within it.
struct Extent {
    /// Index of the namespace.
    ns: usize,
    slba: u64,
    /// Bytes.
    offset: u64,
    /// Bytes.
    len: u64,
}

/// The status of a command whose volume reported an error.
fn status_of(error: IoError, write: bool) -> Status {
    match error.kind {
        IoErrorKind::MediaRead | IoErrorKind::Truncated if !write => Status::UNRECOVERED_READ_ERROR,
        IoErrorKind::MediaRead | IoErrorKind::MediaWrite | IoErrorKind::Truncated => {
            Status::WRITE_FAULT
        }
        IoErrorKind::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(true),
        IoErrorKind::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true),
        IoErrorKind::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(true),
        IoErrorKind::Memory => Status::DATA_TRANSFER_ERROR,
        IoErrorKind::Aborted => Status::ABORT_REQUESTED,
        IoErrorKind::Gone => Status::INTERNAL_ERROR.with_dnr(true),
        IoErrorKind::Unsupported => Status::INVALID_OPCODE.with_dnr(true),
        IoErrorKind::Busy => Status::COMMAND_INTERRUPTED,
        IoErrorKind::Invalid => Status::INTERNAL_ERROR,
    }
}

fn prp_status(error: dma::prp::PrpError) -> Status {
    match error {
        dma::prp::PrpError::OffsetInvalid { .. } => Status::PRP_OFFSET_INVALID.with_dnr(true),
        _ => Status::DATA_TRANSFER_ERROR,
    }
}

fn sgl_status(error: dma::sgl::SglError) -> Status {
    use dma::sgl::SglError as E;
    match error {
        E::InvalidSegmentDescriptor => Status::INVALID_SGL_SEGMENT_DESCRIPTOR.with_dnr(true),
        E::InvalidDescriptorCount => Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr(true),
        E::DataLengthInvalid => Status::DATA_SGL_LENGTH_INVALID.with_dnr(true),
        E::DescriptorTypeInvalid(_) => Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr(true),
        _ => Status::DATA_TRANSFER_ERROR,
    }
}

impl Engine {
    /// Starts one I/O command that was fetched from `sqid`.
    pub(super) fn execute(&mut self, sqid: u16, command: &Command) {
        let result = match command.nvm_opcode() {
            // Fused operations are not offered (Identify Controller, FUSES).
            _ if command.flags.fuse() != Fuse::NORMAL => Err(Status::INVALID_FIELD.with_dnr(true)),
            NvmOpcode::READ | NvmOpcode::WRITE => self.read_write(sqid, command),
            NvmOpcode::FLUSH => self.flush(sqid, command),
            NvmOpcode::WRITE_ZEROES => self.write_zeroes(sqid, command),
            NvmOpcode::DATASET_MANAGEMENT => self.dataset_management(sqid, command),
            NvmOpcode::COMPARE => self.compare(sqid, command),
            NvmOpcode::VERIFY => self.verify(sqid, command),
            _ => Err(Status::INVALID_OPCODE.with_dnr(true)),
        };
        if let Err(status) = result {
            let (cid, nsid, lba) = (command.cid.get(), command.nsid.get(), command.slba());
            self.events.push_back(Event::Failed {
                sqid,
                cid,
                status,
                nsid,
                lba,
            });
            self.finish(sqid, cid, status, 0);
        }
    }

    fn namespace_index(&self, nsid: u32) -> Result<usize, Status> {
        let found = self.namespaces.iter().position(|ns| ns.config.nsid == nsid);
        found.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true))
    }

    fn extent(&self, command: &Command, blocks: u64, write: bool) -> Result<Extent, Status> {
        let index = self.namespace_index(command.nsid.get())?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        if write && ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let slba = command.slba();
        if slba.checked_add(blocks).is_none_or(|end| end > ns.blocks) {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
        }
        Ok(Extent {
            ns: index,
            slba,
            offset: slba << ns.shift,
            len: blocks << ns.shift,
        })
    }

    /// A slot for `command`, filled in.
    fn slot_for(&mut self, sqid: u16, command: &Command, ns: usize) -> Result<u16, Status> {
        let index = self.slots.alloc().ok_or(Status::INTERNAL_ERROR)?;
        if let Some(slot) = self.slots.get(index) {
            slot.sqid = sqid;
            slot.cid = command.cid.get();
            slot.nsid = command.nsid.get();
            slot.ns = ns;
        }
        if self.busy_since.is_none() {
            self.busy_since = Some(self.now);
        }
        Ok(index)
    }

    /// Finds the `len` bytes of guest memory that the command's data pointer describes.
    fn walk(
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

    /// Walks the command's data into the slot's own list; gives the slot back when that fails.
    fn walk_into(
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
        if walked.is_err() {
            self.slots.release(index);
        }
        walked
    }

    fn read_write(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let write = command.nvm_opcode() == NvmOpcode::WRITE;
        let extent = self.extent(command, cdw12.nlb().into(), write)?;
        if extent.len > self.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let index = self.slot_for(sqid, command, extent.ns)?;
        let access = if write { Access::Read } else { Access::Write };
        self.walk_into(index, command, extent.len, access)?;
        let op = if write {
            Op::Write {
                fua: cdw12.fua() || !self.write_cache,
            }
        } else {
            Op::Read
        };
        let kind = if write { Kind::Write } else { Kind::Read };
        self.start(index, extent, op, kind);
        Ok(())
    }

    /// Submits the one request of a slot's command, with the slot's list as its data.
    fn start(&mut self, index: u16, extent: Extent, op: Op, kind: Kind) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        slot.kind = kind;
        slot.bytes = if op.has_data() { extent.len } else { 0 };
        slot.slba = extent.slba;
        let data = std::mem::take(&mut slot.list);
        self.submit(index, extent.ns, op, extent.offset, extent.len, data);
    }

    fn submit(&mut self, index: u16, ns: usize, op: Op, offset: u64, len: u64, data: SegmentList) {
        let tag = self.slots.tag(index);
        let Some(ns) = self.namespaces.get_mut(ns) else {
            return;
        };
        if let Some(completion) = ns.queue.submit(Request {
            tag,
            op,
            offset,
            len,
            data,
        }) {
            self.complete(completion);
        }
    }

    fn flush(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        if command.nsid.get() != NSID_BROADCAST {
            let ns = self.namespace_index(command.nsid.get())?;
            let index = self.slot_for(sqid, command, ns)?;
            self.start(
                index,
                Extent {
                    ns,
                    slba: 0,
                    offset: 0,
                    len: 0,
                },
                Op::Flush,
                Kind::Other,
            );
            return Ok(());
        }
        let index = self.slot_for(sqid, command, 0)?;
        let count = self.namespaces.len();
        if let Some(slot) = self.slots.get(index) {
            // One more than there are, so that requests which complete at once do not end the command too early.
            slot.work = Work::Parts(count as u32 + 1);
        }
        for ns in 0..count {
            self.submit(index, ns, Op::Flush, 0, 0, SegmentList::new());
        }
        self.part_done(index);
        Ok(())
    }

    fn part_done(&mut self, index: u16) {
        if let Some(slot) = self.slots.get(index)
            && let Work::Parts(left) = &mut slot.work
        {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.end(index);
            }
        }
    }

    fn write_zeroes(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = WriteZeroesCdw12::from_bits(command.cdw12.get());
        let extent = self.extent(command, cdw12.nlb().into(), true)?;
        let index = self.slot_for(sqid, command, extent.ns)?;
        let op = Op::WriteZeroes {
            deallocate: cdw12.deac(),
            fua: cdw12.fua() || !self.write_cache,
        };
        self.start(index, extent, op, Kind::Write);
        Ok(())
    }

    fn dataset_management(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let count = usize::from(DsmCdw10::from_bits(command.cdw10.get()).nr());
        let attributes = DsmCdw11::from_bits(command.cdw11.get());
        let ns_index = self.namespace_index(command.nsid.get())?;
        let ns = self
            .namespaces
            .get(ns_index)
            .ok_or(Status::INTERNAL_ERROR)?;
        if attributes.ad() && ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let (shift, blocks) = (ns.shift, ns.blocks);
        let mut bytes = [0u8; nvme::cmd::io::DSM_MAX_RANGES * 16];
        let bytes = bytes.get_mut(..count * 16).ok_or(Status::INTERNAL_ERROR)?;
        let mut list = SegmentList::new();
        self.walk(command, bytes.len() as u64, Access::Read, &mut list)?;
        list.copy_to(0, bytes);
        drop(list);
        let mut ranges = Vec::with_capacity(count);
        for raw in bytes.chunks_exact(16) {
            let range = DsmRange::read_from_bytes(raw).map_err(|_| Status::INTERNAL_ERROR)?;
            let (slba, nlb) = (range.slba.get(), u64::from(range.nlb.get()));
            if slba.checked_add(nlb).is_none_or(|end| end > blocks) {
                return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
            }
            if attributes.ad() && nlb > 0 {
                ranges.push((slba << shift, nlb << shift));
            }
        }
        // The other attributes are hints.
        let index = self.slot_for(sqid, command, ns_index)?;
        ranges.reverse();
        if let Some(slot) = self.slots.get(index) {
            slot.work = Work::Ranges(ranges);
        }
        self.next_range(index);
        Ok(())
    }

    /// Ranges go to the volume one after the other, so that a command never has more than one request out.
    fn next_range(&mut self, index: u16) {
        loop {
            let Some(slot) = self.slots.get(index) else {
                return;
            };
            let ns = slot.ns;
            let Work::Ranges(ranges) = &mut slot.work else {
                return;
            };
            let Some((offset, len)) = ranges.pop() else {
                return self.end(index);
            };
            let tag = self.slots.tag(index);
            let Some(ns) = self.namespaces.get_mut(ns) else {
                return;
            };
            let data = SegmentList::new();
            match ns.queue.submit(Request {
                tag,
                op: Op::Deallocate,
                offset,
                len,
                data,
            }) {
                None => return,
                Some(completion) => self.range_done(index, completion.result),
            }
        }
    }

    fn range_done(&mut self, index: u16, result: Result<(), IoError>) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        match result {
            Ok(()) => {}
            // Deallocation is advice: what the volume cannot give back stays allocated.
            Err(error) if error.kind == IoErrorKind::Unsupported => {}
            Err(error) => {
                slot.status = status_of(error, true);
                if let Work::Ranges(ranges) = &mut slot.work {
                    ranges.clear();
                }
            }
        }
    }

    fn compare(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
        let extent = self.extent(command, blocks.into(), false)?;
        if extent.len > self.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let buffer = Buffer::new(extent.len as usize);
        let index = self.slot_for(sqid, command, extent.ns)?;
        self.walk_into(index, command, extent.len, Access::Read)?;
        if let Some(slot) = self.slots.get(index) {
            slot.work = Work::Compare;
            slot.kind = Kind::Read;
            slot.bytes = extent.len;
            slot.slba = extent.slba;
        }
        self.submit(
            index,
            extent.ns,
            Op::Read,
            extent.offset,
            extent.len,
            SegmentList::owned(buffer),
        );
        Ok(())
    }

    /// Verify reads and throws away. Its size is limited as that of a transfer (VSL), so that its memory is.
    fn verify(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
        let extent = self.extent(command, blocks.into(), false)?;
        if extent.len > self.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let buffer = Buffer::new(extent.len as usize);
        let index = self.slot_for(sqid, command, extent.ns)?;
        if let Some(slot) = self.slots.get(index) {
            slot.kind = Kind::Read;
            slot.slba = extent.slba;
        }
        self.submit(
            index,
            extent.ns,
            Op::Read,
            extent.offset,
            extent.len,
            SegmentList::owned(buffer),
        );
        Ok(())
    }

    /// A request came back from a volume. Stale tags are ignored.
    pub fn complete(&mut self, mut completion: volume::Completion) {
        let Some(index) = self.slots.of_tag(completion.tag) else {
            return;
        };
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        match &mut slot.work {
            Work::Single => {
                if let Err(error) = completion.result {
                    slot.status = status_of(error, slot.kind != Kind::Read);
                }
                // A list of host memory (Verify) goes; the slot's own comes back, with its capacity.
                if completion.data.buffer().is_none() {
                    slot.list = completion.data;
                }
                self.end(index);
            }
            Work::Ranges(_) => {
                self.range_done(index, completion.result);
                self.next_range(index);
            }
            Work::Compare => {
                match completion.result {
                    Err(error) => slot.status = status_of(error, false),
                    Ok(()) => {
                        let same = completion
                            .data
                            .buffer()
                            .is_some_and(|read| slot.list.equals(0, read));
                        if !same {
                            slot.status = Status::COMPARE_FAILURE;
                        }
                    }
                }
                self.end(index);
            }
            Work::Parts(_) => {
                if let Err(error) = completion.result
                    && slot.status.is_success()
                {
                    slot.status = status_of(error, true);
                }
                self.part_done(index);
            }
        }
    }

    /// Counts, posts and frees a command that is over.
    fn end(&mut self, index: u16) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        let (sqid, cid, status, nsid, lba) =
            (slot.sqid, slot.cid, slot.status, slot.nsid, slot.slba);
        let (kind, bytes, orphan, abort) = (slot.kind, slot.bytes, slot.orphan, slot.abort);
        self.slots.release(index);
        match kind {
            Kind::Read => {
                self.stats.host_reads.add(1);
                self.stats.bytes_read.add(bytes);
            }
            Kind::Write => {
                self.stats.host_writes.add(1);
                self.stats.bytes_written.add(bytes);
            }
            Kind::Other => {}
        }
        if self.slots.in_use() == 0
            && let Some(since) = self.busy_since.take()
        {
            let busy = self.now.saturating_duration_since(since);
            self.stats.busy_ns.add(busy.as_nanos() as u64);
        }
        if orphan {
            return;
        }
        if !status.is_success() {
            self.events.push_back(Event::Failed {
                sqid,
                cid,
                status,
                nsid,
                lba,
            });
        }
        self.finish(sqid, cid, status, 0);
        if abort {
            let aborted = status.is(Status::ABORT_REQUESTED);
            self.events
                .push_back(Event::AbortDone { sqid, cid, aborted });
        }
    }

    /// Starts a flush of every namespace on the controller's own account (shutdown, power state). It is over when
    /// [`Engine::drained`] says so.
    pub fn flush_all(&mut self) {
        for ns in 0..self.namespaces.len() {
            if !self
                .namespaces
                .get(ns)
                .is_some_and(|n| n.volatile_cache && !n.read_only)
            {
                continue;
            }
            let Some(index) = self.slots.alloc() else {
                continue;
            };
            if let Some(slot) = self.slots.get(index) {
                slot.orphan = true;
                slot.ns = ns;
            }
            self.submit(index, ns, Op::Flush, 0, 0, SegmentList::new());
        }
    }
}
