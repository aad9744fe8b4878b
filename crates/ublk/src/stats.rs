//! Counters of a disk, which its queues' threads write and any thread may read.

use probes::{Counter, IoRecord};

/// Counters of a queue since the disk was created.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Number of requests from the kernel.
    pub requests: Counter,
    /// Results of requests by kind; zeroing and deallocation count as other.
    pub io: IoRecord,
    /// Number of times that the thread slept.
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
