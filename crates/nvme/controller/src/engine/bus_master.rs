//! Bus Master Enable: behaviour of an engine while its function may not access the host's memory
//! ("PCI Local Bus 3.0", 6.2.2).
//!
//! While the bit is clear, queues behave as if their memory were unmapped, which every round checks
//! anyway. No entry is fetched, no completion posted, no doorbell read in memory, and no EventIdx
//! stored; completions wait in the backlogs of their queues. No interrupt message is sent either,
//! because it is a memory write. Doorbell registers are polled as usual.
//!
//! When the bit is set again, the rings are looked up again. Every completion queue with unconsumed
//! entries is signalled, even if it was before: the VMM drops a function's messages while the bit
//! is clear, including those that arrive slightly late.

use super::Engine;
use super::doorbells::DoorbellKind;
use super::post::refresh_head;

/// State of Bus Master Enable in an engine.
#[derive(Default)]
pub(super) struct BusMaster {
    /// Whether the bit is set. While it is clear, no queue has its ring, and shadow buffers are
    /// unmapped.
    pub is_enabled: bool,
    /// Number of times that the control half has set the bit.
    pub count: u64,
    /// Whether outstanding commands were asked to end early after the bit was cleared.
    pub ends_commands: bool,
}

impl Engine {
    /// Returns whether Bus Master Enable is set, so that the function may access the host's memory.
    pub fn is_master(&self) -> bool {
        self.bus_master.is_enabled
    }

    /// Returns how many times Bus Master Enable was set, as passed to [`Engine::set_master`].
    pub fn masterings(&self) -> u64 {
        self.bus_master.count
    }

    /// Sets Bus Master Enable. After it is cleared, outstanding commands may still transfer data,
    /// until `self.dma.quiesced()` returns `true`. `masterings` counts how many times the control
    /// half has set the bit.
    pub(super) fn set_master(&mut self, on: bool, masterings: u64) {
        self.bus_master.count = masterings;
        if self.bus_master.is_enabled == on {
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
            // Shadow buffers are released here as in `unmapped`.
            self.look_at_all();
            self.doorbells.release();
            self.look_at_all();
        }
        self.bus_master.is_enabled = false;
        self.irqs.set_messages(false);
        (self.sqs.iter_mut().flatten()).for_each(|sq| sq.memory.release());
        (self.cqs.iter_mut().flatten()).for_each(|cq| cq.memory.release());
        self.note_queues();
        // Queues with unread entries are signalled when the bit is set again.
        for qid in std::mem::take(&mut self.dirty) {
            if let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) {
                cq.signalled();
            }
        }
        self.dma.fence();
    }

    fn begin_mastering(&mut self) {
        self.bus_master.is_enabled = true;
        self.bus_master.ends_commands = false;
        self.irqs.set_messages(true);
        self.mapped(0, u64::MAX);
        // The next round polls every queue.
        self.polled.poll_all();
        self.post_backlogs();
        for qid in 0..self.cqs.len() as u16 {
            self.signal_unread(qid);
        }
    }

    /// Signals a completion queue with unconsumed entries, even if these were signalled before.
    pub(super) fn signal_unread(&mut self, qid: u16) {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
            return;
        };
        let cells = self.doorbells.cells(qid, DoorbellKind::CqHead);
        refresh_head(cq, cells, &mut self.events, qid);
        if !cq.has_unconsumed() {
            return;
        }
        cq.dirty = true;
        if self.irqs.pin_based() {
            // INTx needs no signal here, because each round computes its level from all queues.
            return;
        }
        self.signal_now(qid);
    }

    /// Requests that outstanding commands end early. Their completions are kept for the host.
    pub(super) fn end_commands_early(&mut self) {
        self.bus_master.ends_commands = true;
        let in_flight: Vec<(u64, usize)> = self.slots.guests_in_flight(self.own_stays()).collect();
        for (tag, ns) in in_flight {
            self.cancel(tag, ns);
        }
    }
}
