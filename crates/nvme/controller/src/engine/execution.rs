//! Execution of I/O commands outside of batches, from their slot to their end: the helpers that all
//! commands share, and the completions of their volume requests.

use super::invariant::broken;
use super::slots::{Kind, Outcome, RemainingWork, Slots, Starting, ZoneWriteKind};
use super::{BusMaster, Events, NamespaceTable, Settings};
use dma::{Access, DmaError, DmaMap, SegmentList};
use nvme::cmd::Psdt;
use nvme::{Command, Status};
use volume::{IoError, IoErrorKind, Op, Request};

/// Parts of an engine that the commands of its namespaces use.
///
/// A command changes its slot and its namespaces, reads guest memory and settings, and sends events
/// to the control half. No command accesses queues, doorbells, interrupts or counters: requests
/// that a volume has completed within the call, and commands that have ended, are left in
/// [`Slots::outcomes`], which the engine then handles ([`Engine::settle`]).
///
/// [`Engine::settle`]: super::Engine::settle
pub(crate) struct Execution<'a> {
    pub(super) slots: &'a mut Slots,
    pub(super) namespaces: &'a mut NamespaceTable,
    pub(super) dma: &'a DmaMap,
    pub(super) settings: &'a Settings,
    pub(super) bus_master: &'a BusMaster,
    pub(super) events: &'a mut Events,
}

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

/// Returns the NVMe status of a command after its volume request failed with this error.
pub(crate) fn status_of(error: IoError, write: bool) -> Status {
    match error.kind {
        IoErrorKind::MediaRead | IoErrorKind::Truncated if !write => Status::UNRECOVERED_READ_ERROR,
        IoErrorKind::MediaRead
        | IoErrorKind::MediaWrite
        | IoErrorKind::NotDurable
        | IoErrorKind::Truncated => Status::WRITE_FAULT,
        IoErrorKind::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(true),
        IoErrorKind::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true),
        IoErrorKind::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(true),
        IoErrorKind::Memory => Status::DATA_TRANSFER_ERROR,
        IoErrorKind::Aborted => Status::ABORT_REQUESTED,
        IoErrorKind::Gone => Status::INTERNAL_ERROR.with_dnr(true),
        // The medium is not at fault: the host may retry the command or use another path.
        IoErrorKind::Unreachable => Status::CONTROLLER_PATHING_ERROR,
        IoErrorKind::Unsupported => Status::INVALID_OPCODE.with_dnr(true),
        IoErrorKind::Busy => Status::COMMAND_INTERRUPTED,
        IoErrorKind::Invalid => Status::INTERNAL_ERROR,
    }
}

impl Execution<'_> {
    /// Reports the violation of an invariant, see [`broken`].
    pub(super) fn broken(&mut self, what: &'static str) {
        broken(self.events, what);
    }

    /// Ends a command with its status.
    pub(super) fn end(&mut self, index: u16) {
        self.end_with(index, 0);
    }

    /// Ends a command with its status; `result` is dword 0 of the completion.
    pub(super) fn end_with(&mut self, index: u16, result: u32) {
        let ended = Outcome::Ended(index, result);
        self.slots.outcomes.push_back(ended);
    }

    pub(super) fn extent(
        &self,
        command: &Command,
        blocks: u64,
        write: bool,
    ) -> Result<Extent, Status> {
        let index = self.namespaces.index_of(command.nsid.get())?;
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
    ///
    /// [`Engine::execute`]: super::Engine::execute
    pub(super) fn slot_for(
        &mut self,
        sqid: u16,
        command: &Command,
        ns: usize,
    ) -> Result<u16, Status> {
        let index = self.slots.alloc().ok_or(Status::INTERNAL_ERROR)?;
        let Starting {
            number, fetched_at, ..
        } = self.slots.starting;
        if let Some(slot) = self.slots.get(index) {
            slot.sqid = sqid;
            slot.cid = command.cid.get();
            slot.nsid = command.nsid.get();
            slot.ns = ns;
            slot.fetched_at = fetched_at;
        }
        self.slots.record(index, sqid, number, command);
        self.slots.starting.slot = Some(index);
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
        list.begin(self.dma);
        match command.flags.psdt() {
            Psdt::PRP => dma::prp::walk(
                self.dma,
                command.prp1(),
                command.prp2(),
                len,
                self.settings.page_size,
                access,
                list,
            )
            .map_err(prp_status),
            Psdt::SGL_MPTR_BUFFER | Psdt::SGL_MPTR_SGL => {
                dma::sgl::walk(self.dma, command.dptr.0, len, access, list).map_err(sgl_status)
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
        self.slots.outcomes.extend(over.map(Outcome::Completed));
    }

    /// Starts a flush of the namespace at this index at the controller's own request. Returns
    /// `false` when no slot is free.
    pub(super) fn flush_own(&mut self, ns: usize) -> bool {
        let Some(index) = self.slots.alloc_own(ns, RemainingWork::OwnFlush) else {
            return false;
        };
        self.submit(index, ns, Op::Flush, 0, 0, SegmentList::new());
        true
    }

    /// Offers a failed request to its volume, to be retried if the volume's error policy says so.
    /// Returns `None` when the volume has taken the request, so that another completion follows.
    fn offer_again(
        &mut self,
        index: u16,
        error: IoError,
        completion: volume::Completion,
    ) -> Option<volume::Completion> {
        let Some(slot) = self.slots.get(index) else {
            return Some(completion);
        };
        // Dataset Management ranges are advice, and no host waits for an orphaned command.
        if slot.orphan
            || matches!(
                slot.work,
                RemainingWork::Ranges(_) | RemainingWork::ZoneSend(_)
            )
        {
            return Some(completion);
        }
        // A copy by the file system is not a volume request that could be retried.
        if matches!(&slot.work, RemainingWork::Copy(copying) if copying.is_with_file()) {
            return Some(completion);
        }
        let copying = slot.copying();
        let op = match (&slot.work, slot.kind) {
            (RemainingWork::Copy(_), _) => copying.map_or(Op::Flush, |(op, ..)| op),
            (RemainingWork::FlushAll(_) | RemainingWork::OwnFlush, _) | (_, Kind::Flush) => {
                Op::Flush
            }
            (_, Kind::Read | Kind::Verify) => Op::Read,
            (_, Kind::Write) => Op::Write { fua: false },
            (_, Kind::DurableWrite) => Op::Write { fua: true },
            // The slot does not store the flags of the request; these are safe in any case.
            (_, Kind::Other) => Op::WriteZeroes {
                deallocate: false,
                fua: true,
            },
        };
        let slba = slot.slba;
        let Some(ns) = self.namespaces.get_mut(slot.ns) else {
            self.broken("an outstanding command has no namespace");
            return Some(completion);
        };
        let zeroes = match slot.work {
            RemainingWork::Zeroes(bytes) => bytes,
            RemainingWork::ZoneWrite(write) => match write.kind {
                ZoneWriteKind::Zeroes(blocks) => u64::from(blocks) << ns.shift,
                _ => 0,
            },
            RemainingWork::Metadata(ref moving) => moving.zeroed(),
            _ => 0,
        };
        let request = Request {
            tag: completion.tag,
            op,
            offset: match copying {
                Some((_, offset, _)) => offset,
                None if op == Op::Flush => 0,
                None => slba << ns.shift,
            },
            len: if op.has_data() {
                completion.data.len_bytes()
            } else {
                zeroes
            },
            data: completion.data,
        };
        ns.queue.failed(request, error)
    }

    /// Handles any completion other than that of a successful plain read or write.
    #[inline(never)]
    pub(super) fn complete(&mut self, index: u16, mut completion: volume::Completion) {
        let of_table = self.slots.get(index).is_some_and(|slot| slot.table);
        if let Err(error) = completion.result
            && !of_table
        {
            match self.offer_again(index, error, completion) {
                Some(failed) => completion = failed,
                None => return,
            }
        }
        if self.waits_for_table(index, &mut completion) {
            return;
        }
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a request completes without its slot");
        };
        match &mut slot.work {
            RemainingWork::Single
            | RemainingWork::Write
            | RemainingWork::Zeroes(_)
            | RemainingWork::ZoneWrite(_) => {
                if let Err(error) = completion.result {
                    let write = !matches!(slot.kind, Kind::Read | Kind::Verify);
                    slot.status = match error.kind {
                        // The controller has cancelled the request, see `end_commands_early`. The
                        // host has to send the command again.
                        IoErrorKind::Aborted if self.bus_master.ends_commands && !slot.abort => {
                            Status::COMMAND_INTERRUPTED
                        }
                        _ => status_of(error, write),
                    };
                }
                // A list of process memory (Verify) is dropped. The slot's own list returns to the
                // slot with its capacity.
                if completion.data.buffer().is_none() {
                    slot.list = completion.data;
                }
                match slot.work {
                    RemainingWork::Write | RemainingWork::Zeroes(_) => self.end_write(index),
                    _ => self.end(index),
                }
            }
            RemainingWork::Ranges(_) => {
                self.range_done(index, completion.result);
                self.next_range(index);
            }
            RemainingWork::Compare => {
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
            RemainingWork::Reservation | RemainingWork::Marking(_) => {
                self.broken("a command is with a volume that the control half executes");
            }
            RemainingWork::Copy(_) => self.complete_copy(index, completion, false),
            RemainingWork::ZoneSend(_) => self.zone_sent(index, completion.result),
            RemainingWork::Metadata(_) => self.complete_metadata(index, completion),
            RemainingWork::FlushAll(_) => {
                self.flush_done(index, completion.result);
                self.flush_next(index);
            }
            RemainingWork::Own(_) => self.own_completed(index, completion.result),
            RemainingWork::OwnFlush => {
                if let Err(error) = completion.result {
                    slot.status = status_of(error, true);
                    self.flush_failed(index, error);
                }
                self.end(index);
            }
        }
    }

    fn flush_failed(&mut self, index: u16, error: IoError) {
        let nsid = self.namespace_of(index).map(|(_, nsid)| nsid);
        let _disk = self.settings.span.clone().entered();
        if let Some(left_out) = self.settings.log.allow("flush failed") {
            let text = "a flush failed: completed writes may not be durable";
            tracing::error!(nsid, %error, left_out, "{text}");
        }
    }

    /// Records the end of one namespace's flush, as part of a flush of all namespaces.
    pub(super) fn flush_done(&mut self, index: u16, result: Result<(), IoError>) {
        if let Err(error) = result
            && let Some(slot) = self.slots.get(index)
            && slot.status.is_success()
        {
            slot.status = status_of(error, true);
        }
    }
}
