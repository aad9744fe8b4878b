//! Flushes at the controller's own request (shutdown, write cache disabled, detached namespace).

use super::{Event, Events, NamespaceTable};
use nvme::Status;
use std::collections::VecDeque;

/// Flushes that the controller itself has requested of this engine.
#[derive(Default)]
pub(super) struct Flushes {
    /// Indices of the namespaces that are left to flush.
    waiting: VecDeque<usize>,
    /// Number of flushes that wait or are in progress.
    pending: usize,
    /// First error since the last [`Event::Flushed`].
    failed: Option<Status>,
    /// Number of the last flush that the control half has ordered.
    number: u64,
}

impl Flushes {
    /// Returns whether a flush waits until no command is outstanding. Nothing is fetched meanwhile.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of flushes that wait or are in progress.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns the number of the last flush that the control half has ordered.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns whether the namespace at this index is left to flush.
    pub fn waits_for(&self, ns: usize) -> bool {
        self.waiting.contains(&ns)
    }

    /// Requests flush `number` of all namespaces. [`Event::Flushed`] reports the end.
    pub fn request(&mut self, number: u64, all: &NamespaceTable, events: &mut Events) {
        self.number = number;
        // All requested flushes share one [`Event::Flushed`]. An event that is queued already does
        // not include this flush.
        events.retain(|event| {
            if let Event::Flushed { failed, .. } = event {
                self.failed = self.failed.or(*failed);
                return false;
            }
            true
        });
        for (ns, namespace) in all.iter().enumerate() {
            // If a namespace was closed, this flush waits for its outstanding commands.
            let wanted = namespace.volatile_cache || namespace.closed.is_some();
            if wanted && !namespace.read_only {
                self.waiting.push_back(ns);
                self.pending += 1;
            }
        }
        self.report(events);
    }

    /// Counts a flush that the caller starts itself.
    pub fn started(&mut self) {
        self.pending += 1;
    }

    /// Records the error of a flush. The first one is reported.
    pub fn failed(&mut self, status: Status) {
        self.failed.get_or_insert(status);
    }

    /// Counts the end of a flush.
    pub fn ended(&mut self, events: &mut Events) {
        self.pending = self.pending.saturating_sub(1);
        self.report(events);
    }

    /// Reports to the control half that all flushes it has requested have completed.
    fn report(&mut self, events: &mut Events) {
        if self.pending == 0 {
            let (number, failed) = (self.number, self.failed.take());
            events.push_back(Event::Flushed { number, failed });
        }
    }

    /// Returns the namespace to flush next, once only this engine's own flushes are among the
    /// `outstanding` commands.
    pub fn next(&self, outstanding: usize) -> Option<usize> {
        let alone = outstanding + self.waiting.len() == self.pending;
        self.waiting.front().copied().filter(|_| alone)
    }

    /// Removes the first waiting flush, which was started.
    pub fn started_first(&mut self) {
        self.waiting.pop_front();
    }
}
