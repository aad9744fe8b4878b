//! Counters of a ring, for its owner and for other threads.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a worker's [`Io`](crate::Io), from its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// Requests started.
    pub requests: u64,
    /// Operations handed to the kernel; more than `requests` where requests took several steps.
    pub operations: u64,
    /// Times that operations were sent to the kernel: each is one system call for all that were
    /// started before it, or none where a thread of the kernel takes them.
    pub batches: u64,
    /// System calls made: those of the batches, and those that let the kernel post completions
    /// while there was nothing to submit.
    pub system_calls: u64,
    /// Operations on memory that the kernel has pinned.
    pub fixed: u64,
    /// Requests copied through a bounce buffer, as the device could not reach their memory
    /// directly.
    pub bounced: u64,
    /// Operations that moved only a part of their data, and were continued.
    pub continued: u64,
}

/// The counters for other threads: written by the worker at the end of each round with a system
/// call, with plain stores.
#[derive(Debug, Default)]
pub struct IoStats {
    requests: AtomicU64,
    operations: AtomicU64,
    batches: AtomicU64,
    system_calls: AtomicU64,
    fixed: AtomicU64,
    bounced: AtomicU64,
    continued: AtomicU64,
}

impl IoStats {
    /// Only the owner of the ring calls this. Relaxed: each number stands for itself.
    pub(super) fn publish(&self, counters: &IoCounters) {
        self.requests.store(counters.requests, Ordering::Relaxed);
        self.operations
            .store(counters.operations, Ordering::Relaxed);
        self.batches.store(counters.batches, Ordering::Relaxed);
        self.system_calls
            .store(counters.system_calls, Ordering::Relaxed);
        self.fixed.store(counters.fixed, Ordering::Relaxed);
        self.bounced.store(counters.bounced, Ordering::Relaxed);
        self.continued.store(counters.continued, Ordering::Relaxed);
    }

    /// The counters as they were at the end of the last round with a system call.
    pub fn counters(&self) -> IoCounters {
        IoCounters {
            requests: self.requests.load(Ordering::Relaxed),
            operations: self.operations.load(Ordering::Relaxed),
            batches: self.batches.load(Ordering::Relaxed),
            system_calls: self.system_calls.load(Ordering::Relaxed),
            fixed: self.fixed.load(Ordering::Relaxed),
            bounced: self.bounced.load(Ordering::Relaxed),
            continued: self.continued.load(Ordering::Relaxed),
        }
    }
}
