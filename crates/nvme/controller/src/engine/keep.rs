//! Completions that wait for room in their queue. Each keeps a slot, so that its record lets the
//! next process post the completion.

use super::Events;
use super::invariant::broken;
use super::queues::Queues;
use super::slots::Slots;
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

impl Queues {
    /// Keeps a command's slot while its completion waits for room, and records the completion.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_slot(
        &mut self,
        slots: &mut Slots,
        events: &mut Events,
        index: u16,
        status: Status,
        result: u64,
    ) {
        let Some(slot) = slots.get(index) else {
            return broken(events, "a completion waits without its slot");
        };
        let (sqid, cid, scratch) = (slot.sqid, slot.cid, std::mem::take(&mut slot.scratch));
        slots.scratch.release(scratch);
        let place = (sqid, self.last_fetched(sqid));
        if slots.keep(index, place, cid, (status, result)) {
            self.name_backlogged(sqid, index);
        } else {
            slots.release(index);
        }
    }

    /// Keeps a completion that waits for room, of the last command fetched from its queue, which
    /// has no slot. The control half itself records those of admin commands.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_without_slot(
        &mut self,
        slots: &mut Slots,
        events: &mut Events,
        (sqid, cid): (u16, u16),
        status: Status,
        result: u64,
    ) {
        if sqid == 0 || slots.records.is_none() {
            return;
        }
        let Some(index) = slots.alloc() else {
            return broken(events, "no slot is left for a command that was fetched");
        };
        if let Some(slot) = slots.get(index) {
            (slot.sqid, slot.cid) = (sqid, cid);
        }
        self.keep_slot(slots, events, index, status, result);
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
}
