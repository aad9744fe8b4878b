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

use super::Events;
use super::doorbells::DoorbellKind;
use super::journal::Journal;
use super::post::refresh_head;
use super::queues::Queues;
use crate::irq::Irqs;

/// State of Bus Master Enable in an engine.
#[derive(Default)]
pub(crate) struct BusMaster {
    /// Whether the bit is set. While it is clear, no queue has its ring, and shadow buffers are
    /// unmapped.
    pub is_enabled: bool,
    /// Number of times that the control half has set the bit.
    pub count: u64,
    /// Whether outstanding commands were asked to end early after the bit was cleared.
    pub ends_commands: bool,
}

impl Queues {
    /// Returns whether Bus Master Enable is set, so that the function may access the host's memory.
    pub fn is_master(&self) -> bool {
        self.bus_master.is_enabled
    }

    /// Returns how many times Bus Master Enable was set, see [`BusMaster::count`].
    pub fn masterings(&self) -> u64 {
        self.bus_master.count
    }

    /// Releases rings and shadow buffers after Bus Master Enable was cleared.
    pub(super) fn end_mastering(&mut self, journal: &Journal, events: &mut Events) {
        self.release_shadow(journal, events);
        self.bus_master.is_enabled = false;
        self.release_rings(journal);
        // Queues with unread entries are signalled when the bit is set again.
        for qid in std::mem::take(&mut self.dirty) {
            if let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) {
                cq.signalled();
            }
        }
    }

    /// Releases the rings of all queues, whose memory must not be accessed.
    pub(super) fn release_rings(&mut self, journal: &Journal) {
        (self.sqs.iter_mut().flatten()).for_each(|sq| sq.memory.release());
        (self.cqs.iter_mut().flatten()).for_each(|cq| cq.memory.release());
        self.note(journal);
    }

    /// Signals all completion queues with unconsumed entries.
    pub(super) fn signal_all_unread(&mut self, irqs: &mut Irqs, events: &mut Events) {
        for qid in 0..self.cqs.len() as u16 {
            self.signal_unread(qid, irqs, events);
        }
    }

    /// Signals a completion queue with unconsumed entries, even if these were signalled before.
    pub(super) fn signal_unread(&mut self, qid: u16, irqs: &mut Irqs, events: &mut Events) {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
            return;
        };
        let cells = self.doorbells.cells(qid, DoorbellKind::CqHead);
        refresh_head(cq, cells, events, qid);
        if !cq.has_unconsumed() {
            return;
        }
        cq.dirty = true;
        if irqs.pin_based() {
            // INTx needs no signal here, because each round computes its level from all queues.
            return;
        }
        self.signal_now(qid, irqs, events);
    }
}
