//! Volume requests at the controller's own request, one at a time: reads by its self-test, and the
//! erasure of a namespace.

use super::Engine;
use super::slots::RemainingWork;
use dma::SegmentList;
use volume::{IoError, Op};

/// State of the volume requests that the controller makes for itself: self-test reads and erasure.
#[derive(Default)]
pub(super) struct OwnRequests {
    in_flight: bool,
    /// Whether the last of the controller's own requests is part of an erasure.
    erases: bool,
    /// Number of the last of the controller's own requests that was begun.
    number: u64,
    /// Number and result of the last of the controller's own requests that has ended.
    ended: Option<(u64, Result<(), IoError>)>,
}

/// Volume request that the controller makes for itself: a self-test read, or part of an erasure.
pub(crate) struct OwnRequest {
    pub nsid: u32,
    pub op: Op,
    /// Byte offset in the namespace at which the request begins.
    pub offset: u64,
    /// Length of the request in bytes.
    pub len: u64,
    /// Buffer of `len` bytes if the request transfers data, otherwise empty.
    pub data: SegmentList,
}

impl Engine {
    /// Returns whether a request can begin now. If not, the worker is woken when the request or
    /// flush that prevents it ends.
    pub fn may_begin_own(&self) -> bool {
        !self.own.in_flight && self.flushes.pending() == 0 && self.slots.free() > 0
    }

    /// Begins a request and returns its number, by which [`Engine::take_own`] returns the result.
    /// Returns `None` when no request can begin now.
    pub fn begin_own(&mut self, request: OwnRequest) -> Option<u64> {
        let ns = self.namespace_index(request.nsid).ok()?;
        if !self.may_begin_own() {
            return None;
        }
        let index = self.slots.alloc()?;
        self.own.number += 1;
        let number = self.own.number;
        if let Some(slot) = self.slots.get(index) {
            slot.orphan = true;
            slot.ns = ns;
            slot.work = RemainingWork::Own(number);
        }
        self.own.in_flight = true;
        self.own.erases = !matches!(request.op, Op::Read);
        let OwnRequest {
            op,
            offset,
            len,
            data,
            ..
        } = request;
        self.submit(index, ns, op, offset, len, data);
        Some(number)
    }

    pub(super) fn own_completed(&mut self, index: u16, result: Result<(), IoError>) {
        if let Some(slot) = self.slots.get(index)
            && let RemainingWork::Own(number) = slot.work
        {
            self.own.ended = Some((number, result));
        }
        self.own.in_flight = false;
        self.end(index);
    }

    /// Returns whether the controller's own request must not be cancelled: a cancelled erasure
    /// request might take effect after later writes by other hosts.
    pub(super) fn own_stays(&self) -> bool {
        self.offer.shared && self.own.erases
    }

    /// Returns the result of the controller's own request with this number, if it has ended.
    pub fn take_own(&mut self, number: u64) -> Option<Result<(), IoError>> {
        let ended = self.own.ended.take_if(|(ended, _)| *ended == number);
        ended.map(|(_, result)| result)
    }
}
