//! Dataset Management ("NVM Command Set 1.1", 3.3.3): deallocation of block ranges.

use super::Execution;
use super::execution::status_of;
use super::slots::{Deallocating, RemainingWork};
use dma::{Access, SegmentList};
use nvme::cmd::io::{DsmCdw10, DsmCdw11, DsmRange};
use nvme::{Command, Status};
use volume::{Budget, IoError, IoErrorKind, Op, Request};
use zerocopy::FromBytes;

/// Cost of a range in a round's budget. A volume does little deallocation within the call.
const RANGE_UNITS: u32 = 16;

impl Deallocating {
    /// Stops deallocating. Earlier ranges may be deallocated partly or completely.
    fn stop(&mut self) {
        self.left.clear();
        self.unmarks.clear();
    }
}

impl Execution<'_> {
    pub(super) fn dataset_management(
        &mut self,
        sqid: u16,
        command: &Command,
    ) -> Result<(), Status> {
        let count = usize::from(DsmCdw10::from_bits(command.cdw10.get()).nr());
        let attributes = DsmCdw11::from_bits(command.cdw11.get());
        let ns_index = self.namespaces.index_of(command.nsid.get())?;
        let ns = self
            .namespaces
            .get(ns_index)
            .ok_or(Status::INTERNAL_ERROR)?;
        if attributes.ad() && ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        // Zones lose data only by a reset. Blocks with metadata keep their content, because its
        // checksum is stored with the metadata.
        let (shift, kept) = (ns.shift, ns.is_fixed());
        // Deallocation is passed on only if deallocated blocks read as zeroes, never as their
        // previous content.
        let info = ns.config.volume.info();
        let unmarks = ns.watched && info.deallocate && info.zeroes_after_deallocate;
        let mut bytes = [0u8; nvme::cmd::io::DSM_MAX_RANGES * 16];
        let bytes = bytes.get_mut(..count * 16).ok_or(Status::INTERNAL_ERROR)?;
        let mut list = SegmentList::new();
        self.walk(command, bytes.len() as u64, Access::Read, &mut list)?;
        list.copy_to(0, bytes);
        drop(list);
        let mut left = Vec::with_capacity(count);
        let mut unmarked = Vec::new();
        for raw in bytes.chunks_exact(16) {
            let range = DsmRange::read_from_bytes(raw).map_err(|_| Status::INTERNAL_ERROR)?;
            let (slba, nlb) = (range.slba.get(), u64::from(range.nlb.get()));
            if !ns.covers(slba, nlb) {
                return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
            }
            if attributes.ad() && nlb > 0 && !kept {
                left.push((slba << shift, nlb << shift));
                if unmarks {
                    unmarked.push((slba, nlb));
                }
            }
        }
        // Attributes other than Deallocate are hints.
        let index = self.slot_for(sqid, command, ns_index)?;
        left.reverse();
        if let Some(slot) = self.slots.get(index) {
            slot.work = RemainingWork::Ranges(Box::new(Deallocating {
                left,
                unmarks: unmarked,
            }));
        }
        self.next_range(index);
        Ok(())
    }

    /// Submits the next range to the volume, so that a command has at most one outstanding request.
    /// When the volume completes the request within the call, the command is parked, and continues
    /// with the next range when the budget permits.
    pub(super) fn next_range(&mut self, index: u16) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Dataset Management goes on without its slot");
        };
        let ns = slot.ns;
        let RemainingWork::Ranges(ranges) = &mut slot.work else {
            return self.broken("Dataset Management goes on in another command's slot");
        };
        let Some((offset, len)) = ranges.left.pop() else {
            let unmarks = std::mem::take(&mut ranges.unmarks);
            return self.end_written(index, &unmarks, 0);
        };
        let tag = self.slots.tag(index);
        let Some(ns) = self.namespaces.get_mut(ns) else {
            return self.broken("a slot's namespace is not there");
        };
        let data = SegmentList::new();
        if let Some(completion) = ns.queue.submit(Request {
            tag,
            op: Op::Deallocate,
            offset,
            len,
            data,
        }) {
            self.range_done(index, completion.result);
            self.park_or_end(index);
        }
    }

    /// Parks the command until a later round if ranges are left, otherwise ends it.
    fn park_or_end(&mut self, index: u16) {
        match self.slots.get(index).map(|slot| &slot.work) {
            // The command is put at the front, so that parked commands end one after the other.
            Some(RemainingWork::Ranges(ranges)) if !ranges.left.is_empty() => {
                self.slots.parked.push_front(index);
            }
            // No range is left.
            _ => self.next_range(index),
        }
    }

    /// Continues a parked command. Returns `true` when the command has to wait for others.
    #[must_use]
    pub(super) fn go_on(&mut self, index: u16, budget: &mut Budget) -> bool {
        budget.spend(RANGE_UNITS);
        self.end_early(index);
        match self.slots.get(index).map(|slot| &slot.work) {
            Some(RemainingWork::Copy(_)) => {
                budget.spend(self.units_of_copy(index));
                self.next_copy(index)
            }
            Some(RemainingWork::ZoneSend(_)) => self.next_send(index),
            Some(RemainingWork::Metadata(_)) => {
                budget.spend(self.units_of_metadata(index));
                self.next_metadata(index)
            }
            _ => {
                self.next_range(index);
                false
            }
        }
    }

    /// Ends a parked command early if it was aborted or cancelled. The volume has no request of the
    /// command that could be cancelled there.
    pub(super) fn end_early(&mut self, index: u16) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        let status = match slot.abort {
            true => Status::ABORT_REQUESTED,
            false if self.bus_master.ends_commands || slot.orphan => Status::COMMAND_INTERRUPTED,
            false => return,
        };
        slot.status = status;
        if let RemainingWork::Ranges(ranges) = &mut slot.work {
            ranges.stop();
        }
    }

    pub(super) fn range_done(&mut self, index: u16, result: Result<(), IoError>) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Dataset Management goes on without its slot");
        };
        match result {
            Ok(()) => {}
            // Deallocation is advice: a range that the volume cannot deallocate stays allocated.
            Err(error) if error.kind == IoErrorKind::Unsupported => {
                if let RemainingWork::Ranges(ranges) = &mut slot.work {
                    ranges.unmarks.clear();
                }
            }
            Err(error) => {
                slot.status = status_of(error, true);
                if let RemainingWork::Ranges(ranges) = &mut slot.work {
                    ranges.stop();
                }
            }
        }
    }
}
