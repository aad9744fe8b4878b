//! Commands for namespaces with metadata ("NVM Command Set 1.1", 5.2 and 5.3).
//!
//! *Writes.* Data is copied into memory of the process, where its protection information is
//! generated or checked. Then the metadata is stored in the file, and the data is written to the
//! volume. *Reads* pass through such memory, too: the data determines which metadata belongs to it
//! ([`protection::table`]), and the guest gets both if they are correct. A command that fails a
//! check has therefore written nothing, and a crash in the middle leaves each block old or new.
//!
//! *A write after a failed or interrupted one* reads the blocks first, and then uses the metadata
//! slot that their data does not refer to.
//!
//! *Concurrency.* The metadata of a block has two slots, one of which a write needs. A write
//! therefore waits until no other command uses its blocks, and a read until no write does. Both are
//! parked meanwhile, like a command for which no memory is left.
//!
//! *Restart.* Records have no room for tags and metadata pointers. A command that was outstanding
//! ends with Command Interrupted, and the host sends it again ("NVMe Base 2.1", 4.2.3.1).

use super::Execution;
use super::execution::{sgl_status, status_of};
use super::slots::{Kind, RemainingWork};
use crate::metadata::{MetadataState, StoredMetadata};
use dma::sgl::SglError;
use dma::{Access, Buffer, SegmentList};
use nvme::cmd::Psdt;
use nvme::cmd::io::{Prinfo, RwCdw12, WriteZeroesCdw12};
use nvme::{Command, NvmOpcode, Status};
use protection::{Checks, Mismatch, Protection, Tags, Type, table};
use volume::{Budget, Completion, IoErrorKind, Op};

const INVALID: Status = Status::INVALID_FIELD.with_dnr(true);

/// Range of blocks whose metadata an outstanding command uses; conflicting commands wait.
pub(super) struct LockedBlocks {
    pub slba: u64,
    pub blocks: u64,
    /// Whether the command writes the blocks, and so excludes commands that read them.
    pub changes: bool,
}

impl LockedBlocks {
    /// Returns whether two commands cannot be outstanding at the same time, so that one has to
    /// wait.
    pub fn conflicts(&self, other: &LockedBlocks) -> bool {
        let apart = other.slba >= self.slba + self.blocks || self.slba >= other.slba + other.blocks;
        !apart && (self.changes || other.changes)
    }
}

/// Progress of a command for blocks with metadata.
pub(super) struct Moving {
    opcode: NvmOpcode,
    blocks: u64,
    offset: u64,
    /// Length of the command's data in bytes, without metadata.
    len: u64,
    /// Guest memory segments of the data; with an extended LBA, the metadata lies between the
    /// blocks.
    data: SegmentList,
    metadata: SegmentList,
    /// Whether the host transfers no metadata, so that protection information is inserted or
    /// stripped here (PRACT).
    stripped: bool,
    prinfo: Prinfo,
    /// Whether storage tags are checked (bit STC of the command).
    stc: bool,
    tags: Tags,
    deallocate: bool,
    /// Whether the changes have to be durable when the command completes (FUA, or no write cache).
    durable: bool,
    /// Whether the previous content of the blocks is being read, before new data is written.
    settling: bool,
    /// Whether the request was submitted to the volume, so that other commands on the blocks wait.
    begun: bool,
}

impl Moving {
    /// Returns the blocks that the command uses, starting at `slba`, once its request was
    /// submitted.
    pub fn held(&self, slba: u64) -> Option<LockedBlocks> {
        self.begun.then(|| LockedBlocks {
            slba,
            blocks: self.blocks,
            changes: self.changes(),
        })
    }

    fn changes(&self) -> bool {
        matches!(self.opcode, NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES)
    }

    /// Returns whether the current request has to make the command's changes durable.
    pub fn makes_durable(&self) -> bool {
        self.durable && !self.settling
    }

    /// Returns the number of zero bytes that the command writes; 0 except for Write Zeroes.
    pub fn zeroed(&self) -> u64 {
        if self.is_zeroes() { self.len } else { 0 }
    }

    fn is_zeroes(&self) -> bool {
        self.opcode == NvmOpcode::WRITE_ZEROES
    }

    /// Returns the kind of the command, for the counters and for a retry of the current request by
    /// the volume.
    fn kind(&self) -> Kind {
        match self.opcode {
            _ if self.settling => Kind::Verify,
            NvmOpcode::WRITE if self.durable => Kind::DurableWrite,
            NvmOpcode::WRITE => Kind::Write,
            NvmOpcode::WRITE_ZEROES => Kind::Other,
            NvmOpcode::VERIFY => Kind::Verify,
            _ => Kind::Read,
        }
    }

    fn checks(&self) -> Checks {
        checks(self.prinfo, self.stc)
    }

    fn tags_of(&self, protection: &Protection, index: u64) -> Tags {
        Tags {
            block: protection.tags_of(self.tags.block, index),
            ..self.tags
        }
    }

    /// Returns the offset of a block's metadata in the guest's data, if metadata is interleaved.
    fn between(&self, state: &MetadataState, index: u64) -> Option<u64> {
        let layout = state.layout();
        let (block, size) = (u64::from(layout.block), u64::from(layout.metadata));
        let extended = layout.extended && !self.stripped;
        extended.then(|| index * (block + size) + block)
    }

    /// Copies the guest's data of all blocks. Without interleaved metadata the list is walked once,
    /// because a guest may use an SGL with very many segments.
    fn data_from_host(&self, state: &MetadataState, all: &mut [u8]) {
        if self.between(state, 0).is_none() {
            self.data.copy_to(0, all);
            return;
        }
        let block = state.layout().block;
        for (data, at) in all.chunks_exact_mut(block as usize).zip(0..) {
            let offset = self.host_data(state, at, block.into());
            self.data.copy_to(offset, data);
        }
    }

    /// Copies the data of all blocks to the guest.
    fn data_to_host(&self, state: &MetadataState, all: &[u8]) {
        if self.between(state, 0).is_none() {
            self.data.copy_from(0, all);
            return;
        }
        let block = state.layout().block;
        for (data, at) in all.chunks_exact(block as usize).zip(0..) {
            let offset = self.host_data(state, at, block.into());
            self.data.copy_from(offset, data);
        }
    }

    /// Copies the guest's metadata of all blocks into `all`, if the guest transfers any.
    fn metadata_from_host(&self, state: &MetadataState, all: &mut [u8]) {
        if self.between(state, 0).is_none() {
            self.metadata.copy_to(0, all);
            return;
        }
        let each = all.chunks_exact_mut(state.layout().metadata.into());
        for (metadata, at) in each.zip(0..) {
            if let Some(offset) = self.between(state, at) {
                self.data.copy_to(offset, metadata);
            }
        }
    }

    /// Copies the metadata of all blocks to the guest.
    fn metadata_to_host(&self, state: &MetadataState, all: &[u8]) {
        if self.between(state, 0).is_none() {
            self.metadata.copy_from(0, all);
            return;
        }
        let each = all.chunks_exact(state.layout().metadata.into());
        for (metadata, at) in each.zip(0..) {
            if let Some(offset) = self.between(state, at) {
                self.data.copy_from(offset, metadata);
            }
        }
    }

    /// Returns the offset of a block's data in the guest's data list.
    fn host_data(&self, state: &MetadataState, index: u64, block: u64) -> u64 {
        if state.layout().extended && !self.stripped {
            index * (block + u64::from(state.layout().metadata))
        } else {
            index * block
        }
    }
}

/// Returns the checks that PRCHK and Storage Tag Check request.
pub(super) fn checks(prinfo: Prinfo, stc: bool) -> Checks {
    Checks {
        guard: prinfo.prchk_guard(),
        application: prinfo.prchk_apptag(),
        storage: stc,
        reference: prinfo.prchk_reftag(),
    }
}

pub(super) fn mismatch(mismatch: Mismatch) -> Status {
    match mismatch {
        Mismatch::Guard => Status::GUARD_CHECK_ERROR,
        Mismatch::Application => Status::APPLICATION_TAG_CHECK_ERROR,
        Mismatch::Storage => Status::STORAGE_TAG_CHECK_ERROR,
        Mismatch::Reference => Status::REFERENCE_TAG_CHECK_ERROR,
    }
}

pub(super) fn is_aborted(completion: &Completion) -> bool {
    completion
        .result
        .is_err_and(|error| error.kind == IoErrorKind::Aborted)
}

/// Returns whether the command's protection fields are invalid ("NVM Command Set 1.1", 5.3.2 and
/// 5.3.3). Write Zeroes has no protection information of the host that could be checked (3.3.8).
fn refused(protection: &Protection, opcode: NvmOpcode, cdw12: RwCdw12, fits: bool) -> bool {
    let prinfo = cdw12.prinfo();
    let looks = matches!(opcode, NvmOpcode::COMPARE | NvmOpcode::VERIFY);
    let stored = cdw12.stc() && protection.storage.bits > 0;
    let checks = stored || prinfo.prchk_guard() || prinfo.prchk_apptag() || prinfo.prchk_reftag();
    looks && prinfo.pract()
        || opcode == NvmOpcode::WRITE_ZEROES && checks
        || cannot_check(protection, prinfo, fits)
}

/// Returns whether the command requests a check of the reference tag that is impossible or, if
/// `fits` is `false`, never succeeds. A reference tag without bits, next to a storage tag with all
/// bits, is not checked.
pub(super) fn cannot_check(protection: &Protection, prinfo: Prinfo, fits: bool) -> bool {
    let is_there = protection.reference_mask() != 0;
    prinfo.prchk_reftag() && is_there && (protection.kind == Type::Three || !fits)
}

impl Execution<'_> {
    /// Starts Read, Write, Compare, Verify or Write Zeroes of blocks with metadata.
    pub(super) fn with_metadata(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let opcode = command.nvm_opcode();
        let zeroes = opcode == NvmOpcode::WRITE_ZEROES;
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let write = zeroes || opcode == NvmOpcode::WRITE;
        let blocks = u64::from(cdw12.nlb());
        let extent = self.extent(command, blocks, write)?;
        let state = self
            .namespaces
            .metadata_of(extent.ns)
            .ok_or(Status::INTERNAL_ERROR)?;
        if self.slots.is_reserved() {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        let layout = *state.layout();
        let (prinfo, stc) = match layout.protection {
            Some(_) => (cdw12.prinfo(), cdw12.stc()),
            None => (Prinfo::new(), false),
        };
        let mut tags = Tags {
            application: command.cdw15.get() as u16,
            mask: (command.cdw15.get() >> 16) as u16,
            block: 0,
        };
        if let Some(protection) = layout.protection {
            let (cdw2, cdw3) = (command.cdw2.get(), command.cdw3.get());
            tags.block = protection
                .guard
                .command_tags(cdw2, cdw3, command.cdw14.get());
            let fits = protection.is_initial(tags.block, extent.slba);
            if refused(&protection, opcode, cdw12, fits) {
                return Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr(true));
            }
        }
        let stripped = prinfo.pract() && layout.is_tuple_only();
        let size = u64::from(layout.metadata) * blocks;
        let transfers = !zeroes && opcode != NvmOpcode::VERIFY;
        let moved = if layout.extended && !stripped && transfers {
            extent.len + size
        } else {
            extent.len
        };
        if moved > self.settings.max_transfer {
            return Err(INVALID);
        }
        let index = self.slot_for(sqid, command, extent.ns)?;
        let (mut data, mut metadata) = (SegmentList::new(), SegmentList::new());
        if transfers {
            let access = if opcode == NvmOpcode::READ {
                Access::Write
            } else {
                Access::Read
            };
            if !layout.extended && !stripped {
                self.walk_metadata(command, size, access, &mut metadata)?;
            }
            self.walk(command, moved, access, &mut data)?;
            // Data and metadata of a command are either both in the controller memory buffer, or
            // both outside.
            let is_here = |list| self.dma.is_device_memory(list);
            if !metadata.is_empty() && is_here(&data) != is_here(&metadata) {
                return Err(Status::INVALID_USE_OF_CMB.with_dnr(true));
            }
        }
        let deallocate = WriteZeroesCdw12::from_bits(command.cdw12.get()).deac();
        let durable = write && (cdw12.fua() || !self.settings.features.write_cache);
        if let Some(slot) = self.slots.get(index) {
            slot.slba = extent.slba;
            slot.bytes = if zeroes { 0 } else { extent.len };
            let moving = Moving {
                opcode,
                blocks,
                offset: extent.offset,
                len: extent.len,
                data,
                metadata,
                stripped,
                prinfo,
                stc,
                tags,
                deallocate: zeroes && deallocate,
                durable,
                settling: false,
                begun: false,
            };
            slot.kind = moving.kind();
            slot.work = RemainingWork::Metadata(Box::new(moving));
        }
        // Parked commands continue first.
        if !self.slots.parked.is_empty() || self.next_metadata(index) {
            self.slots.parked.push_back(index);
        }
        Ok(())
    }

    /// Resolves the command's metadata pointer into segments of guest memory ("NVMe Base 2.1",
    /// 4.1.1). The pointer is the address of a contiguous buffer, aligned to a dword, or the
    /// address of the first descriptor of an SGL, aligned to a qword (SGLS bit 19). The descriptor
    /// is read once, and may be in the controller memory buffer regardless of the metadata's
    /// location.
    fn walk_metadata(
        &self,
        command: &Command,
        len: u64,
        access: Access,
        list: &mut SegmentList,
    ) -> Result<(), Status> {
        let at = command.mptr.get();
        let scattered = match command.flags.psdt() {
            Psdt::PRP | Psdt::SGL_MPTR_BUFFER => false,
            Psdt::SGL_MPTR_SGL => true,
            _ => return Err(INVALID),
        };
        if !at.is_multiple_of(if scattered { 8 } else { 4 }) {
            return Err(INVALID);
        }
        let descriptor = if scattered {
            let mut descriptor = [0; 16];
            let read = self.dma.read(at, &mut descriptor);
            read.map_err(super::dma_status)?;
            descriptor
        } else {
            // Equivalent to an SGL with one data block.
            let bytes = u32::try_from(len).map_err(|_| INVALID)?;
            let [a, b, c, d, e, f, g, h] = at.to_le_bytes();
            let [i, j, k, l] = bytes.to_le_bytes();
            [a, b, c, d, e, f, g, h, i, j, k, l, 0, 0, 0, 0]
        };
        list.begin(self.dma);
        let walked = dma::sgl::walk(self.dma, descriptor, len, access, list);
        walked.map_err(|error| match error {
            SglError::Dma(error) => super::dma_status(error),
            // The length cannot be wrong, because the host does not specify it.
            _ if !scattered => Status::DATA_TRANSFER_ERROR,
            SglError::DataLengthInvalid => Status::METADATA_SGL_LENGTH_INVALID.with_dnr(true),
            error => sgl_status(error),
        })
    }

    /// Begins the command. Returns `true` when it has to wait for other commands, and is continued
    /// in a later round.
    #[must_use]
    pub(super) fn next_metadata(&mut self, index: u16) -> bool {
        let Some(slot) = self.slots.get(index) else {
            self.broken("a command with metadata goes on without its slot");
            return false;
        };
        let (ns, slba, failed) = (slot.ns, slot.slba, !slot.status.is_success());
        let RemainingWork::Metadata(moving) = &slot.work else {
            self.broken("a command with metadata goes on in another command's slot");
            return false;
        };
        let (blocks, changes, len) = (moving.blocks, moving.changes(), moving.len);
        let zeroes = moving.is_zeroes();
        if failed {
            self.end_metadata(index);
            return false;
        }
        let wanted = LockedBlocks {
            slba,
            blocks,
            changes,
        };
        if self
            .slots
            .any_metadata(ns, |other| wanted.conflicts(&other))
        {
            return true;
        }
        let Some(state) = self.namespaces.metadata_of(ns) else {
            self.broken("a command with metadata is where there is none");
            return false;
        };
        let settling = changes && state.is_in_doubt(slba, blocks);
        let buffer = if zeroes && !settling {
            None
        } else {
            match self.slots.scratch.take(len) {
                Ok(buffer) => Some(buffer),
                Err(_) => return true,
            }
        };
        let taken = buffer.is_some();
        if let Some(slot) = self.slots.get(index)
            && let RemainingWork::Metadata(moving) = &mut slot.work
        {
            slot.scratch = if taken { len } else { 0 };
            moving.begun = true;
            moving.settling = settling;
            slot.kind = moving.kind();
        }
        match (settling, buffer) {
            (true, Some(buffer)) => {
                let (offset, data) = (slba * u64::from(state.layout().block), buffer);
                self.submit(index, ns, Op::Read, offset, len, SegmentList::owned(data));
            }
            (_, buffer) => self.move_metadata(index, &state, buffer),
        }
        false
    }

    /// Submits the command's volume request. The data of a write is already in the buffer, and its
    /// metadata in the file.
    fn move_metadata(&mut self, index: u16, state: &MetadataState, buffer: Option<Buffer>) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a command with metadata goes on without its slot");
        };
        let ns = slot.ns;
        let RemainingWork::Metadata(moving) = &mut slot.work else {
            return self.broken("a command with metadata goes on in another command's slot");
        };
        moving.settling = false;
        slot.kind = moving.kind();
        let (offset, len, fua) = (moving.offset, moving.len, moving.durable);
        let op = match moving.opcode {
            NvmOpcode::WRITE => Op::Write { fua },
            NvmOpcode::WRITE_ZEROES => Op::WriteZeroes {
                deallocate: moving.deallocate,
                fua,
            },
            _ => Op::Read,
        };
        let slba = slot.slba;
        match prepare(moving, slba, state, buffer) {
            Ok(data) => {
                crash::point!("controller.metadata.prepared");
                self.submit(index, ns, op, offset, len, data);
            }
            Err((status, lba)) => {
                (slot.status, slot.slba) = (status, lba);
                self.end_metadata(index);
            }
        }
    }

    /// Returns the cost of continuing this command, in units of a worker round's budget; 0 when
    /// the slot has another command, which [`Execution::next_metadata`] reports.
    pub(super) fn units_of_metadata(&mut self, index: u16) -> u32 {
        let slot = self.slots.get(index);
        let bytes = slot.map_or(0, |slot| match &slot.work {
            RemainingWork::Metadata(moving) => moving.len,
            _ => 0,
        });
        Budget::units_of(bytes, 0)
    }

    /// Handles the completion of a volume request for blocks with metadata.
    pub(super) fn complete_metadata(&mut self, index: u16, mut completion: Completion) {
        let interrupting = self.bus_master.ends_commands;
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a request completes without its slot");
        };
        let (ns, slba, abort) = (slot.ns, slot.slba, slot.abort);
        let RemainingWork::Metadata(moving) = &slot.work else {
            return self.broken("a command with metadata ends in another command's slot");
        };
        let done = match completion.result {
            Ok(()) | Err(_) if moving.settling && !is_aborted(&completion) => {
                let Some(state) = self.namespaces.metadata_of(ns) else {
                    return self.broken("a command with metadata is where there is none");
                };
                // Unreadable data cannot settle its metadata, and is overwritten anyway.
                let read = completion.result.is_ok();
                if let Some(data) = completion.data.buffer().filter(|_| read) {
                    let datas = data.chunks_exact(state.layout().block as usize);
                    for (data, lba) in datas.zip(slba..) {
                        state.settle(lba, table::checksum(data));
                    }
                }
                let buffer = completion.data.take_buffer();
                return self.move_metadata(index, &state, buffer);
            }
            Err(error) if error.kind == IoErrorKind::Aborted && interrupting && !abort => {
                Err((Status::COMMAND_INTERRUPTED, slba))
            }
            Err(error) => Err((status_of(error, moving.changes()), slba)),
            Ok(()) if moving.changes() => {
                let state = self.namespaces.get(ns);
                let state = state.and_then(|ns| ns.config.metadata.as_deref());
                for lba in (slba..).take(moving.blocks as usize) {
                    state.inspect(|state| state.done(lba));
                }
                Ok(())
            }
            Ok(()) => {
                let state = self.namespaces.get(ns);
                let state = state.and_then(|ns| ns.config.metadata.as_deref());
                match (state, completion.data.buffer()) {
                    (Some(state), Some(data)) => deliver(moving, slba, state, data),
                    _ => Err((Status::INTERNAL_ERROR, slba)),
                }
            }
        };
        if let Err((status, lba)) = done
            && let Some(slot) = self.slots.get(index)
        {
            (slot.status, slot.slba) = (status, lba);
        }
        self.end_metadata(index);
    }

    /// Ends the command, and releases its references to guest memory.
    fn end_metadata(&mut self, index: u16) {
        if let Some(slot) = self.slots.get(index) {
            slot.work = RemainingWork::Single;
        }
        self.end(index);
    }
}

/// Fills the buffer with the data of a write, and stores its metadata in the file. On failure,
/// returns a status and the failed block.
fn prepare(
    moving: &Moving,
    slba: u64,
    state: &MetadataState,
    buffer: Option<Buffer>,
) -> Result<SegmentList, (Status, u64)> {
    let layout = state.layout();
    let size = usize::from(layout.metadata);
    let write_fault = |lba| (Status::WRITE_FAULT, lba);
    if moving.is_zeroes() {
        let data = vec![0; layout.block as usize];
        let checksum = table::checksum(&data);
        let mut metadata = vec![0; size];
        for (lba, at) in (slba..).zip(0..moving.blocks) {
            if let Some(protection) = layout.protection.filter(|_| moving.prinfo.pract()) {
                protection.generate(&data, &mut metadata, moving.tags_of(&protection, at));
            }
            let kept = state.write(lba, checksum, &metadata);
            kept.ok_or_else(|| write_fault(lba))?;
        }
        return Ok(SegmentList::new());
    }
    let mut buffer = buffer.ok_or((Status::INTERNAL_ERROR, slba))?;
    if !moving.changes() {
        return Ok(SegmentList::owned(buffer));
    }
    // All metadata is checked before any is stored.
    let mut all = vec![0; size * moving.blocks as usize];
    moving.data_from_host(state, &mut buffer);
    moving.metadata_from_host(state, &mut all);
    let datas = buffer.chunks_exact(layout.block as usize);
    for ((data, metadata), at) in datas.zip(all.chunks_exact_mut(size)).zip(0..) {
        let Some(protection) = &layout.protection else {
            continue;
        };
        let tags = moving.tags_of(protection, at);
        if moving.prinfo.pract() {
            protection.generate(data, metadata, tags);
            continue;
        }
        let checked = protection.check(data, metadata, tags, moving.checks());
        checked.map_err(|error| (mismatch(error), slba + at))?;
    }
    let datas = buffer.chunks_exact(layout.block as usize);
    for ((data, metadata), lba) in datas.zip(all.chunks_exact(size)).zip(slba..) {
        let kept = state.write(lba, table::checksum(data), metadata);
        kept.ok_or_else(|| write_fault(lba))?;
    }
    Ok(SegmentList::owned(buffer))
}

/// Checks data that was read, and copies it to the guest or compares it with the guest's data.
fn deliver(
    moving: &Moving,
    slba: u64,
    state: &MetadataState,
    data: &[u8],
) -> Result<(), (Status, u64)> {
    let layout = state.layout();
    let (size, block) = (usize::from(layout.metadata), u64::from(layout.block));
    let mut all = vec![0; size * moving.blocks as usize];
    let datas = || data.chunks_exact(layout.block as usize);
    for ((data, metadata), at) in datas().zip(all.chunks_exact_mut(size)).zip(0..) {
        let lba = slba + at;
        let unreadable = (Status::UNRECOVERED_READ_ERROR, lba);
        let kept = state.read(lba, table::checksum(data), metadata);
        let kept = kept.ok_or(unreadable)?;
        if let Some(protection) = &layout.protection {
            let tags = moving.tags_of(protection, at);
            let checked = protection.check(data, metadata, tags, moving.checks());
            checked.map_err(|error| (mismatch(error), lba))?;
        }
        if kept == StoredMetadata::Damaged {
            return Err(unreadable);
        }
    }
    match moving.opcode {
        NvmOpcode::READ => {
            moving.data_to_host(state, data);
            moving.metadata_to_host(state, &all);
        }
        NvmOpcode::COMPARE => {
            let mut host = vec![0; layout.block as usize];
            let mut beside = vec![0; all.len()];
            moving.metadata_from_host(state, &mut beside);
            let metadata = all.chunks_exact_mut(size);
            let both = metadata.zip(beside.chunks_exact_mut(size));
            for ((data, (metadata, beside)), at) in datas().zip(both).zip(0..) {
                moving
                    .data
                    .copy_to(moving.host_data(state, at, block), &mut host);
                let compared = compare(moving, state, at, (data, metadata), (&host, beside));
                compared.map_err(|status| (status, slba + at))?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Compares a block with the guest's. The guest's protection information is checked as for a write,
/// but not compared ("NVM Command Set 1.1", 5.3.2.4).
fn compare(
    moving: &Moving,
    state: &MetadataState,
    at: u64,
    (data, metadata): (&[u8], &mut [u8]),
    (host, beside): (&[u8], &mut [u8]),
) -> Result<(), Status> {
    if let Some(protection) = &state.layout().protection {
        let tags = moving.tags_of(protection, at);
        let checked = protection.check(host, beside, tags, moving.checks());
        checked.map_err(mismatch)?;
        for metadata in [&mut *metadata, &mut *beside] {
            if let Some(tuple) = protection.tuple_in_mut(metadata) {
                tuple.fill(0);
            }
        }
    }
    if host == data && beside == metadata {
        Ok(())
    } else {
        Err(Status::COMPARE_FAILURE)
    }
}
