//! Posting the completions of ended commands to completion queues.

use super::doorbells::{DoorbellKind, Doorbells, trace_eventidx};
use super::invariant::broken;
use super::journal::Journal;
use super::queue::{CompletionWords, Cq, PendingCompletion};
use super::queues::Queues;
use super::slots::Slots;
use super::{Event, Events};
use doorbell::{Cells, Invalid};
use nvme::Status;
use std::sync::atomic::AtomicU32;

impl Queues {
    /// Ends a command with a slot. Inlined into the callers that end most commands. Returns `false`
    /// when the completion waits for room, so that the slot has to be kept ([`Queues::keep_slot`]).
    #[inline(always)]
    #[must_use]
    pub(super) fn finish(
        &mut self,
        events: &mut Events,
        (sqid, cid): (u16, u16),
        status: Status,
        result: u64,
    ) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            self.queue_gone = true;
            return true;
        };
        let cqid = sq.cqid;
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else {
            self.queue_gone = true;
            return true;
        };
        let entry = CompletionWords::new(sqid, cid, status, result).with_sqhd(sq.head);
        if !cq.backlog.is_empty()
            || !post(self.controller, cq, &self.doorbells, entry, events, cqid)
        {
            return self.keep(events, sqid, cqid, entry);
        }
        crash::point!("controller.post.posted");
        if !std::mem::replace(&mut cq.dirty, true) {
            self.dirty.push(cqid);
        }
        if let Some(stats) = self.stats.queues.get(usize::from(sqid)) {
            stats.completions.add(1);
        }
        sq.outstanding = sq.outstanding.saturating_sub(1);
        if sq.deleting {
            self.sq_drained(sqid, events);
        }
        true
    }

    /// Handles a completion for which its queue has no room now. Returns `true` when the completion
    /// is dropped instead of kept.
    #[cold]
    #[inline(never)]
    fn keep(&mut self, events: &mut Events, sqid: u16, cqid: u16, entry: CompletionWords) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            broken(events, "a completion waits whose submission queue is gone");
            return true;
        };
        if sq.deleting {
            // The host ignores completions of a queue that is being deleted, see `delete_sq`.
            sq.outstanding = sq.outstanding.saturating_sub(1);
            self.sq_drained(sqid, events);
            return true;
        }
        // The command stays outstanding for its queue.
        if let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) {
            let slot = None;
            cq.backlog
                .push_back(PendingCompletion { sqid, entry, slot });
            if !std::mem::replace(&mut cq.blocked, true) {
                self.blocked.push(cqid);
            }
        }
        false
    }

    /// Posts completions that waited for room. Returns whether any was posted.
    pub(super) fn post_backlogs(
        &mut self,
        slots: &mut Slots,
        journal: &mut Journal,
        events: &mut Events,
    ) -> bool {
        let mut worked = false;
        let mut i = 0;
        while let Some(&qid) = self.blocked.get(i) {
            worked |= self.post_backlog(qid, slots, journal, events);
            match self.cqs.get_mut(usize::from(qid)) {
                Some(Some(cq)) if !cq.backlog.is_empty() => i += 1,
                gone_or_empty => {
                    if let Some(Some(cq)) = gone_or_empty {
                        cq.blocked = false;
                    }
                    self.blocked.swap_remove(i);
                }
            }
        }
        worked
    }

    fn post_backlog(
        &mut self,
        qid: u16,
        slots: &mut Slots,
        journal: &mut Journal,
        events: &mut Events,
    ) -> bool {
        let mut worked = false;
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
            broken(events, "a completion queue with a backlog is gone");
            return false;
        };
        while let Some(next) = cq.backlog.front() {
            let (sqid, mut entry) = (next.sqid, next.entry);
            let mut sq = self.sqs.get_mut(usize::from(sqid)).and_then(Option::as_mut);
            if let Some(sq) = &sq {
                // The SQ head pointer is the present one, not that of the command's end.
                entry = entry.with_sqhd(sq.head);
            }
            if !post(self.controller, cq, &self.doorbells, entry, events, qid) {
                break;
            }
            crash::point!("controller.post.posted");
            if let Some(slot) = cq.backlog.pop_front().and_then(|next| next.slot) {
                slots.release_kept(slot);
            }
            if qid == 0 {
                journal.count_admin();
            }
            worked = true;
            if !std::mem::replace(&mut cq.dirty, true) {
                self.dirty.push(qid);
            }
            if let Some(sq) = &mut sq {
                sq.outstanding = sq.outstanding.saturating_sub(1);
            }
            if let Some(stats) = self.stats.queues.get(usize::from(sqid)) {
                stats.completions.add(1);
            }
        }
        worked
    }
}

type DoorbellCells<'a> = Option<Cells<'a, AtomicU32>>;

/// Posts a completion queue entry. Returns `false` when the queue is full or its memory is
/// unmapped.
#[inline(always)]
fn post(
    controller: u16,
    cq: &mut Cq,
    doorbells: &Doorbells,
    entry: CompletionWords,
    events: &mut Events,
    qid: u16,
) -> bool {
    if cq.is_full() {
        refresh_head(cq, doorbells.cells(qid, DoorbellKind::CqHead), events, qid);
        if cq.is_full() {
            return false;
        }
    }
    // The host cannot consume beyond this entry, and need not write the doorbell register before.
    if doorbells.shadowed() && cq.watch.needs_park(cq.next_tail()) && cq.memory.ring().is_some() {
        park(controller, cq, doorbells, qid);
    }
    cq.push(entry)
}

/// Moves EventIdx of a head doorbell, so that the host notifies the controller when it has consumed
/// up to the tail.
#[inline(never)]
fn park(controller: u16, cq: &mut Cq, doorbells: &Doorbells, qid: u16) {
    if let Some(cells) = doorbells.cells(qid, DoorbellKind::CqHead) {
        let before = cq.watch.state().eventidx;
        cq.watch.park_until(cells, cq.next_tail());
        trace_eventidx(controller, qid, DoorbellKind::CqHead, before, &cq.watch);
    }
}

/// Reads the current head of a completion queue from its doorbell.
#[inline(never)]
pub(super) fn refresh_head(cq: &mut Cq, cells: DoorbellCells<'_>, events: &mut Events, qid: u16) {
    let Some(cells) = cells else {
        return;
    };
    let value = match cq.watch.poll(cells) {
        Ok(head) if head == cq.seen => return,
        Ok(head) => {
            cq.seen = head;
            if cq.allows(head) {
                cq.head = head;
                return;
            }
            head
        }
        Err(Invalid { value, .. }) => value,
    };
    events.push_back(Event::InvalidDoorbell {
        qid,
        cq: true,
        value,
    });
}
