//! Dataset Management ("NVM Command Set 1.1", 3.3.3).

use super::Engine;
use super::complete::status_of;
use super::slots::Work;
use dma::{Access, SegmentList};
use nvme::cmd::io::{DsmCdw10, DsmCdw11, DsmRange};
use nvme::{Command, Status};
use volume::{IoError, IoErrorKind, Op, Request};
use zerocopy::FromBytes;

impl Engine {
    pub(super) fn dataset_management(
        &mut self,
        sqid: u16,
        command: &Command,
    ) -> Result<(), Status> {
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
        let shift = ns.shift;
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
            if !ns.covers(slba, nlb) {
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

    /// Ranges go to the volume one after the other, so that a command never has more than one
    /// request out.
    pub(super) fn next_range(&mut self, index: u16) {
        loop {
            let Some(slot) = self.slots.get(index) else {
                return self.broken("Dataset Management goes on without its slot");
            };
            let ns = slot.ns;
            let Work::Ranges(ranges) = &mut slot.work else {
                return self.broken("Dataset Management goes on in another command's slot");
            };
            let Some((offset, len)) = ranges.pop() else {
                return self.end(index);
            };
            let tag = self.slots.tag(index);
            let Some(ns) = self.namespaces.get_mut(ns) else {
                return self.broken("a slot's namespace is not there");
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

    pub(super) fn range_done(&mut self, index: u16, result: Result<(), IoError>) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Dataset Management goes on without its slot");
        };
        match result {
            Ok(()) => {}
            // Deallocation is advice: what the volume cannot deallocate stays allocated.
            Err(error) if error.kind == IoErrorKind::Unsupported => {}
            Err(error) => {
                slot.status = status_of(error, true);
                if let Work::Ranges(ranges) = &mut slot.work {
                    ranges.clear();
                }
            }
        }
    }
}
