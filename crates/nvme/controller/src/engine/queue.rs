//! State of submission and completion queues.

use super::live::LoggedCq;
use super::polled::IdleRounds;
use crate::survival::state::AdminCompletion;
use dma::{Access, DmaMap, Ring};
use doorbell::{Watch, distance};
use nvme::{Completion, Status};
use std::collections::VecDeque;
use std::time::Instant;

/// Guest memory of a queue, which is looked up again when the guest's memory map changes.
///
/// While any part is unmapped (firmware moves windows, a vIOMMU removes a mapping), the queue
/// pauses: nothing is fetched or posted, and nothing is lost. The queue continues when its memory
/// is mapped again.
pub(crate) struct QueueMemory {
    iova: u64,
    entries: u32,
    entry_size: usize,
    access: Access,
    ring: Option<Ring>,
}

impl QueueMemory {
    /// Describes the memory of a queue without looking it up; [`QueueMemory::mapped`] does so.
    pub fn away(iova: u64, entries: u32, entry_size: usize, access: Access) -> Self {
        QueueMemory {
            iova,
            entries,
            entry_size,
            access,
            ring: None,
        }
    }

    /// Looks up the memory of a queue. Returns `None` when any part is unmapped.
    pub fn new(
        dma: &DmaMap,
        iova: u64,
        entries: u32,
        entry_size: usize,
        access: Access,
    ) -> Option<Self> {
        let mut memory = Self::away(iova, entries, entry_size, access);
        memory.mapped(dma);
        memory.ring.is_some().then_some(memory)
    }

    /// Drops the reference to the ring. [`QueueMemory::mapped`] finds it again, for example in the
    /// map of the engine that the queue migrates to.
    pub fn release(&mut self) {
        self.ring = None;
    }

    pub fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }

    /// Releases the ring if it overlaps an unmapped range of IOVAs. Returns whether it was
    /// released.
    pub fn unmapped(&mut self, iova: u64, len: u64) -> bool {
        self.lies_in(iova, len) && self.ring.take().is_some()
    }

    /// Returns whether a part of the queue's memory lies in a range of IOVAs.
    fn lies_in(&self, iova: u64, len: u64) -> bool {
        let (own, bytes) = self.range();
        iova < own.saturating_add(bytes) && own < iova.saturating_add(len)
    }

    /// Returns the first IOVA and the length in bytes of the queue's memory.
    pub fn range(&self) -> (u64, u64) {
        let bytes = u64::from(self.entries) * self.entry_size as u64;
        (self.iova, bytes)
    }

    /// Looks up an unmapped ring if it overlaps a range of IOVAs that was mapped; other ranges
    /// cannot contain the missing part. Returns whether the ring was found.
    pub fn mapped_in(&mut self, dma: &DmaMap, iova: u64, len: u64) -> bool {
        self.lies_in(iova, len) && self.mapped(dma)
    }

    /// Looks up the ring if it is unmapped. Returns whether it was found.
    pub fn mapped(&mut self, dma: &DmaMap) -> bool {
        if self.ring.is_none() {
            self.ring =
                Ring::resolve(dma, self.iova, self.entries, self.entry_size, self.access).ok();
            return self.ring.is_some();
        }
        false
    }
}

/// Submission queue of a controller, as the engine that fetches from it sees it.
pub(crate) struct Sq {
    pub cqid: u16,
    pub size: u32,
    pub memory: QueueMemory,
    /// Index of the next submission queue entry to fetch.
    pub head: u32,
    /// Number of commands fetched from the queue since its creation.
    pub fetched: u64,
    /// Tail of the completion queue when the queue's state was last noted in the state memory.
    pub noted_tail: u32,
    /// Index of the first entry that the host has not written yet, as far as known.
    pub tail: u32,
    pub watch: Watch,
    /// Last doorbell value that was read, valid or not.
    pub seen: u32,
    /// Number of commands fetched from the queue without a posted completion.
    pub outstanding: u32,
    /// Whether Delete I/O Submission Queue waits until no command of the queue is outstanding.
    pub deleting: bool,
    /// Number of successive polls of the queue that found no new entry.
    pub idle_rounds: IdleRounds,
    /// Command identifiers to abort when their entries are fetched from the queue.
    pub abort_on_fetch: Vec<u16>,
}

impl Sq {
    pub fn new(cqid: u16, memory: QueueMemory, watch: Watch) -> Self {
        Sq {
            cqid,
            size: watch.size(),
            memory,
            head: 0,
            fetched: 0,
            noted_tail: 0,
            tail: 0,
            watch,
            seen: 0,
            outstanding: 0,
            deleting: false,
            idle_rounds: IdleRounds::default(),
            abort_on_fetch: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Returns whether the host may move the tail to this value: it must not pass entries that were
    /// submitted and not fetched yet ("NVMe Base 2.1", 5.1.2.1: Invalid Doorbell Write Value).
    pub fn allows(&self, tail: u32) -> bool {
        let submitted = |tail| distance(self.head, tail, self.size);
        submitted(tail) >= submitted(self.tail)
    }

    /// Advances the head by `count` fetched entries, at most to the ring's end.
    #[inline]
    pub fn took(&mut self, count: u32) {
        self.head = self.ahead(count);
        self.fetched += u64::from(count);
    }

    /// Returns the head after `count` more entries, at most the ring's end.
    #[inline]
    pub fn ahead(&self, count: u32) -> u32 {
        let head = self.head + count;
        if head == self.size { 0 } else { head }
    }
}

/// Completion that is not posted yet, because its queue is full or unmapped.
pub(crate) struct PendingCompletion {
    pub sqid: u16,
    pub entry: CompletionWords,
    /// Index of the slot with the record that stores the completion for the next process, if any.
    pub slot: Option<u16>,
}

/// Completion queue entry without its phase tag, as two words. These stay in registers, whereas a
/// [`Completion`] consists of bytes and passes through memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletionWords {
    low: u64,
    high: u64,
}

impl CompletionWords {
    /// Creates an entry ("NVMe Base 2.1", 4.2.1) with dwords 0 and 1. The SQ Head Pointer is set
    /// later.
    #[inline(always)]
    pub fn new(sqid: u16, cid: u16, status: Status, result: u64) -> Self {
        let status_phase = Completion::pack_status(status, false).get();
        CompletionWords {
            low: result,
            high: u64::from(sqid) << 16 | u64::from(cid) << 32 | u64::from(status_phase) << 48,
        }
    }

    /// Returns the completion entry with `head` as its SQ Head Pointer.
    #[inline(always)]
    pub fn with_sqhd(self, head: u32) -> Self {
        CompletionWords {
            high: self.high & !0xffff | u64::from(head as u16),
            ..self
        }
    }

    /// Returns the completion of an admin command, which never uses dword 1.
    pub fn ending(self) -> AdminCompletion {
        AdminCompletion {
            cid: (self.high >> 32) as u16,
            status: (self.high >> 49) as u16,
            result: self.low as u32,
        }
    }

    /// Returns the 16 bytes of the completion entry with this phase tag.
    #[inline(always)]
    fn bytes(self, phase: bool) -> [u8; 16] {
        let high = self.high | u64::from(phase) << 48;
        (u128::from(high) << 64 | u128::from(self.low)).to_le_bytes()
    }
}

/// Completion queue of a controller, as the engine that posts to it sees it.
pub(crate) struct Cq {
    pub size: u32,
    pub memory: QueueMemory,
    /// Index of the next completion queue entry to write.
    pub tail: u32,
    /// Index of the first entry that the host has not consumed, as far as known.
    pub head: u32,
    pub phase: bool,
    pub watch: Watch,
    /// Interrupt vector; `None` when interrupts are disabled for the queue.
    pub vector: Option<u16>,
    /// Completions that wait for room in the queue, in order; at most one for each outstanding
    /// command.
    pub backlog: VecDeque<PendingCompletion>,
    /// Whether the queue is in the engine's list of queues with a backlog.
    pub blocked: bool,
    /// Whether the queue is in the engine's list of queues with entries to signal.
    pub dirty: bool,
    /// Last doorbell value that was read, valid or not.
    pub seen: u32,
    /// Number of submission queues that use this completion queue.
    pub users: u16,
    /// Number of entries posted since the last interrupt.
    pub unsignalled: u32,
    /// Time at which the first unsignalled entry was posted, if interrupts are coalesced.
    pub unsignalled_since: Option<Instant>,
    /// Whether the memory may contain completions of an earlier queue, see [`Cq::clear`].
    pub is_stale: bool,
    /// State of the queue when its entries were logged last; `None` when all of its memory may have
    /// been written since. See [`live`](super::live).
    pub(super) logged: Option<LoggedCq>,
}

impl Cq {
    pub fn new(memory: QueueMemory, watch: Watch, vector: Option<u16>) -> Self {
        Cq {
            size: watch.size(),
            memory,
            tail: 0,
            head: 0,
            phase: true,
            watch,
            vector,
            backlog: VecDeque::new(),
            blocked: false,
            dirty: false,
            seen: 0,
            users: 0,
            unsignalled: 0,
            unsignalled_since: None,
            is_stale: false,
            logged: None,
        }
    }

    /// Clears the ring if it may contain completions of an earlier queue. The next process finds
    /// posted completions by their phase tags, and would mistake the earlier ones for this queue's.
    /// (Linux clears the memory of a queue only after the command that creates the queue has
    /// completed.)
    pub fn clear(&mut self) {
        if let Some(ring) = self.memory.ring()
            && std::mem::take(&mut self.is_stale)
        {
            (0..self.size).for_each(|index| ring.store_cqe(index, [0; 16]));
            self.logged = None;
        }
    }

    /// Returns the tail of the completion queue after one more entry.
    pub fn next_tail(&self) -> u32 {
        if self.tail + 1 == self.size {
            0
        } else {
            self.tail + 1
        }
    }

    /// Returns whether the queue is full: one more entry would make the tail equal the head ("NVMe
    /// Base 2.1", 3.3.1.4).
    pub fn is_full(&self) -> bool {
        self.next_tail() == self.head
    }

    /// Returns whether the host may move the head to this value: it can consume only posted
    /// entries.
    pub fn allows(&self, head: u32) -> bool {
        distance(self.head, head, self.size) <= distance(self.head, self.tail, self.size)
    }

    /// Marks all posted entries as signalled, or as needing no signal.
    pub fn signalled(&mut self) {
        self.dirty = false;
        self.unsignalled = 0;
        self.unsignalled_since = None;
    }

    /// Returns whether the queue has entries that the host has not consumed, as far as known.
    pub fn has_unconsumed(&self) -> bool {
        self.head != self.tail
    }

    /// Writes `entry` with its phase tag at the tail. Returns `false` when the memory is unmapped.
    /// The caller has to check for room first.
    #[inline(always)]
    pub fn push(&mut self, entry: CompletionWords) -> bool {
        let Some(ring) = self.memory.ring() else {
            return false;
        };
        ring.store_cqe(self.tail, entry.bytes(self.phase));
        self.pushed(1);
        true
    }

    /// Advances the tail by `count` posted entries, at most to the ring's end.
    #[inline]
    pub fn pushed(&mut self, count: u32) {
        self.tail += count;
        if self.tail == self.size {
            self.tail = 0;
            self.phase = !self.phase;
        }
        self.unsignalled += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_entry_matches_standard() {
        let status = Status::LBA_OUT_OF_RANGE.with_dnr(true);
        for phase in [false, true] {
            let wanted = Completion {
                dw0: 0x8765_4321.into(),
                dw1: 0x0fed_cba9.into(),
                sqhd: 0xfedc.into(),
                sqid: 0x1234.into(),
                cid: 0xbeef.into(),
                status_phase: Completion::pack_status(status, phase),
            };
            let entry = CompletionWords::new(0x1234, 0xbeef, status, 0x0fed_cba9_8765_4321);
            let entry = entry.with_sqhd(0x9999).with_sqhd(0x1_fedc);
            let wanted: [u8; 16] = zerocopy::transmute!(wanted);
            assert_eq!(entry.bytes(phase), wanted);
        }
    }
}
