//! Counters of a disk: written by the threads of its queues, read by any thread.

use probes::{Counter, IoRecord};

/// Counters of a queue since the disk was created.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Requests that the kernel has passed on.
    pub requests: Counter,
    /// Results of requests by kind; zeroing and deallocation count as other.
    pub io: IoRecord,
    /// Times that the thread slept.
    pub sleeps: Counter,
}

/// Counters of a disk.
#[derive(Debug)]
pub struct DiskStats {
    /// The device's number: N of `/dev/ublkbN`.
    pub id: u32,
    /// Counters of each queue.
    pub queues: Vec<QueueStats>,
}
