//! Interrupts for completion queue entries, and their coalescing.

use super::Events;
use super::doorbells::DoorbellKind;
use super::invariant::broken;
use super::post::refresh_head;
use super::queues::Queues;
use crate::irq::Irqs;
use crate::stats::ControllerStats;
use std::time::{Duration, Instant};

/// Settings of interrupt coalescing ("NVMe Base 2.1", 5.1.25.2.2). The admin queue and vectors with
/// coalescing disabled are exempt.
#[derive(Clone, Copy, Default)]
pub(crate) struct Coalescing {
    /// Number of completions that trigger an interrupt (Aggregation Threshold plus one); 0 and 1
    /// disable coalescing.
    pub threshold: u32,
    /// Maximum delay of an interrupt (Aggregation Time); zero disables interrupt coalescing.
    pub time: Duration,
    /// Bit mask of the interrupt vectors for which coalescing is disabled.
    pub disabled: u128,
}

impl Coalescing {
    fn applies(&self, qid: u16, vector: u16) -> bool {
        qid != 0
            && self.threshold > 1
            && !self.time.is_zero()
            && self.disabled >> vector.min(127) & 1 == 0
    }
}

/// Sends and counts the interrupt of a completion queue.
#[inline]
fn interrupt(irqs: &mut Irqs, stats: &ControllerStats, qid: u16, vector: u16) {
    let start = probes::cycles();
    irqs.trigger(vector);
    if let Some(stats) = stats.queues.get(usize::from(qid)) {
        let cycles = probes::cycles().wrapping_sub(start);
        stats.interrupts.add(1);
        stats.interrupt_cycles().record(cycles);
    }
}

impl Queues {
    /// Sends the due interrupts of completions posted since the last call.
    pub(super) fn send_interrupts(
        &mut self,
        irqs: &mut Irqs,
        coalescing: &Coalescing,
        now: Instant,
        events: &mut Events,
    ) {
        if irqs.pin_based() {
            return self.send_pin(irqs, events);
        }
        let mut i = 0;
        while let Some(&qid) = self.dirty.get(i) {
            if self.signal(qid, irqs, coalescing, now, events) {
                self.dirty.swap_remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// Sends the interrupt of one queue. Returns `false` when the interrupt is delayed.
    fn signal(
        &mut self,
        qid: u16,
        irqs: &mut Irqs,
        coalescing: &Coalescing,
        now: Instant,
        events: &mut Events,
    ) -> bool {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
            broken(events, "a completion queue with entries to signal is gone");
            return true;
        };
        if let Some(vector) = cq.vector {
            if coalescing.applies(qid, vector) && cq.unsignalled < coalescing.threshold {
                let since = *cq.unsignalled_since.get_or_insert(now);
                if now.saturating_duration_since(since) < coalescing.time {
                    return false;
                }
            }
            interrupt(irqs, &self.stats, qid, vector);
        }
        cq.signalled();
        true
    }

    /// Sends the delayed interrupt of a queue now.
    pub(super) fn signal_now(&mut self, qid: u16, irqs: &mut Irqs, events: &mut Events) {
        self.dirty.retain(|&q| q != qid);
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
            return broken(events, "a completion queue is to be signalled that is gone");
        };
        let told = !cq.dirty;
        cq.signalled();
        if let Some(vector) = cq.vector
            && !told
        {
            interrupt(irqs, &self.stats, qid, vector);
        }
    }

    /// Sets the level of the INTx pin: high while any queue with interrupts enabled has entries
    /// that the host has not consumed. Checking all queues is acceptable, because only hosts
    /// without MSI-X use the pin.
    fn send_pin(&mut self, irqs: &mut Irqs, events: &mut Events) {
        self.dirty.clear();
        let mut level = false;
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            let Some(cq) = cq else {
                continue;
            };
            cq.signalled();
            if cq.vector.is_some() && cq.has_unconsumed() {
                let cells = self.doorbells.cells(qid as u16, DoorbellKind::CqHead);
                refresh_head(cq, cells, events, qid as u16);
                level |= cq.has_unconsumed();
            }
        }
        irqs.set_level(level);
    }

    /// Returns the time at which the next delayed interrupt is due.
    pub(super) fn next_interrupt(&self, coalescing: &Coalescing) -> Option<Instant> {
        let since = |qid: &u16| self.cqs.get(usize::from(*qid))?.as_ref()?.unsignalled_since;
        Some(self.dirty.iter().filter_map(since).min()? + coalescing.time)
    }
}
