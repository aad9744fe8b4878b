//! Counters of a disk: written by the threads of its queues, read by anyone.

use probes::{Counter, IoRecord};

/// Counters of one queue since the disk was made.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Requests that the kernel has passed on.
    pub requests: Counter,
    /// What came of them, by kind; what zeroes or deallocates is among the others.
    pub io: IoRecord,
    /// Times that the thread slept.
    pub sleeps: Counter,
}

/// Counters of a disk.
#[derive(Debug)]
pub struct DiskStats {
    /// The device's number: N of `/dev/ublkbN`.
    pub id: u32,
    /// One for each queue.
    pub queues: Vec<QueueStats>,
}
