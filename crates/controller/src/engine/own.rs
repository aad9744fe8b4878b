//! Requests on the controller's own account, which no host waits for, one at a time: reads of its
//! self-test, and the erasure of a namespace.

use super::Engine;
use super::slots::Work;
use dma::SegmentList;
use volume::{IoError, Op};

/// State of the requests on the controller's own account.
#[derive(Default)]
pub(super) struct OwnRequests {
    in_flight: bool,
    /// The last request erases.
    erases: bool,
    /// Number of the last request.
    number: u64,
    /// Number and result of the last request that ended.
    ended: Option<(u64, Result<(), IoError>)>,
}

/// A request on the controller's own account.
pub(crate) struct OwnRequest {
    pub nsid: u32,
    pub op: Op,
    /// Byte offset.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Buffer for the data, of the same length, if data is moved.
    pub data: SegmentList,
}

impl Engine {
    /// Returns whether a request can begin now. If not, the end of the request or flush in the
    /// way wakes the worker.
    pub fn may_begin_own(&self) -> bool {
        !self.own.in_flight && self.flushing == 0 && self.slots.free() > 0
    }

    /// Begins a request; [`Engine::take_own`] returns its result, by its number. Returns `None`
    /// when no request can begin now.
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
            slot.work = Work::Own(number);
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
            && let Work::Own(number) = slot.work
        {
            self.own.ended = Some((number, result));
        }
        self.own.in_flight = false;
        self.end(index);
    }

    /// Returns whether the controller's own requests must not be asked to end early. An erasure
    /// concerns blocks that other hosts write to afterwards, and a cancelled request may still be
    /// carried out.
    pub(super) fn own_stays(&self) -> bool {
        self.offer.shared && self.own.erases
    }

    /// Returns the result of the request of this number, if it has ended.
    pub fn take_own(&mut self, number: u64) -> Option<Result<(), IoError>> {
        let ended = self.own.ended.take_if(|(ended, _)| *ended == number);
        ended.map(|(_, result)| result)
    }
}
