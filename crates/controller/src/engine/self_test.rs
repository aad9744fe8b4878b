//! Reads of the control half's self-test: one at a time, which no host waits for.

use super::Engine;
use super::complete::status_of;
use super::slots::Work;
use dma::{Buffer, SegmentList};
use nvme::Status;
use volume::{IoError, Op};

/// What the engine knows of them.
#[derive(Default)]
pub(super) struct Testing {
    in_flight: bool,
    /// The last one's number, and how it ended.
    ended: Option<(u64, Status)>,
}

impl Engine {
    /// Nothing that is in flight hinders a read: its end is news to the worker.
    pub fn may_begin_test(&self) -> bool {
        !self.testing.in_flight && self.flushing == 0 && self.slots.free() > 0
    }

    /// Reads `len` bytes at `offset` of a namespace into memory of its own; [`Engine::take_tested`]
    /// has the end of it, by its number. `false`: not now.
    pub fn begin_test(&mut self, number: u64, nsid: u32, offset: u64, len: u64) -> bool {
        let (true, Ok(ns)) = (self.may_begin_test(), self.namespace_index(nsid)) else {
            return false;
        };
        let Some(index) = self.slots.alloc() else {
            return false;
        };
        if let Some(slot) = self.slots.get(index) {
            slot.orphan = true;
            slot.ns = ns;
            slot.work = Work::SelfTest(number);
        }
        self.testing.in_flight = true;
        let data = SegmentList::owned(Buffer::new(len as usize));
        self.submit(index, ns, Op::Read, offset, len, data);
        true
    }

    pub(super) fn test_completed(&mut self, index: u16, result: Result<(), IoError>) {
        if let Some(slot) = self.slots.get(index)
            && let Work::SelfTest(number) = slot.work
        {
            let status = result.map_or_else(|e| status_of(e, false), |()| Status::SUCCESS);
            self.testing.ended = Some((number, status));
        }
        self.testing.in_flight = false;
        self.end(index);
    }

    /// The read that has ended: its number, and its status.
    pub fn take_tested(&mut self) -> Option<(u64, Status)> {
        self.testing.ended.take()
    }
}
