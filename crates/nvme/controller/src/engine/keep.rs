//! Completions that wait for room in their queue. Each keeps a slot, so that its record lets the
//! next process post the completion.

use super::Engine;
use super::journal::{QueueRows, Records};
use super::queue::Cq;
use super::slots::{Slot, Slots};
use nvme::Status;

impl Slots {
    /// Keeps a slot while the command's completion waits for room, and stores the completion in its
    /// record. Returns `false` without records, when the slot is not needed.
    fn keep(&mut self, index: u16, place: (u16, u64), cid: u16, end: (Status, u64)) -> bool {
        let Some(records) = &mut self.records else {
            return false;
        };
        records.end(index, place, cid, end);
        if let Some(slot) = self.get(index) {
            slot.kept = true;
            // Later completions of the volume no longer match the slot.
            slot.seq = slot.seq.wrapping_add(1);
            slot.list.clear();
            self.rest();
        }
        true
    }

    /// Frees a kept slot after its completion was posted, or is no longer awaited.
    pub fn release_kept(&mut self, index: u16) {
        if let Some(slot) = self.get(index)
            && std::mem::take(&mut slot.kept)
        {
            self.wake();
            self.release(index);
        }
    }

    /// Frees all kept slots, because their completions are no longer awaited.
    pub fn release_all_kept(&mut self) {
        for index in 0..self.count() {
            self.release_kept(index);
        }
    }
}

impl Engine {
    /// Returns the number of commands fetched from a queue before the last one.
    pub(super) fn last_fetched(&self, sqid: u16) -> u64 {
        match self.sqs.get(usize::from(sqid)) {
            Some(Some(sq)) => sq.fetched.saturating_sub(1),
            _ => 0,
        }
    }

    /// Keeps a command's slot while its completion waits for room, and records the completion.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_slot(&mut self, index: u16, status: Status, result: u64) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a completion waits without its slot");
        };
        let (sqid, cid, scratch) = (slot.sqid, slot.cid, std::mem::take(&mut slot.scratch));
        self.scratch.release(scratch);
        let place = (sqid, self.last_fetched(sqid));
        if self.slots.keep(index, place, cid, (status, result)) {
            self.name_backlogged(sqid, index);
        } else {
            self.slots.release(index);
        }
    }

    /// Keeps a completion that waits for room, of the last command fetched from its queue, which
    /// has no slot. The control half itself records those of admin commands.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_without_slot(&mut self, sqid: u16, cid: u16, status: Status, result: u64) {
        if sqid == 0 || self.slots.records.is_none() {
            return;
        }
        let Some(index) = self.slots.alloc() else {
            return self.broken("no slot is left for a command that was fetched");
        };
        if let Some(slot) = self.slots.get(index) {
            (slot.sqid, slot.cid) = (sqid, cid);
        }
        self.keep_slot(index, status, result);
    }

    /// Stores the slot's index in the newest waiting completion.
    fn name_backlogged(&mut self, sqid: u16, index: u16) {
        let Some(Some(sq)) = self.sqs.get(usize::from(sqid)) else {
            return;
        };
        if let Some(Some(cq)) = self.cqs.get_mut(usize::from(sq.cqid))
            && let Some(newest) = cq.backlog.back_mut()
        {
            newest.slot = Some(index);
        }
    }

    /// Ends a command that could not be started, and frees its slot if it has one.
    pub(super) fn finish_started(&mut self, slot: Option<u16>, sqid: u16, cid: u16, end: Status) {
        match slot {
            Some(index) => self.finish_slot(index, cid, end, 0),
            None => self.end_reserved(sqid, cid, end, 0),
        }
    }

    /// Ends a command without a slot, or with only the slot reserved for a replayed command.
    pub(super) fn end_reserved(&mut self, sqid: u16, cid: u16, status: Status, result: u64) {
        let Some(index) = self.slots.take_reserved() else {
            return self.finish_with(sqid, cid, status, result);
        };
        if let Some(slot) = self.slots.get(index) {
            (slot.sqid, slot.cid) = (sqid, cid);
        }
        self.finish_slot(index, cid, status, result);
    }

    fn finish_slot(&mut self, index: u16, cid: u16, status: Status, result: u64) {
        let Some(Slot { sqid, .. }) = self.slots.get(index) else {
            return self.broken("a command without its slot ends");
        };
        let sqid = *sqid;
        if self.finish_here(sqid, cid, status, result) {
            self.free_slot(index);
        } else {
            self.keep_slot(index, status, result);
        }
    }

    /// Begins to record outstanding commands, if the controller has a state memory.
    pub(super) fn open_records(&mut self) {
        if let Some((state, share)) = &self.journal.state
            && self.slots.records.is_none()
            && let Some(rows) = state.recorded(*share)
        {
            self.slots.records = Some(Records::new(rows, self.slots.count()));
        }
    }

    /// Notes the state of a completion queue after it was installed, or its memory was mapped or
    /// unmapped.
    pub(super) fn note_cq(hot: &Option<QueueRows>, qid: u16, cq: &Cq) {
        if let Some(hot) = hot {
            hot.note_cq(qid, cq);
        }
    }

    /// Notes the state of all queues after a change of their doorbells or memory.
    pub(super) fn note_queues(&mut self) {
        let Some(hot) = &self.journal.hot else {
            return;
        };
        for (qid, cq) in (0..).zip(&self.cqs) {
            if let Some(cq) = cq {
                hot.note_cq(qid, cq);
            }
        }
        for (qid, sq) in (0..).zip(&mut self.sqs) {
            if let Some(sq) = sq
                && let Some(Some(cq)) = self.cqs.get(usize::from(sq.cqid))
            {
                hot.note_sq(qid, sq, cq.tail);
            }
        }
    }
}
