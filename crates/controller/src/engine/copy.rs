//! Copy ("NVM Command Set 1.1", 3.3.2), within a namespace, and from other namespaces of the
//! controller.
//!
//! Descriptors of formats 2h and 3h name the namespace of each source. Hosts use them after they
//! have enabled them (Host Behavior Support, CDFE). Formats 1h and 3h are for guards of 32 and 64
//! bits, with longer tags. [`copy_metadata`](super::copy_metadata) covers the copy of blocks with
//! metadata.
//!
//! When a range and its destination both lie in files, the file system may copy it, if the user
//! enabled that ([`volume::FastPath::copy`]). Data that the file system does not copy, for
//! whatever reason, is copied here, so that the outcome is the same.
//!
//! Copying here goes through memory of this process a piece at a time, by a read and then a
//! write: a command has at most one outstanding request. When the volume completes a request
//! within the call, the command is parked, as a command with many ranges is. A process that
//! follows one that died in the middle restarts the command from its beginning: sources and
//! destination do not overlap, so copying a part twice changes nothing.

use super::Engine;
use super::complete::status_of;
use super::copy_metadata::{self, Carried, Ready};
use super::metadata::{Held, is_aborted};
use super::slots::{Kind, Slot, Work};
use dma::{Buffer, SegmentList};
use nvme::cmd::io::{CopyCdw12, DirectiveType};
use nvme::{Command, Status};
use placement::Writer;
use protection::{Layout, Tags};
use std::ops::Range;
use volume::{Budget, CopyRequest, IoError, IoErrorKind, Op, Request};

/// Maximum size of a piece, in bytes.
const PIECE: u64 = 256 << 10;
/// Maximum number of bytes of a command, and of a range.
const MOST: u64 = 64 << 20;
/// Maximum number of ranges of a command: their descriptors fill a page, or little more.
pub(super) const RANGES: usize = 128;

/// Formats 0h and 1h: descriptors without the namespace of a source.
const PLAIN_FORMATS: u16 = 1 << 0 | 1 << 1;
/// Formats 2h and 3h: descriptors with the namespace of a source, which hosts enable first
/// (CDFE).
pub(crate) const CROSS_FORMATS: u16 = 1 << 2 | 1 << 3;
/// Supported descriptor formats, as the bits of CDFS in Identify Controller.
pub(crate) const FORMATS: u16 = PLAIN_FORMATS | CROSS_FORMATS;

/// Copy limits of a namespace as reported by Identify Namespace, in blocks.
pub(crate) struct Limits {
    /// Maximum blocks of a range (MSSRL).
    pub range: u16,
    /// Maximum blocks of a command (MCL).
    pub command: u32,
    /// Maximum number of ranges (MSRC), zero-based.
    pub ranges_z: u8,
}

impl Limits {
    /// Returns the limits of a namespace with blocks of that size.
    pub(crate) const fn new(shift: u32) -> Self {
        let blocks = MOST >> shift;
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
    /// Ranges that remain to be copied, the first one last.
    pub sources: Vec<Source>,
    /// Number of ranges of the command.
    count: usize,
    /// Index of the destination namespace.
    pub ns: usize,
    /// Byte offset of the first piece at the destination.
    begun: u64,
    /// Byte offset of the next piece at the destination.
    pub to: u64,
    fua: bool,
    pub step: Step,
    /// Metadata state, if one of the namespaces has metadata.
    pub carried: Option<Carried>,
    /// Metadata for the piece that was read last, to be written with it.
    pub passed: Vec<u8>,
}

/// A source range of a Copy command.
pub(super) struct Source {
    /// Index of the source namespace.
    pub ns: usize,
    /// Byte offset of the next block to copy.
    pub from: u64,
    /// Bytes left to copy.
    pub left: u64,
    /// Expected tags of the next block, if it has protection information.
    pub tags: Tags,
    /// Metadata layout of the source, if it has metadata.
    pub layout: Option<Layout>,
}

pub(super) enum Step {
    /// A range begins: the file system may copy it.
    Begin,
    /// The file system copies the range.
    File,
    Read,
    /// A piece has been read and is to be written.
    Write(Piece),
    /// A piece has been read; the blocks at the destination are read first, to determine their
    /// metadata.
    Settle(Piece),
}

/// A piece that was read.
#[derive(Default)]
pub(super) struct Piece {
    pub data: SegmentList,
    /// Metadata for its blocks at the destination.
    pub metadata: Vec<u8>,
}

impl Copying {
    /// Returns operation, byte offset and length of the next request.
    fn request(&self) -> Option<(Op, u64, u64)> {
        let source = self.sources.last()?;
        let len = source.left.min(PIECE);
        Some(match &self.step {
            Step::File => (Op::Write { fua: self.fua }, self.to, source.left),
            Step::Begin | Step::Read => (Op::Read, source.from, len),
            Step::Settle(_) => (Op::Read, self.to, len),
            Step::Write(_) => (Op::Write { fua: self.fua }, self.to, len),
        })
    }

    /// Returns the index of the namespace that the next request is for.
    fn place(&self) -> usize {
        match (&self.step, self.sources.last()) {
            (Step::Begin | Step::Read, Some(source)) => source.ns,
            _ => self.ns,
        }
    }

    /// Returns whether the command still has to read or write the namespace of this index.
    pub(super) fn touches(&self, ns: usize) -> bool {
        self.ns == ns || self.sources.iter().any(|source| source.ns == ns)
    }

    /// Returns the blocks of the current request, of a command with metadata.
    pub(super) fn blocks(&self) -> Option<Held> {
        let shift = self.carried.as_ref()?.shift;
        let (_, offset, len) = self.request()?;
        Some(Held {
            slba: offset >> shift,
            blocks: len >> shift,
            changes: matches!(self.step, Step::Write(_) | Step::Settle(_)),
        })
    }

    /// Returns the blocks whose metadata the command holds, in the namespace of this index.
    pub(super) fn held(&self, ns: usize) -> Option<Held> {
        let held = self.carried.as_ref().is_some_and(|carried| carried.held);
        (held && self.place() == ns).then(|| self.blocks())?
    }

    /// Returns whether the current request is the last of the command, so that its completion
    /// makes the copied data durable.
    pub(super) fn makes_durable(&self) -> bool {
        let last = matches!(&self.sources[..], [source] if source.left <= PIECE);
        self.carried.is_some() && self.fua && last && matches!(self.step, Step::Write(_))
    }

    /// Returns the data buffer for the request, taken from the step.
    fn data(&mut self, len: u64) -> SegmentList {
        match &mut self.step {
            Step::Write(piece) => std::mem::take(&mut piece.data),
            _ => SegmentList::owned(Buffer::new(len as usize)),
        }
    }

    /// Returns whether the file system is copying a range.
    pub(super) fn is_with_file(&self) -> bool {
        matches!(self.step, Step::File)
    }

    /// Advances after a request has completed.
    fn advance(&mut self, data: SegmentList) {
        match &mut self.step {
            Step::Read => {
                let metadata = std::mem::take(&mut self.passed);
                self.step = Step::Write(Piece { data, metadata });
                return;
            }
            Step::Settle(piece) => {
                self.step = Step::Write(std::mem::take(piece));
                self.carried.iter_mut().for_each(|c| c.settled = true);
                return;
            }
            _ => {}
        }
        let whole = self.is_with_file();
        self.step = Step::Read;
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
            self.step = Step::Begin;
        }
    }

    /// Returns dword 0 of the completion of a failed command: the first range that was not
    /// copied.
    pub(super) fn result(&self) -> u32 {
        (self.count - self.sources.len()) as u32
    }
}

/// Returns whether a failed copy by the file system may be repeated by read and write, with the
/// outcome of a command for which the file system was not asked.
fn may_be_repeated(error: IoError) -> bool {
    !matches!(
        error.kind,
        IoErrorKind::NotDurable | IoErrorKind::Aborted | IoErrorKind::Gone
    )
}

impl Slot {
    /// Returns the current volume request of a Copy command.
    pub(super) fn copying(&self) -> Option<(Op, u64, u64)> {
        match &self.work {
            Work::Copy(copying) => copying.request(),
            _ => None,
        }
    }
}

impl Engine {
    pub(super) fn copy(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw12 = CopyCdw12::from_bits(command.cdw12.get());
        let index = self.namespace_index(command.nsid.get())?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        if ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let format = cdw12.cdfe();
        let offered = PLAIN_FORMATS | self.copy_formats & CROSS_FORMATS;
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
        let mut memory = largest.unwrap_or(0).min(PIECE);
        if let Some(layout) = carried.as_ref().and_then(|carried| carried.layout) {
            // Metadata of a piece, and the previous content of the destination.
            memory = 2 * memory + (memory >> shift) * u64::from(layout.metadata);
        }
        let fua = cdw12.fua() || !self.write_cache;
        let ns = index;
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, ns)?;
        self.scratch.reserve(memory)?;
        let dtype = DirectiveType(cdw12.dtype());
        self.place(ns, command, dtype, all, Writer::Controller, again)?;
        sources.reverse();
        let waits = carried.is_some() && !self.parked.is_empty();
        if let Some(slot) = self.slots.get(index) {
            slot.scratch = memory;
            slot.slba = to;
            slot.kind = Kind::Other;
            slot.work = Work::Copy(Box::new(Copying {
                count: sources.len(),
                sources: std::mem::take(sources),
                ns,
                begun: start,
                to: start,
                fua,
                step: Step::Begin,
                carried,
                passed: Vec::new(),
            }));
        }
        // Parked commands have their turn first.
        if waits || self.next_copy(index) {
            self.parked.push_back(index);
        }
        Ok(())
    }

    /// Gives the volume the next request. Returns `true` when the command has to wait for others
    /// first; it has its turn in a later round.
    #[must_use]
    pub(super) fn next_copy(&mut self, index: u16) -> bool {
        let Some(slot) = self.slots.get(index) else {
            self.broken("Copy goes on without its slot");
            return false;
        };
        let failed = !slot.status.is_success();
        let Work::Copy(copying) = &mut slot.work else {
            self.broken("Copy goes on in another command's slot");
            return false;
        };
        let result = if failed { copying.result() } else { 0 };
        let request = copying.request().filter(|_| !failed);
        // The slot names the namespace of the current request; at the end, the command's own
        // namespace.
        slot.ns = match request {
            Some(_) => copying.place(),
            None => copying.ns,
        };
        let ns = slot.ns;
        let (begun, to) = (copying.begun, copying.to);
        let with_metadata = copying.carried.is_some();
        let reads = matches!(copying.step, Step::Begin | Step::Read);
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
        let Work::Copy(copying) = &mut slot.work else {
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

    /// Lets the file system copy a range that begins. Returns whether it does.
    fn copies_by_file(&mut self, index: u16) -> bool {
        let tag = self.slots.tag(index);
        let Some(slot) = self.slots.get(index) else {
            return false;
        };
        let Work::Copy(copying) = &mut slot.work else {
            return false;
        };
        if !matches!(copying.step, Step::Begin) {
            return false;
        }
        copying.step = Step::Read;
        // A copy by the file system does not carry metadata.
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
        // Blocks before a marked one are copied by pieces.
        if self.marked(from, offset >> shift, left >> shift).is_some() {
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
            && let Work::Copy(copying) = &mut slot.work
        {
            copying.step = Step::File;
            slot.ns = ns;
        }
        true
    }

    /// Fails the command if the next piece has a marked block, which cannot be read.
    fn reads_marked(&mut self, index: u16, offset: u64, len: u64) -> bool {
        let Some(slot) = self.slots.get(index) else {
            return false;
        };
        let ns = slot.ns;
        let Some(namespace) = self.namespaces.get(ns) else {
            return false;
        };
        let (shift, nsid) = (namespace.shift, namespace.config.nsid);
        let Some(lba) = self.marked(ns, offset >> shift, len >> shift) else {
            return false;
        };
        if let Some(slot) = self.slots.get(index) {
            slot.status = Status::UNRECOVERED_READ_ERROR;
            (slot.nsid, slot.slba) = (nsid, lba);
        }
        true
    }

    /// Ends the command; bytes of this range were written, though it may have failed behind them.
    fn end_copy(&mut self, index: u16, written: Range<u64>, result: u32) {
        let ns = self.slots.get(index).map(|slot| slot.ns);
        let ns = ns.and_then(|ns| self.namespaces.get(ns));
        let shift = ns.map_or(0, |ns| ns.shift);
        let blocks = (written.end - written.start) >> shift;
        self.end_written(index, &[(written.start >> shift, blocks)], result);
    }

    /// Handles the completion of a request. If the volume completed it within the call, the next
    /// request is made when the budget allows it.
    pub(super) fn complete_copy(
        &mut self,
        index: u16,
        mut completion: volume::Completion,
        within: bool,
    ) {
        if completion.result.is_ok() || self.is_settling(index) && !is_aborted(&completion) {
            // Data that cannot be read settles no metadata, and is overwritten anyway.
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
        let Work::Copy(copying) = &mut slot.work else {
            return self.broken("Copy goes on in another command's slot");
        };
        let writes = matches!(copying.step, Step::Write(_) | Step::File);
        match completion.result {
            // A tag of the data that was read is wrong.
            Ok(()) if !slot.status.is_success() => {}
            Ok(()) => copying.advance(completion.data),
            // The range is read and written instead. If that fails, too, its error is the
            // command's.
            Err(error) if copying.is_with_file() && may_be_repeated(error) => {
                copying.step = Step::Read;
            }
            Err(error) => {
                slot.status = match error.kind {
                    // The status is that of a plain command.
                    IoErrorKind::Aborted if self.interrupting && !slot.abort => {
                        Status::COMMAND_INTERRUPTED
                    }
                    _ => status_of(error, writes),
                };
            }
        }
        let goes_on = slot.status.is_success() && slot.copying().is_some();
        if within && goes_on {
            self.parked.push_front(index);
            return;
        }
        if goes_on {
            self.end_early(index);
        }
        if self.next_copy(index) {
            self.parked.push_back(index);
        }
    }

    /// Returns whether the current request reads the destination to determine its blocks'
    /// metadata.
    fn is_settling(&mut self, index: u16) -> bool {
        let slot = self.slots.get(index);
        slot.is_some_and(|slot| match &slot.work {
            Work::Copy(copying) => matches!(copying.step, Step::Settle(_)),
            _ => false,
        })
    }

    /// Returns the cost of the next request in a round's budget, beyond that of any request.
    pub(super) fn units_of_copy(&mut self, index: u16) -> u32 {
        let request = self.slots.get(index).and_then(|slot| slot.copying());
        Budget::units_of(request.map_or(0, |(_, _, len)| len), 0)
    }
}
