//! Counters of a ring, for its owner and for other threads.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a worker's [`Io`](crate::Io) since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// Number of requests that were started on the ring.
    pub requests: u64,
    /// Number of operations passed to the kernel; more than `requests` when requests took several
    /// steps.
    pub operations: u64,
    /// Number of submissions of operations to the kernel. Each is one system call for all
    /// operations started before it, or none when a kernel thread takes them.
    pub batches: u64,
    /// Number of system calls: those of the batches, and those that let the kernel post completions
    /// while there was nothing to submit.
    pub system_calls: u64,
    /// Number of operations on memory that the kernel has pinned (fixed buffers).
    pub fixed: u64,
    /// Number of requests copied through a bounce buffer because the device could not access their
    /// memory directly.
    pub bounced: u64,
    /// Number of operations that moved only a part of their data and were continued.
    pub continued: u64,
}

/// Counters of a ring for other threads. The worker updates them with plain stores at the end of
/// each round with a system call.
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
    /// Publishes the counters; to be called only by the ring's owner. Relaxed ordering, because
    /// each number stands for itself.
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

    /// Returns the counters as of the end of the last round with a system call.
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
