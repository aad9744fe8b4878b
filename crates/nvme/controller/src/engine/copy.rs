//! Copy command ("NVM Command Set 1.1", 3.3.2), within a namespace and between namespaces of the
//! controller.
//!
//! Descriptors of formats 2h and 3h name the namespace of each source. Hosts first enable these
//! formats (Host Behavior Support, CDFE). Formats 1h and 3h are for guards of 32 and 64 bits, with
//! longer tags. Module [`copy_metadata`](super::copy_metadata) covers blocks with metadata.
//!
//! When a source range and its destination both lie in files, the file system may copy the range,
//! if the user has enabled that ([`volume::RangeCopy::copy`]). Data that the file system does not
//! copy, for any reason, is copied here with the same outcome.
//!
//! A copy here reads a piece into memory of this process and writes it from there, so a command has
//! at most one outstanding request. When the volume completes a request within the call, the
//! command is parked, like a command with many ranges. After a crash in the middle, the next
//! process restarts the command from its beginning. Copying a part twice is harmless, because
//! sources and destination do not overlap.

use super::Execution;
use super::copy_metadata::{self, CopyMetadata, Ready};
use super::execution::status_of;
use super::metadata::{LockedBlocks, is_aborted};
use super::slots::{Kind, RemainingWork, Slot};
use dma::{Buffer, SegmentList};
use nvme::cmd::io::{CopyCdw12, DirectiveType};
use nvme::{Command, Status};
use placement::Writer;
use protection::{Layout, Tags};
use std::ops::Range;
use volume::{Budget, CopyRequest, IoError, IoErrorKind, Op, Request};

/// Maximum size in bytes of one read and one write of a Copy command.
const PIECE: u64 = 256 << 10;
/// Maximum number of bytes that a Copy command copies, in total and for each source range.
const MAX_COPY_BYTES: u64 = 64 << 20;
/// Maximum number of source ranges of a Copy command. Their descriptors occupy one page or slightly
/// more.
pub(super) const RANGES: usize = 128;

/// Descriptor formats 0h and 1h, which do not name the namespace of a source.
const PLAIN_FORMATS: u16 = 1 << 0 | 1 << 1;
/// Descriptor formats 2h and 3h, which name the namespace of a source. Hosts have to enable them
/// (CDFE).
pub(crate) const CROSS_FORMATS: u16 = 1 << 2 | 1 << 3;
/// Supported descriptor formats, encoded as CDFS of Identify Controller.
pub(crate) const FORMATS: u16 = PLAIN_FORMATS | CROSS_FORMATS;

/// Copy limits of a namespace, in blocks, for Identify Namespace.
pub(crate) struct CopyLimits {
    /// Maximum number of blocks of each source range (MSSRL).
    pub range: u16,
    /// Maximum number of blocks that one Copy command copies (MCL).
    pub command: u32,
    /// Maximum number of source ranges of one Copy command, minus one (MSRC).
    pub ranges_z: u8,
}

impl CopyLimits {
    /// Returns the copy limits of a namespace with blocks of 2 to the power of `shift` bytes.
    pub(crate) const fn new(shift: u32) -> Self {
        let blocks = MAX_COPY_BYTES >> shift;
        Self {
            range: if blocks < 0xffff {
                blocks as u16
            } else {
                0xffff
            },
            command: blocks as u32,
            ranges_z: (RANGES - 1) as u8,
        }
    }
}

/// Progress of a Copy command.
pub(super) struct Copying {
    /// Source ranges that are left to copy, in reverse order, so that the last is the current one.
    pub sources: Vec<Source>,
    /// Number of source ranges that the Copy command has.
    count: usize,
    /// Index of the destination namespace in the engine's table.
    pub ns: usize,
    /// Byte offset in the destination namespace at which the command begins to write.
    begun: u64,
    /// Byte offset in the destination namespace at which the next piece is written.
    pub to: u64,
    fua: bool,
    pub step: CopyStep,
    /// Metadata state of the command, if one of the namespaces has metadata.
    pub carried: Option<CopyMetadata>,
    /// Destination metadata of the last piece that was read, to be written with it.
    pub passed: Vec<u8>,
}

/// A source range of a Copy command.
pub(super) struct Source {
    /// Index of the source namespace in the engine's table.
    pub ns: usize,
    /// Byte offset in the source namespace of the next block to copy.
    pub from: u64,
    /// Number of bytes of the source range that are left to copy.
    pub left: u64,
    /// Expected tags of the next block, if it has protection information.
    pub tags: Tags,
    /// Metadata layout of the source namespace; `None` without metadata.
    pub layout: Option<Layout>,
}

pub(super) enum CopyStep {
    /// The copy of a source range has not begun; the file system may be able to do it.
    Begin,
    /// The file system is copying the source range.
    File,
    Read,
    /// A piece was read from the source, and is written to the destination next.
    Write(CopyPiece),
    /// This piece was read; the destination blocks are read next, to determine which version of
    /// their metadata is valid.
    Settle(CopyPiece),
}

/// Data of a piece that was read from the source.
#[derive(Default)]
pub(super) struct CopyPiece {
    pub data: SegmentList,
    /// Metadata of the piece's blocks for the destination; empty if it has no metadata.
    pub metadata: Vec<u8>,
}

impl Copying {
    /// Returns the next volume request: operation, byte offset and length in bytes.
    fn request(&self) -> Option<(Op, u64, u64)> {
        let source = self.sources.last()?;
        let len = source.left.min(PIECE);
        Some(match &self.step {
            CopyStep::File => (Op::Write { fua: self.fua }, self.to, source.left),
            CopyStep::Begin | CopyStep::Read => (Op::Read, source.from, len),
            CopyStep::Settle(_) => (Op::Read, self.to, len),
            CopyStep::Write(_) => (Op::Write { fua: self.fua }, self.to, len),
        })
    }

    /// Returns the index of the namespace of the next volume request.
    fn place(&self) -> usize {
        match (&self.step, self.sources.last()) {
            (CopyStep::Begin | CopyStep::Read, Some(source)) => source.ns,
            _ => self.ns,
        }
    }

    /// Returns whether the command still has to read or write the namespace of this index.
    pub(super) fn touches(&self, ns: usize) -> bool {
        self.ns == ns || self.sources.iter().any(|source| source.ns == ns)
    }

    /// Returns the blocks of the current request; `None` when no namespace has metadata.
    pub(super) fn blocks(&self) -> Option<LockedBlocks> {
        let shift = self.carried.as_ref()?.shift;
        let (_, offset, len) = self.request()?;
        Some(LockedBlocks {
            slba: offset >> shift,
            blocks: len >> shift,
            changes: matches!(self.step, CopyStep::Write(_) | CopyStep::Settle(_)),
        })
    }

    /// Returns the blocks that the command has reserved in the namespace at this index.
    pub(super) fn held(&self, ns: usize) -> Option<LockedBlocks> {
        let held = self.carried.as_ref().is_some_and(|carried| carried.held);
        (held && self.place() == ns).then(|| self.blocks())?
    }

    /// Returns whether the current request is the last write of a durable copy (FUA) with metadata,
    /// after which the metadata file has to be flushed.
    pub(super) fn makes_durable(&self) -> bool {
        let last = matches!(&self.sources[..], [source] if source.left <= PIECE);
        self.carried.is_some() && self.fua && last && matches!(self.step, CopyStep::Write(_))
    }

    /// Returns the data buffer for the next request: the piece to write, or a new buffer to read
    /// into.
    fn data(&mut self, len: u64) -> SegmentList {
        match &mut self.step {
            CopyStep::Write(piece) => std::mem::take(&mut piece.data),
            _ => SegmentList::owned(Buffer::new(len as usize)),
        }
    }

    /// Returns whether the file system is copying a range.
    pub(super) fn is_with_file(&self) -> bool {
        matches!(self.step, CopyStep::File)
    }

    /// Advances the Copy command after a request has succeeded; `data` is the memory that was read.
    fn advance(&mut self, data: SegmentList) {
        match &mut self.step {
            CopyStep::Read => {
                let metadata = std::mem::take(&mut self.passed);
                self.step = CopyStep::Write(CopyPiece { data, metadata });
                return;
            }
            CopyStep::Settle(piece) => {
                self.step = CopyStep::Write(std::mem::take(piece));
                self.carried.iter_mut().for_each(|c| c.settled = true);
                return;
            }
            _ => {}
        }
        let whole = self.is_with_file();
        self.step = CopyStep::Read;
        self.carried.iter_mut().for_each(|c| c.settled = false);
        let Some(source) = self.sources.last_mut() else {
            return;
        };
        let len = if whole {
            source.left
        } else {
            PIECE.min(source.left)
        };
        self.to += len;
        source.from += len;
        source.left -= len;
        if let Some(carried) = &mut self.carried {
            let blocks = len >> carried.shift;
            let (from, to) = (source.layout.as_ref(), carried.layout.as_ref());
            source.tags = copy_metadata::behind(from, source.tags, blocks);
            carried.tags = copy_metadata::behind(to, carried.tags, blocks);
        }
        if source.left == 0 {
            self.sources.pop();
            self.step = CopyStep::Begin;
        }
    }

    /// Returns dword 0 of the completion of a failed command: the index of the first range that was
    /// not copied completely.
    pub(super) fn result(&self) -> u32 {
        (self.count - self.sources.len()) as u32
    }
}

/// Returns whether a failed copy by the file system may be repeated by reads and writes, so that
/// the outcome is that of a command copied without the file system.
fn may_be_repeated(error: IoError) -> bool {
    !matches!(
        error.kind,
        IoErrorKind::NotDurable | IoErrorKind::Aborted | IoErrorKind::Gone
    )
}

impl Slot {
    /// Returns the current volume request of the Copy command in this slot.
    pub(super) fn copying(&self) -> Option<(Op, u64, u64)> {
        match &self.work {
            RemainingWork::Copy(copying) => copying.request(),
            _ => None,
        }
    }
}

impl Execution<'_> {
    pub(super) fn copy(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = CopyCdw12::from_bits(command.cdw12.get());
        let index = self.namespaces.index_of(command.nsid.get())?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        if ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let format = cdw12.cdfe();
        let offered = PLAIN_FORMATS | self.settings.features.copy_formats & CROSS_FORMATS;
        if offered & 1 << format == 0 {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let to = command.slba();
        let mut asked = self.ranges(command, index)?;
        let carried = self.carried(command, &asked.sources, index)?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        let (shift, all) = (ns.shift, asked.blocks);
        if !ns.covers(to, all) {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
        }
        let (start, end) = (to << shift, (to + all) << shift);
        let sources = &mut asked.sources;
        if sources
            .iter()
            .any(|s| s.ns == index && s.from < end && start < s.from + s.left)
        {
            return Err(Status::OVERLAPPING_IO_RANGE.with_dnr(true));
        }
        let largest = sources.iter().map(|source| source.left).max();
        // A command without source ranges needs no memory.
        let mut memory = largest.unwrap_or(0).min(PIECE);
        if let Some(layout) = carried.as_ref().and_then(|carried| carried.layout) {
            // Memory for the metadata of a piece, and for the previous content of the destination.
            memory = 2 * memory + (memory >> shift) * u64::from(layout.metadata);
        }
        let fua = cdw12.fua() || !self.settings.features.write_cache;
        let ns = index;
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, ns)?;
        self.slots.scratch.reserve(memory)?;
        let dtype = DirectiveType(cdw12.dtype());
        self.place(ns, command, dtype, all, Writer::Controller, again)?;
        sources.reverse();
        let waits = carried.is_some() && !self.slots.parked.is_empty();
        if let Some(slot) = self.slots.get(index) {
            slot.scratch = memory;
            slot.slba = to;
            slot.kind = Kind::Other;
            slot.work = RemainingWork::Copy(Box::new(Copying {
                count: sources.len(),
                sources: std::mem::take(sources),
                ns,
                begun: start,
                to: start,
                fua,
                step: CopyStep::Begin,
                carried,
                passed: Vec::new(),
            }));
        }
        // Parked commands continue first.
        if waits || self.next_copy(index) {
            self.slots.parked.push_back(index);
        }
        Ok(())
    }

    /// Submits the next request of the command to the volume. Returns `true` when the command has
    /// to wait for other commands, and is continued in a later round.
    #[must_use]
    pub(super) fn next_copy(&mut self, index: u16) -> bool {
        let Some(slot) = self.slots.get(index) else {
            self.broken("Copy goes on without its slot");
            return false;
        };
        let failed = !slot.status.is_success();
        let RemainingWork::Copy(copying) = &mut slot.work else {
            self.broken("Copy goes on in another command's slot");
            return false;
        };
        let result = if failed { copying.result() } else { 0 };
        let request = copying.request().filter(|_| !failed);
        // The slot names the namespace of the current request, and at the end that of the command.
        slot.ns = match request {
            Some(_) => copying.place(),
            None => copying.ns,
        };
        let ns = slot.ns;
        let (begun, to) = (copying.begun, copying.to);
        let with_metadata = copying.carried.is_some();
        let reads = matches!(copying.step, CopyStep::Begin | CopyStep::Read);
        let Some((op, offset, len)) = request else {
            self.end_copy(index, begun..to, result);
            return false;
        };
        if self.copies_by_file(index) {
            return false;
        }
        if reads && self.reads_marked(index, offset, len) {
            return self.next_copy(index);
        }
        if with_metadata {
            match self.prepare_copy(index) {
                Ready::Yes => {}
                Ready::Waits => return true,
                Ready::Changed => return self.next_copy(index),
            }
        }
        let Some(slot) = self.slots.get(index) else {
            self.broken("Copy goes on without its slot");
            return false;
        };
        let RemainingWork::Copy(copying) = &mut slot.work else {
            self.broken("Copy goes on in another command's slot");
            return false;
        };
        let data = copying.data(len);
        let tag = self.slots.tag(index);
        let Some(ns) = self.namespaces.get_mut(ns) else {
            self.broken("a slot's namespace is not there");
            return false;
        };
        if let Some(mut completion) = ns.queue.submit(Request {
            tag,
            op,
            offset,
            len,
            data,
        }) && !self.waits_for_table(index, &mut completion)
        {
            self.complete_copy(index, completion, true);
        }
        false
    }

    /// Starts a copy of the next range by the file system, if possible. Returns whether it was
    /// started.
    fn copies_by_file(&mut self, index: u16) -> bool {
        let tag = self.slots.tag(index);
        let Some(slot) = self.slots.get(index) else {
            return false;
        };
        let RemainingWork::Copy(copying) = &mut slot.work else {
            return false;
        };
        if !matches!(copying.step, CopyStep::Begin) {
            return false;
        }
        copying.step = CopyStep::Read;
        // The file system would not copy the metadata.
        if copying.carried.is_some() {
            return false;
        }
        let Some(&Source {
            ns: from,
            from: offset,
            left,
            ..
        }) = copying.sources.last()
        else {
            return false;
        };
        let (ns, to, fua) = (copying.ns, copying.to, copying.fua);
        let Some(namespace) = self.namespaces.get_mut(from) else {
            return false;
        };
        let shift = namespace.shift;
        let Some(source) = namespace.queue.copy_source(offset, left) else {
            return false;
        };
        // Blocks before a marked block are copied piece by piece.
        if self
            .namespaces
            .marked(from, offset >> shift, left >> shift)
            .is_some()
        {
            return false;
        }
        let copy = CopyRequest {
            tag,
            source,
            offset: to,
            fua,
        };
        let namespace = self.namespaces.get_mut(ns);
        if !namespace.is_some_and(|namespace| namespace.queue.copy(copy)) {
            return false;
        }
        if let Some(slot) = self.slots.get(index)
            && let RemainingWork::Copy(copying) = &mut slot.work
        {
            copying.step = CopyStep::File;
            slot.ns = ns;
        }
        true
    }

    /// Fails the command if the next piece contains a marked block, which cannot be read. Returns
    /// whether it failed.
    fn reads_marked(&mut self, index: u16, offset: u64, len: u64) -> bool {
        let Some(slot) = self.slots.get(index) else {
            return false;
        };
        let ns = slot.ns;
        let Some(namespace) = self.namespaces.get(ns) else {
            return false;
        };
        let (shift, nsid) = (namespace.shift, namespace.config.nsid);
        let Some(lba) = self.namespaces.marked(ns, offset >> shift, len >> shift) else {
            return false;
        };
        if let Some(slot) = self.slots.get(index) {
            slot.status = Status::UNRECOVERED_READ_ERROR;
            (slot.nsid, slot.slba) = (nsid, lba);
        }
        true
    }

    /// Ends the command. The bytes `written` at the destination were written, even if the command
    /// failed after them.
    fn end_copy(&mut self, index: u16, written: Range<u64>, result: u32) {
        let Some((shift, _)) = self.namespace_of(index) else {
            return self.end(index);
        };
        let blocks = (written.end - written.start) >> shift;
        self.end_written(index, &[(written.start >> shift, blocks)], result);
    }

    /// Handles the completion of a request. If the volume has completed it within the call, the
    /// next request is made when the round's budget permits.
    pub(super) fn complete_copy(
        &mut self,
        index: u16,
        mut completion: volume::Completion,
        within: bool,
    ) {
        if completion.result.is_ok() || self.is_settling(index) && !is_aborted(&completion) {
            // Unreadable data cannot settle its metadata, and is overwritten anyway.
            let mut none = SegmentList::new();
            let read = completion.result.is_ok();
            self.carry(
                index,
                if read {
                    &mut completion.data
                } else {
                    &mut none
                },
            );
            completion.result = Ok(());
        }
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Copy goes on without its slot");
        };
        let RemainingWork::Copy(copying) = &mut slot.work else {
            return self.broken("Copy goes on in another command's slot");
        };
        let writes = matches!(copying.step, CopyStep::Write(_) | CopyStep::File);
        match completion.result {
            // The check of the data's tags has failed.
            Ok(()) if !slot.status.is_success() => {}
            Ok(()) => copying.advance(completion.data),
            // The range is copied by reads and writes instead. If that fails, too, the command ends
            // with its error.
            Err(error) if copying.is_with_file() && may_be_repeated(error) => {
                copying.step = CopyStep::Read;
            }
            Err(error) => {
                slot.status = match error.kind {
                    // The status is the one of an interrupted plain command.
                    IoErrorKind::Aborted if self.bus_master.ends_commands && !slot.abort => {
                        Status::COMMAND_INTERRUPTED
                    }
                    _ => status_of(error, writes),
                };
            }
        }
        let goes_on = slot.status.is_success() && slot.copying().is_some();
        if within && goes_on {
            self.slots.parked.push_front(index);
            return;
        }
        if goes_on {
            self.end_early(index);
        }
        if self.next_copy(index) {
            self.slots.parked.push_back(index);
        }
    }

    /// Returns whether the current request reads the destination to determine which metadata of its
    /// blocks is valid.
    fn is_settling(&mut self, index: u16) -> bool {
        let slot = self.slots.get(index);
        slot.is_some_and(|slot| match &slot.work {
            RemainingWork::Copy(copying) => matches!(copying.step, CopyStep::Settle(_)),
            _ => false,
        })
    }

    /// Returns the cost of the next request in a round's budget, in addition to that of any
    /// request; 0 when none is left.
    pub(super) fn units_of_copy(&mut self, index: u16) -> u32 {
        let request = self.slots.get(index).and_then(|slot| slot.copying());
        Budget::units_of(request.map_or(0, |(_, _, len)| len), 0)
    }
}
