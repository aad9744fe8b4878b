//! Counters of a disk: written by the threads of its queues, read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that one thread counts up.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Only its owner does this: no other store can get lost.
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }
}

/// Counters of one queue since the disk was made.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Reads done.
    pub reads: Counter,
    /// Bytes read.
    pub bytes_read: Counter,
    /// Writes done.
    pub writes: Counter,
    /// Bytes written.
    pub bytes_written: Counter,
    /// Flushes done.
    pub flushes: Counter,
    /// Ranges zeroed or deallocated.
    pub discards: Counter,
    /// Requests that failed.
    pub errors: Counter,
    /// Times that the thread slept.
    pub sleeps: Counter,
}

impl QueueStats {
    /// Requests of all kinds that were done.
    pub fn requests(&self) -> u64 {
        let counters = [&self.reads, &self.writes, &self.flushes, &self.discards];
        let sum = |sum: u64, counter: &Counter| sum.wrapping_add(counter.get());
        counters.into_iter().fold(0, sum)
    }
}

/// Counters of a disk.
#[derive(Debug)]
pub struct DiskStats {
    /// The device's number: N of `/dev/ublkbN`.
    pub id: u32,
    /// One for each queue.
    pub queues: Vec<QueueStats>,
}
