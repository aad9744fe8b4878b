//! Copy ("NVM Command Set 1.1", 3.3.2), within a namespace, and from others of the controller to
//! it.
//!
//! Descriptors of format 2h name the namespace of each source. Hosts use them when they have said
//! so (Host Behavior Support, CDFE). Formats 1h and 3h are of namespaces with protection
//! information, which have no Copy.
//!
//! A range that lies in files, as its destination does, may be copied by the file system, where
//! the user wants that ([`volume::FastPath::copy`]). What it does not copy, whatever its reason is,
//! is copied here, so that a command ends as it would without.
//!
//! What is copied here goes through memory of this process a piece at a time, read and then
//! written: a command has one request out at most. Where the volume is done with one within the
//! call, the command is parked, as one of many ranges is. The process that follows one that died in
//! the middle starts the command from its beginning: sources and destination do not overlap, so
//! that copying a part twice changes nothing.

use super::Engine;
use super::complete::status_of;
use super::slots::{Kind, Slot, Work};
use dma::{Access, Buffer, SegmentList};
use nvme::cmd::io::{CopyCdw12, CopyRange, DirectiveType};
use nvme::{Command, Status};
use placement::Writer;
use std::ops::Range;
use volume::{Budget, CopyRequest, IoError, IoErrorKind, Op, Request};
use zerocopy::FromBytes;

/// Bytes that are on their way at one time.
const PIECE: u64 = 256 << 10;
/// Bytes of a command, and of a range, at most.
const MOST: u64 = 64 << 20;
/// Ranges of a command at most: their descriptors are a page.
const RANGES: usize = 128;
const DESCRIPTOR: usize = size_of::<CopyRange>();

/// Descriptors without the namespace of a source.
const PLAIN: u8 = 0;
/// Descriptors with it.
const CROSS: u8 = 2;
/// Formats of descriptors, as bits: what Identify Controller says (CDFS).
pub(crate) const FORMATS: u16 = 1 << PLAIN | CROSS_FORMATS;
/// Those that hosts say they use before they do (CDFE).
pub(crate) const CROSS_FORMATS: u16 = 1 << CROSS;

/// What Identify Namespace says of its sizes, in blocks.
pub(crate) struct Limits {
    /// MSSRL.
    pub range: u16,
    /// MCL.
    pub command: u32,
    /// MSRC, zero-based.
    pub ranges_z: u8,
}

impl Limits {
    /// Of a namespace with blocks of that size.
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

/// How far a Copy command is.
pub(super) struct Copying {
    /// What has not been copied, the first range last.
    sources: Vec<Source>,
    /// Ranges of the command.
    count: usize,
    /// Index of the namespace that is written.
    ns: usize,
    /// Byte offset of where the first piece went.
    begun: u64,
    /// Byte offset of where the next piece goes.
    to: u64,
    fua: bool,
    step: Step,
}

/// A range that is copied.
struct Source {
    /// Index of its namespace.
    ns: usize,
    /// Byte offset of what is not copied yet.
    from: u64,
    /// Bytes of it.
    left: u64,
}

enum Step {
    /// A range begins: the file system may copy it.
    Begin,
    /// It does.
    File,
    Read,
    /// This has been read.
    Write(SegmentList),
}

impl Copying {
    /// The next request: what it does, where, and with so many bytes.
    fn request(&self) -> Option<(Op, u64, u64)> {
        let source = self.sources.last()?;
        let len = source.left.min(PIECE);
        Some(match &self.step {
            Step::File => (Op::Write { fua: self.fua }, self.to, source.left),
            Step::Begin | Step::Read => (Op::Read, source.from, len),
            Step::Write(_) => (Op::Write { fua: self.fua }, self.to, len),
        })
    }

    /// Index of the namespace that the next request is for.
    fn place(&self) -> usize {
        match (&self.step, self.sources.last()) {
            (Step::Begin | Step::Read, Some(source)) => source.ns,
            _ => self.ns,
        }
    }

    /// It has yet to read or write the namespace of this index.
    pub(super) fn touches(&self, ns: usize) -> bool {
        self.ns == ns || self.sources.iter().any(|source| source.ns == ns)
    }

    /// Its data, which goes with it.
    fn data(&mut self, len: u64) -> SegmentList {
        match &mut self.step {
            Step::Write(data) => std::mem::take(data),
            _ => SegmentList::owned(Buffer::new(len as usize)),
        }
    }

    /// The file system is at a range.
    pub(super) fn is_with_file(&self) -> bool {
        matches!(self.step, Step::File)
    }

    /// A request is done.
    fn advance(&mut self, data: SegmentList) {
        if matches!(self.step, Step::Read) {
            self.step = Step::Write(data);
            return;
        }
        let whole = self.is_with_file();
        self.step = Step::Read;
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
        if source.left == 0 {
            self.sources.pop();
            self.step = Step::Begin;
        }
    }

    /// Dword 0 of the completion of a command that failed: the first range that was not copied.
    pub(super) fn result(&self) -> u32 {
        (self.count - self.sources.len()) as u32
    }
}

/// What the file system has not copied may be read and written, and the outcome is that of a
/// command for which it was not asked.
fn may_be_repeated(error: IoError) -> bool {
    !matches!(
        error.kind,
        IoErrorKind::NotDurable | IoErrorKind::Aborted | IoErrorKind::Gone
    )
}

impl Slot {
    /// What is with the volume, of a Copy command.
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
        if format != PLAIN && self.copy_formats & CROSS_FORMATS & 1 << format == 0 {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let too_large = Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr(true);
        let count = usize::from(cdw12.nr());
        let mut bytes = [0u8; RANGES * DESCRIPTOR];
        let bytes = bytes.get_mut(..count * DESCRIPTOR).ok_or(too_large)?;
        let mut list = SegmentList::new();
        self.walk(command, bytes.len() as u64, Access::Read, &mut list)?;
        list.copy_to(0, bytes);
        drop(list);
        let (shift, limits) = (ns.shift, Limits::new(ns.shift));
        let (mut sources, mut all) = (Vec::with_capacity(count), 0u64);
        for raw in bytes.chunks_exact(DESCRIPTOR) {
            let range = CopyRange::read_from_bytes(raw).map_err(|_| Status::INTERNAL_ERROR)?;
            let (slba, blocks) = (range.slba.get(), u64::from(range.nlb_z.get()) + 1);
            all += blocks;
            if blocks > limits.range.into() || all > limits.command.into() {
                return Err(too_large);
            }
            let from = match format {
                CROSS => self.source(&range, index)?,
                _ => index,
            };
            let source = self.namespaces.get(from).ok_or(Status::INTERNAL_ERROR)?;
            if !source.covers(slba, blocks) {
                return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
            }
            sources.push(Source {
                ns: from,
                from: slba << shift,
                left: blocks << shift,
            });
        }
        let to = command.slba();
        if !ns.covers(to, all) {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
        }
        let (start, end) = (to << shift, (to + all) << shift);
        if sources
            .iter()
            .any(|s| s.ns == index && s.from < end && start < s.from + s.left)
        {
            return Err(Status::OVERLAPPING_IO_RANGE.with_dnr(true));
        }
        let largest = sources.iter().map(|source| source.left).max();
        let memory = largest.unwrap_or(0).min(PIECE);
        let fua = cdw12.fua() || !self.write_cache;
        let ns = index;
        let again = self.slots.is_reserved();
        let index = self.slot_for(sqid, command, ns)?;
        self.scratch.reserve(memory)?;
        let dtype = DirectiveType(cdw12.dtype());
        self.place(ns, command, dtype, all, Writer::Controller, again)?;
        sources.reverse();
        if let Some(slot) = self.slots.get(index) {
            slot.scratch = memory;
            slot.slba = to;
            slot.kind = Kind::Other;
            slot.work = Work::Copy(Box::new(Copying {
                sources,
                count,
                ns,
                begun: start,
                to: start,
                fua,
                step: Step::Begin,
            }));
        }
        self.next_copy(index);
        Ok(())
    }

    /// Index of the namespace of a range, which may be another one than the command's.
    fn source(&self, range: &CopyRange, to: usize) -> Result<usize, Status> {
        if range.sopt.get() & CopyRange::FAST_COPY_ONLY != 0 {
            return Err(Status::FAST_COPY_NOT_POSSIBLE.with_dnr(true));
        }
        let nsid = range.snsid.get();
        let index = self.namespace_index(nsid)?;
        if index == to {
            return Ok(to);
        }
        if let Some(status) = self.barred_source(nsid) {
            return Err(status);
        }
        let ns = |index: usize| self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR);
        let (source, to) = (ns(index)?, ns(to)?);
        match source.shift == to.shift && !source.is_fixed() {
            true => Ok(index),
            false => Err(Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT.with_dnr(true)),
        }
    }

    /// Gives the volume the next request.
    pub(super) fn next_copy(&mut self, index: u16) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Copy goes on without its slot");
        };
        let failed = !slot.status.is_success();
        let Work::Copy(copying) = &mut slot.work else {
            return self.broken("Copy goes on in another command's slot");
        };
        let result = if failed { copying.result() } else { 0 };
        let request = copying.request().filter(|_| !failed);
        // What is done about it meanwhile is done there; at the end it is the command's own.
        slot.ns = match request {
            Some(_) => copying.place(),
            None => copying.ns,
        };
        let ns = slot.ns;
        let (begun, to) = (copying.begun, copying.to);
        let Some((op, offset, len)) = request else {
            return self.end_copy(index, begun..to, result);
        };
        if self.copies_by_file(index) {
            return;
        }
        if op == Op::Read && self.reads_marked(index, offset, len) {
            return self.next_copy(index);
        }
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Copy goes on without its slot");
        };
        let Work::Copy(copying) = &mut slot.work else {
            return self.broken("Copy goes on in another command's slot");
        };
        let data = copying.data(len);
        let tag = self.slots.tag(index);
        let Some(ns) = self.namespaces.get_mut(ns) else {
            return self.broken("a slot's namespace is not there");
        };
        if let Some(completion) = ns.queue.submit(Request {
            tag,
            op,
            offset,
            len,
            data,
        }) {
            self.complete_copy(index, completion, true);
        }
    }

    /// A range begins, and the file system copies it.
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
        let Some(&Source {
            ns: from,
            from: offset,
            left,
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
        // What is before a marked block is copied, and by pieces.
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

    /// The next piece has a block that cannot be read: the command fails, by that block's fault.
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

    /// The command ends; bytes of this range were written, though it may have failed behind them.
    fn end_copy(&mut self, index: u16, written: Range<u64>, result: u32) {
        let ns = self.slots.get(index).map(|slot| slot.ns);
        let ns = ns.and_then(|ns| self.namespaces.get(ns));
        let shift = ns.map_or(0, |ns| ns.shift);
        let blocks = (written.end - written.start) >> shift;
        self.end_written(index, &[(written.start >> shift, blocks)], result);
    }

    /// A request is over. Where that was within the call that gave it to the volume, the next one
    /// has its turn when the budget allows it.
    pub(super) fn complete_copy(
        &mut self,
        index: u16,
        completion: volume::Completion,
        within: bool,
    ) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Copy goes on without its slot");
        };
        let Work::Copy(copying) = &mut slot.work else {
            return self.broken("Copy goes on in another command's slot");
        };
        let writes = matches!(copying.step, Step::Write(_) | Step::File);
        match completion.result {
            Ok(()) => copying.advance(completion.data),
            // It is read and written instead, and if that fails, too, the command fails by it.
            Err(error) if copying.is_with_file() && may_be_repeated(error) => {
                copying.step = Step::Read;
            }
            Err(error) => {
                slot.status = match error.kind {
                    // As of a plain command.
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
        self.next_copy(index);
    }

    /// What the next request counts in a round's budget, beside being one.
    pub(super) fn units_of_copy(&mut self, index: u16) -> u32 {
        let request = self.slots.get(index).and_then(|slot| slot.copying());
        Budget::units_of(request.map_or(0, |(_, _, len)| len), 0)
    }
}
