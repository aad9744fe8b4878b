//! Descriptors of a Copy command ("NVM Command Set 1.1", 3.3.2). Each one is read and checked here
//! before anything is copied.

use super::Execution;
use super::copy::{CROSS_FORMATS, CopyLimits, RANGES, Source};
use super::copy_metadata::{self, CopyMetadata, SourceDescriptor};
use dma::{Access, SegmentList};
use nvme::cmd::io::{CopyCdw12, CopyRange, CopyRangeLong};
use nvme::{Command, Status};

/// Size in bytes of a short descriptor (formats 0h and 2h) and of a long one (formats 1h and 3h).
const SHORT_DESCRIPTOR_SIZE: usize = size_of::<CopyRange>();
const LONG_DESCRIPTOR_SIZE: usize = size_of::<CopyRangeLong>();

/// Source ranges of a Copy command, and their total number of blocks, after validation.
pub(super) struct CopySources {
    pub sources: Vec<Source>,
    pub blocks: u64,
}

impl Execution<'_> {
    /// Reads and checks the descriptors of a command that writes to the namespace at index `to`.
    pub(super) fn ranges(&self, command: &Command, to: usize) -> Result<CopySources, Status> {
        let cdw12 = CopyCdw12::from_bits(command.cdw12.get());
        let format = cdw12.cdfe();
        let (long, cross) = (format & 1 != 0, CROSS_FORMATS & 1 << format != 0);
        let ns = self.namespaces.get(to).ok_or(Status::INTERNAL_ERROR)?;
        let layout = self.namespaces.layout_of(to);
        let invalid = Status::INVALID_FORMAT.with_dnr(true);
        if !cross && !copy_metadata::describes(long, layout.as_ref(), layout.as_ref()) {
            return Err(invalid);
        }
        let too_large = Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr(true);
        let count = usize::from(cdw12.nr());
        let descriptor = if long {
            LONG_DESCRIPTOR_SIZE
        } else {
            SHORT_DESCRIPTOR_SIZE
        };
        let mut bytes = [0u8; RANGES * LONG_DESCRIPTOR_SIZE];
        let bytes = bytes.get_mut(..count * descriptor);
        let bytes = bytes.filter(|_| count <= RANGES).ok_or(too_large)?;
        let mut list = SegmentList::new();
        self.walk(command, bytes.len() as u64, Access::Read, &mut list)?;
        list.copy_to(0, bytes);
        let (shift, limits) = (ns.shift, CopyLimits::new(ns.shift));
        let (mut sources, mut all) = (Vec::with_capacity(count), 0u64);
        for raw in bytes.chunks_exact(descriptor) {
            let range = if long {
                SourceDescriptor::long(raw)
            } else {
                SourceDescriptor::short(raw)
            };
            let range = range.ok_or(Status::INTERNAL_ERROR)?;
            all += range.blocks;
            if range.blocks > limits.range.into() || all > limits.command.into() {
                return Err(too_large);
            }
            let from = if cross { self.source(&range, to)? } else { to };
            let source = self.namespaces.get(from).ok_or(Status::INTERNAL_ERROR)?;
            let from_layout = self.namespaces.layout_of(from);
            let (here, there) = (from_layout.as_ref(), layout.as_ref());
            if !copy_metadata::describes(long, here, there) {
                return Err(invalid);
            }
            copy_metadata::may_go(here, there, from == to, cdw12)?;
            if !source.covers(range.slba, range.blocks) {
                return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
            }
            let known = from_layout.filter(|_| !self.slots.is_reserved());
            sources.push(Source {
                ns: from,
                from: range.slba << shift,
                left: range.blocks << shift,
                tags: copy_metadata::tags_read(known.as_ref(), &range, cdw12.prinfor())?,
                layout: from_layout,
            });
        }
        Ok(CopySources {
            sources,
            blocks: all,
        })
    }

    /// Returns the metadata state that a Copy command needs; `None` if none of its namespaces has
    /// metadata.
    pub(super) fn carried(
        &self,
        command: &Command,
        sources: &[Source],
        to: usize,
    ) -> Result<Option<CopyMetadata>, Status> {
        let layout = self.namespaces.layout_of(to);
        let ns = self.namespaces.get(to).ok_or(Status::INTERNAL_ERROR)?;
        if layout.is_none() && sources.iter().all(|source| source.layout.is_none()) {
            return Ok(None);
        }
        // The record of an inherited command does not contain all of its fields.
        if self.slots.is_reserved() {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        let cdw12 = CopyCdw12::from_bits(command.cdw12.get());
        Ok(Some(CopyMetadata {
            prinfor: cdw12.prinfor(),
            prinfow: cdw12.prinfow(),
            stcr: cdw12.stcr(),
            stcw: cdw12.stcw(),
            tags: copy_metadata::tags_written(layout.as_ref(), command)?,
            shift: ns.shift,
            layout,
            held: false,
            settled: false,
        }))
    }

    /// Returns the index of the namespace of a source range, which may differ from the command's.
    fn source(&self, range: &SourceDescriptor, to: usize) -> Result<usize, Status> {
        if range.sopt & CopyRange::FAST_COPY_ONLY != 0 {
            return Err(Status::FAST_COPY_NOT_POSSIBLE.with_dnr(true));
        }
        let nsid = range.snsid;
        let index = self.namespaces.index_of(nsid)?;
        if index == to {
            return Ok(to);
        }
        if let Some(status) = self.namespaces.barred_source(nsid) {
            return Err(status);
        }
        let ns = |index: usize| self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR);
        let (source, to) = (ns(index)?, ns(to)?);
        if source.shift == to.shift && !source.is_zoned() {
            Ok(index)
        } else {
            Err(Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT.with_dnr(true))
        }
    }
}
