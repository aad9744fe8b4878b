//! Volume requests at the controller's own request, one at a time: reads by its self-test, and the
//! erasure of a namespace.

use super::Execution;
use super::slots::RemainingWork;
use dma::SegmentList;
use volume::{IoError, Op};

/// State of the volume requests that the controller makes for itself: self-test reads and erasure.
#[derive(Default)]
pub(crate) struct OwnRequests {
    pub(super) in_flight: bool,
    /// Whether the last of the controller's own requests is part of an erasure.
    pub(super) erases: bool,
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

impl OwnRequests {
    /// Returns the result of the controller's own request with this number, if it has ended.
    pub fn take(&mut self, number: u64) -> Option<Result<(), IoError>> {
        let ended = self.ended.take_if(|(ended, _)| *ended == number);
        ended.map(|(_, result)| result)
    }
}

impl Execution<'_> {
    /// Begins a request and returns its number, by which [`OwnRequests::take`] returns the result.
    /// Returns `None` when no slot is free, or the namespace does not exist.
    pub(super) fn begin_own(&mut self, request: OwnRequest) -> Option<u64> {
        let ns = self.namespaces.index_of(request.nsid).ok()?;
        let number = self.slots.own.number + 1;
        let index = self.slots.alloc_own(ns, RemainingWork::Own(number))?;
        let own = &mut self.slots.own;
        own.number = number;
        own.in_flight = true;
        own.erases = !matches!(request.op, Op::Read);
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
            self.slots.own.ended = Some((number, result));
        }
        self.slots.own.in_flight = false;
        self.end(index);
    }
}
