//! Epochs that delay the reuse of freed clusters.
//!
//! A worker looks up an entry and starts its request on the cluster found there, while another
//! worker may remove the entry. A freed cluster may therefore be reused only when all requests have
//! completed that began before the entry was removed. Time is counted in epochs: removing entries
//! begins a new epoch, and each queue publishes the oldest epoch of its outstanding requests.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use sync::Unpoisoned;

/// Epochs of an image, by which freed clusters are reused only after older requests have ended.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    now: AtomicU64,
    queues: Mutex<Vec<Weak<OldestEpoch>>>,
}

/// Oldest epoch with outstanding requests of one queue, readable from any thread.
#[derive(Debug)]
pub(crate) struct OldestEpoch(AtomicU64);

/// Value of [`OldestEpoch`] for a queue without outstanding requests.
const IDLE: u64 = u64::MAX;

impl Epochs {
    /// Returns the current epoch. Entries that were removed before it began are no longer found by
    /// lookups.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    /// Adds a queue without outstanding requests.
    pub(crate) fn join(&self) -> Arc<OldestEpoch> {
        let seen = Arc::new(OldestEpoch(AtomicU64::new(IDLE)));
        self.queues.lock().unpoisoned().push(Arc::downgrade(&seen));
        seen
    }

    /// Returns whether there is a queue.
    pub(crate) fn has_queues(&self) -> bool {
        let queues = self.queues.lock().unpoisoned();
        queues.iter().any(|queue| queue.strong_count() > 0)
    }

    /// Begins a new epoch after entries were removed. Their clusters may be used again when
    /// [`Epochs::oldest`] is the result, or later.
    pub(crate) fn advance(&self) -> u64 {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        // A queue that is idle as it is looked at finds the entries removed when it begins:
        // `OldestEpoch::begin` has the other fence.
        fence(Ordering::SeqCst);
        now
    }

    /// Returns the oldest epoch in which an outstanding request may have begun.
    pub(crate) fn oldest(&self) -> u64 {
        let mut queues = self.queues.lock().unpoisoned();
        let mut oldest = self.now.load(Ordering::SeqCst);
        queues.retain(|queue| match queue.upgrade() {
            Some(seen) => {
                oldest = oldest.min(seen.0.load(Ordering::SeqCst));
                true
            }
            None => false,
        });
        oldest
    }
}

impl OldestEpoch {
    /// Publishes that an idle queue starts a request. To be called before an entry is looked up.
    pub(crate) fn begin(&self, epochs: &Epochs) -> u64 {
        let now = epochs.now();
        self.0.store(now, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        now
    }

    /// Publishes that every outstanding request of the queue began in `epoch` or later.
    pub(crate) fn advance(&self, epoch: u64) {
        self.0.store(epoch, Ordering::Release);
    }

    /// Publishes that the queue has no outstanding requests.
    pub(crate) fn idle(&self) {
        self.0.store(IDLE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_request_delays_reuse() {
        let epochs = Epochs::default();
        let (one, two) = (epochs.join(), epochs.join());
        assert_eq!(epochs.oldest(), 0);
        assert_eq!(one.begin(&epochs), 0);
        let freed = epochs.advance();
        assert!(epochs.oldest() < freed, "one may have found it");
        two.begin(&epochs);
        one.advance(epochs.now());
        assert_eq!(epochs.oldest(), freed);
        let freed = epochs.advance();
        two.idle();
        assert!(epochs.oldest() < freed);
        drop(one);
        assert!(epochs.has_queues());
        assert_eq!(
            epochs.oldest(),
            freed,
            "a queue that is gone has nothing in flight"
        );
    }
}
