//! Bus Master Enable: an engine's behaviour while its function may not reach the host's memory
//! ("PCI Local Bus 3.0", 6.2.2).
//!
//! A cleared bit looks to the queues as if their memory were not mapped, which every round checks
//! anyway. No entry is fetched, no completion posted, no doorbell read in memory and no EventIdx
//! stored; a completion waits in its queue's backlog. No interrupt is sent either, because a
//! message is a write to memory. Doorbell registers are polled as usual.
//!
//! When the bit is set again, the rings are looked up again. Each completion queue with entries
//! that the host did not consume is signalled, including those signalled before: the VMM drops
//! the messages of a function without the bit, even those that arrive a moment late.

use super::Engine;
use super::doorbells::Which;
use super::post::refresh_head;

impl Engine {
    /// Returns whether the function may reach the host's memory.
    pub fn is_master(&self) -> bool {
        self.master
    }

    /// Returns how often the bit was set so far, as passed to [`Engine::set_master`].
    pub fn masterings(&self) -> u64 {
        self.masterings
    }

    /// Sets Bus Master Enable. After it is cleared, data of commands in flight may still be on
    /// its way; `self.dma.quiesced()` returns `true` when that is over. `masterings` counts how
    /// often the control half has set the bit.
    pub(super) fn set_master(&mut self, on: bool, masterings: u64) {
        self.masterings = masterings;
        if self.master == on {
            return;
        }
        if on {
            self.begin_mastering();
        } else {
            self.end_mastering();
        }
    }

    fn end_mastering(&mut self) {
        if self.doorbells.shadowed() {
            // Shadow buffers are released as in `unmapped`.
            self.look_at_all();
            self.doorbells.release();
            self.look_at_all();
        }
        self.master = false;
        self.irqs.set_messages(false);
        (self.sqs.iter_mut().flatten()).for_each(|sq| sq.memory.release());
        (self.cqs.iter_mut().flatten()).for_each(|cq| cq.memory.release());
        self.note_queues();
        // Queues with unread entries are signalled when the bit is set.
        for qid in std::mem::take(&mut self.dirty) {
            if let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) {
                cq.signalled();
            }
        }
        self.dma.fence();
    }

    fn begin_mastering(&mut self) {
        self.master = true;
        self.interrupting = false;
        self.irqs.set_messages(true);
        self.mapped(0, u64::MAX);
        // The next round polls every queue.
        self.polled.poll_all();
        self.post_backlogs();
        for qid in 0..self.cqs.len() as u16 {
            self.signal_unread(qid);
        }
    }

    /// Signals a completion queue that has entries which the host did not consume, whether they
    /// were signalled before or not.
    pub(super) fn signal_unread(&mut self, qid: u16) {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
            return;
        };
        let cells = self.doorbells.cells(qid, Which::CqHead);
        refresh_head(cq, cells, &mut self.events, qid);
        if !cq.has_unconsumed() {
            return;
        }
        cq.dirty = true;
        if self.irqs.pin_based() {
            // The pin's level does not depend on this; its queues are checked in each round.
            return;
        }
        self.signal_now(qid);
    }

    /// Asks that commands in flight end early. Their completions are kept for the host.
    pub(super) fn end_commands_early(&mut self) {
        self.interrupting = true;
        let in_flight: Vec<(u64, usize)> = self.slots.guests_in_flight(self.own_stays()).collect();
        for (tag, ns) in in_flight {
            self.cancel(tag, ns);
        }
    }
}
