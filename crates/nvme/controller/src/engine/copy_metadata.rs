//! Copy of blocks with metadata ("NVM Command Set 1.1", 3.3.2 and 5.3.2): metadata is copied with
//! the data, and PRINFOR and PRINFOW are applied to protection information.
//!
//! *Reading a piece.* The piece is checked against the tags of its range. The destination metadata
//! of all its blocks is generated or checked before any is stored, so a piece is written completely
//! or not at all. *Writing a piece.* Like a write command ([`metadata`](super::metadata)), it
//! stores metadata in the file before the volume gets the data.
//!
//! *Concurrency.* The command reserves the source blocks of a piece for the read, and the
//! destination blocks for the write. A request for blocks in use waits. No blocks are reserved
//! between the two, which rules out deadlocks.
//!
//! *Restart.* Records do not contain the command's tags. The next process therefore ends the
//! command with Command Interrupted, and the host sends it again.

use super::Execution;
use super::copy::{CopyPiece, CopyStep};
use super::metadata::{LockedBlocks, cannot_check, checks, mismatch};
use super::slots::RemainingWork;
use crate::metadata::{MetadataState, StoredMetadata};
use dma::SegmentList;
use nvme::cmd::io::{CopyCdw12, CopyRange, CopyRangeLong, Prinfo};
use nvme::{Command, Status};
use protection::{Guard, Layout, Tags, table};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Maximum metadata size of a block in bytes, for buffers of one block's metadata.
const MAX_METADATA_SIZE: usize = 64;

/// State of a Copy command for blocks with metadata.
pub(super) struct CopyMetadata {
    pub prinfor: Prinfo,
    pub prinfow: Prinfo,
    /// Whether storage tags are checked: in blocks read (`stcr`), and in blocks written (`stcw`).
    pub stcr: bool,
    pub stcw: bool,
    /// Protection information tags that the next destination block gets.
    pub tags: Tags,
    /// Metadata layout of the destination namespace; `None` without metadata.
    pub layout: Option<Layout>,
    /// Data size of a block, as a power of two in bytes.
    pub shift: u32,
    /// Whether the blocks of the current request are reserved for this command.
    pub held: bool,
    /// Whether the valid metadata of the reserved blocks has been determined.
    pub settled: bool,
}

/// Error of a Copy command, with the block that caused it.
pub(super) struct Fault {
    status: Status,
    /// Whether the block belongs to the destination, not to the source.
    written: bool,
    /// Index of the block within the piece that was read.
    at: u64,
}

/// Source range that a descriptor of any format describes.
pub(super) struct SourceDescriptor {
    pub snsid: u32,
    pub sopt: u16,
    pub slba: u64,
    pub blocks: u64,
    pub tags: Tags,
}

impl SourceDescriptor {
    /// Parses a descriptor of format 0h or 2h (16-bit guard).
    pub fn short(raw: &[u8]) -> Option<Self> {
        let range = CopyRange::read_from_bytes(raw).ok()?;
        Some(Self {
            snsid: range.snsid.get(),
            sopt: range.sopt.get(),
            slba: range.slba.get(),
            blocks: u64::from(range.nlb_z.get()) + 1,
            tags: Tags {
                application: range.elbat.get(),
                mask: range.elbatm.get(),
                block: range.eilbrt.get().into(),
            },
        })
    }

    /// Parses a descriptor of format 1h or 3h (guards of 32 and 64 bits).
    pub fn long(raw: &[u8]) -> Option<Self> {
        let range = CopyRangeLong::read_from_bytes(raw).ok()?;
        let elbt = range.elbt.iter();
        Some(Self {
            snsid: range.snsid.get(),
            sopt: range.sopt.get(),
            slba: range.slba.get(),
            blocks: u64::from(range.nlb_z.get()) + 1,
            tags: Tags {
                application: range.elbat.get(),
                mask: range.elbatm.get(),
                block: elbt.fold(0, |all, byte| all << 8 | u128::from(*byte)),
            },
        })
    }

    /// Returns the tags of the descriptor, limited to the bits that a guard of this size leaves.
    fn tags_for(&self, guard: Guard) -> Tags {
        let all = self.tags.block;
        let dwords = [all >> 64, all >> 32, all].map(|dword| dword as u32);
        let [cdw2, cdw3, cdw14] = dwords;
        Tags {
            block: guard.command_tags(cdw2, cdw3, cdw14),
            ..self.tags
        }
    }
}

/// Returns whether a layout needs descriptors of formats 1h and 3h, which are only for guards of 32
/// and 64 bits; `None` without protection information.
fn is_long(layout: Option<&Layout>) -> Option<bool> {
    let protection = layout?.protection?;
    Some(protection.guard.bits() > 16)
}

/// Returns whether descriptors of this length have the tags for a range: those of the source, or of
/// the destination if the source has none.
pub(super) fn describes(long: bool, from: Option<&Layout>, to: Option<&Layout>) -> bool {
    let needed = is_long(from).or_else(|| is_long(to));
    needed.unwrap_or(false) == long
}

/// Returns whether blocks can be copied between two namespaces ("NVM Command Set 1.1", 5.3.2).
/// Either both have the same format, or the metadata of one consists of protection information
/// only, which is inserted or stripped.
fn goes(from: Option<&Layout>, to: Option<&Layout>, pract: (bool, bool)) -> bool {
    let size = |layout: Option<&Layout>| layout.map_or(0, |layout| layout.metadata);
    let protection = |layout: Option<&Layout>| layout.and_then(|layout| layout.protection);
    let alike = size(from) == size(to) && protection(from) == protection(to);
    let corresponds = |with: Option<&Layout>| with.is_some_and(Layout::is_tuple_only);
    match (protection(from).is_some(), protection(to).is_some()) {
        (false, false) => alike,
        (true, true) => alike && pract.0 == pract.1,
        (false, true) => pract.1 && from.is_none() && corresponds(to),
        (true, false) => pract.0 && to.is_none() && corresponds(from),
    }
}

/// Checks PRINFOR and PRINFOW for a range, within one namespace (`same`) or between two.
///
/// # Errors
/// The status of an invalid combination, or of incompatible formats.
pub(super) fn may_go(
    from: Option<&Layout>,
    to: Option<&Layout>,
    same: bool,
    cdw12: CopyCdw12,
) -> Result<(), Status> {
    let pract = (cdw12.prinfor().pract(), cdw12.prinfow().pract());
    let protected = to.is_some_and(|layout| layout.protection.is_some());
    if same && protected && pract.0 != pract.1 {
        return Err(Status::INVALID_FIELD.with_dnr(true));
    }
    if same || goes(from, to, pract) {
        Ok(())
    } else {
        Err(Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT.with_dnr(true))
    }
}

/// Returns the tags that the first block of a source range is expected to have.
///
/// # Errors
/// The status of protection information that cannot be checked.
pub(super) fn tags_read(
    from: Option<&Layout>,
    range: &SourceDescriptor,
    prinfor: Prinfo,
) -> Result<Tags, Status> {
    let Some(protection) = from.and_then(|layout| layout.protection) else {
        return Ok(range.tags);
    };
    let tags = range.tags_for(protection.guard);
    let fits = protection.is_initial(tags.block, range.slba);
    if cannot_check(&protection, prinfor, fits) {
        Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr(true))
    } else {
        Ok(tags)
    }
}

/// Returns the tags of the first block that the command writes.
///
/// # Errors
/// The status of protection information that cannot be checked.
pub(super) fn tags_written(to: Option<&Layout>, command: &Command) -> Result<Tags, Status> {
    let cdw15 = command.cdw15.get();
    let mut tags = Tags {
        application: cdw15 as u16,
        mask: (cdw15 >> 16) as u16,
        block: 0,
    };
    let Some(protection) = to.and_then(|layout| layout.protection) else {
        return Ok(tags);
    };
    let (cdw2, cdw3) = (command.cdw2.get(), command.cdw3.get());
    tags.block = protection
        .guard
        .command_tags(cdw2, cdw3, command.cdw14.get());
    let prinfow = CopyCdw12::from_bits(command.cdw12.get()).prinfow();
    let fits = protection.is_initial(tags.block, command.slba());
    if cannot_check(&protection, prinfow, fits) {
        Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr(true))
    } else {
        Ok(tags)
    }
}

/// Returns the tags of the block that is `blocks` blocks after the one with `tags`.
pub(super) fn behind(layout: Option<&Layout>, tags: Tags, blocks: u64) -> Tags {
    match layout.and_then(|layout| layout.protection) {
        Some(protection) => Tags {
            block: protection.tags_of(tags.block, blocks),
            ..tags
        },
        None => tags,
    }
}

/// Piece of a Copy command that was read: its data, and access to the metadata of both namespaces.
struct PieceMetadata<'a> {
    carried: &'a CopyMetadata,
    data: &'a [u8],
    from: Option<&'a MetadataState>,
    to: Option<&'a MetadataState>,
    /// LBA of the piece's first block in the source namespace.
    slba: u64,
    /// Protection information tags that the piece's first source block must have.
    tags: Tags,
}

impl PieceMetadata<'_> {
    /// Checks the protection information of all blocks, and returns their metadata for the
    /// destination.
    fn pass(&self) -> Result<Vec<u8>, Fault> {
        let block = 1_usize << self.carried.shift;
        let size = self.to.map_or(0, |to| usize::from(to.layout().metadata));
        let mut all = vec![0; size * (self.data.len() / block)];
        for (data, at) in self.data.chunks_exact(block).zip(0..) {
            let mut read = [0; MAX_METADATA_SIZE];
            self.read(data, at, &mut read)?;
            let begin = size * at as usize;
            let (Some(out), Some(read)) = (all.get_mut(begin..begin + size), read.get(..size))
            else {
                return Err(Fault {
                    status: Status::INTERNAL_ERROR,
                    written: true,
                    at,
                });
            };
            out.copy_from_slice(read);
            self.protect(data, at, out)?;
        }
        Ok(all)
    }

    /// Reads and checks the metadata of one source block.
    fn read(
        &self,
        data: &[u8],
        at: u64,
        metadata: &mut [u8; MAX_METADATA_SIZE],
    ) -> Result<(), Fault> {
        let Some(from) = self.from else {
            return Ok(());
        };
        let layout = from.layout();
        let fault = |status| Fault {
            status,
            written: false,
            at,
        };
        let unreadable = Status::UNRECOVERED_READ_ERROR;
        let metadata = metadata.get_mut(..layout.metadata.into());
        let metadata = metadata.ok_or(fault(Status::INTERNAL_ERROR))?;
        let kept = from.read(self.slba + at, table::checksum(data), metadata);
        let kept = kept.ok_or(fault(unreadable))?;
        if let Some(protection) = &layout.protection {
            let tags = behind(Some(layout), self.tags, at);
            let asked = checks(self.carried.prinfor, self.carried.stcr);
            let checked = protection.check(data, metadata, tags, asked);
            checked.map_err(|error| fault(mismatch(error)))?;
        }
        match kept {
            StoredMetadata::Damaged => Err(fault(unreadable)),
            StoredMetadata::Written | StoredMetadata::Unwritten => Ok(()),
        }
    }

    /// Generates or checks the protection information that a block has at the destination.
    fn protect(&self, data: &[u8], at: u64, metadata: &mut [u8]) -> Result<(), Fault> {
        let layout = self.to.map(MetadataState::layout);
        let Some(protection) = layout.and_then(|layout| layout.protection) else {
            return Ok(());
        };
        let tags = behind(layout, self.carried.tags, at);
        let prinfow = self.carried.prinfow;
        if prinfow.pract() {
            protection.generate(data, metadata, tags);
            return Ok(());
        }
        let asked = checks(prinfow, self.carried.stcw);
        let checked = protection.check(data, metadata, tags, asked);
        checked.map_err(|error| Fault {
            status: mismatch(error),
            written: true,
            at,
        })
    }
}

/// Outcome of locking the blocks of a Copy command's next request.
pub(super) enum Ready {
    Yes,
    /// Other commands use the blocks, so the request has to wait.
    Waits,
    /// The command has failed, or has a different next request now.
    Changed,
}

impl Execution<'_> {
    /// Reserves the blocks of the next request, and stores the metadata of a piece about to be
    /// written.
    pub(super) fn prepare_copy(&mut self, index: u16) -> Ready {
        let Some(slot) = self.slots.get(index) else {
            return Ready::Yes;
        };
        let ns = slot.ns;
        let RemainingWork::Copy(copying) = &slot.work else {
            return Ready::Yes;
        };
        let Some(carried) = &copying.carried else {
            return Ready::Yes;
        };
        let (held, settled) = (carried.held, carried.settled);
        let Some(wanted) = copying.blocks() else {
            return Ready::Yes;
        };
        let Some(state) = self.namespaces.metadata_of(ns) else {
            return Ready::Yes;
        };
        if !held
            && self
                .slots
                .any_metadata(ns, |other| wanted.conflicts(&other))
        {
            return Ready::Waits;
        }
        let doubt = wanted.changes && !settled && state.is_in_doubt(wanted.slba, wanted.blocks);
        let Some(slot) = self.slots.get(index) else {
            return Ready::Yes;
        };
        let RemainingWork::Copy(copying) = &mut slot.work else {
            return Ready::Yes;
        };
        if let Some(carried) = &mut copying.carried {
            carried.held = true;
        }
        match &mut copying.step {
            CopyStep::Write(piece) if doubt => {
                copying.step = CopyStep::Settle(std::mem::take(piece));
                Ready::Changed
            }
            CopyStep::Write(piece) => match keep(&state, &wanted, piece) {
                Ok(()) => Ready::Yes,
                Err(lba) => {
                    slot.status = Status::WRITE_FAULT;
                    slot.slba = lba;
                    Ready::Changed
                }
            },
            _ => Ready::Yes,
        }
    }

    /// Handles the success of a request of a command with metadata; `data` is the data read.
    pub(super) fn carry(&mut self, index: u16, data: &mut SegmentList) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        let ns = slot.ns;
        let RemainingWork::Copy(copying) = &slot.work else {
            return;
        };
        let Some(wanted) = copying.blocks().filter(|_| copying.carried.is_some()) else {
            return;
        };
        let to_ns = copying.ns;
        let state = self.namespaces.metadata_of(ns);
        let to = self.namespaces.metadata_of(to_ns);
        let nsid = |ns: usize| self.namespaces.get(ns).map(|ns| ns.config.nsid);
        let (Some(from_nsid), Some(to_nsid)) = (nsid(ns), nsid(to_ns)) else {
            return self.broken("a copy has no namespace");
        };
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        let RemainingWork::Copy(copying) = &mut slot.work else {
            return;
        };
        let slba_to = copying.to;
        let Some(carried) = &mut copying.carried else {
            return;
        };
        carried.held &= matches!(copying.step, CopyStep::Settle(_));
        match &copying.step {
            CopyStep::Begin | CopyStep::Read => {
                let passing = PieceMetadata {
                    carried,
                    data: data.buffer().map_or(&[][..], |data| &*data),
                    from: state.as_deref(),
                    to: to.as_deref(),
                    slba: wanted.slba,
                    tags: copying.sources.last().map_or(carried.tags, |s| s.tags),
                };
                match passing.pass() {
                    Ok(metadata) => copying.passed = metadata,
                    Err(fault) => {
                        slot.status = fault.status;
                        let (nsid, slba) = if fault.written {
                            (to_nsid, slba_to >> carried.shift)
                        } else {
                            (from_nsid, wanted.slba)
                        };
                        (slot.nsid, slot.slba) = (nsid, slba + fault.at);
                    }
                }
            }
            CopyStep::Settle(_) => {
                if let (Some(state), Some(data)) = (state, data.buffer()) {
                    let datas = data.chunks_exact(1 << carried.shift);
                    for (data, lba) in datas.zip(wanted.slba..) {
                        state.settle(lba, table::checksum(data));
                    }
                }
            }
            CopyStep::Write(_) => done(state, &wanted),
            CopyStep::File => {}
        }
    }
}

/// Stores the metadata of a piece that is about to be written. Returns the failed block as an error
/// when the metadata file is truncated.
fn keep(state: &MetadataState, wanted: &LockedBlocks, piece: &mut CopyPiece) -> Result<(), u64> {
    let layout = state.layout();
    let data = piece.data.buffer();
    let data = data.map_or(&[][..], |data| &*data);
    let datas = data.chunks_exact(layout.block as usize);
    let metadata = piece.metadata.chunks_exact(layout.metadata.into());
    for ((data, metadata), lba) in datas.zip(metadata).zip(wanted.slba..) {
        let kept = state.write(lba, table::checksum(data), metadata);
        kept.ok_or(lba)?;
    }
    Ok(())
}

fn done(state: Option<Arc<MetadataState>>, wanted: &LockedBlocks) {
    if let Some(state) = state {
        let lbas = (wanted.slba..).zip(0..wanted.blocks);
        lbas.for_each(|(lba, _)| state.done(lba));
    }
}
