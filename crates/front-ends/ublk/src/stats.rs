//! Counters of a disk, which its queues' threads write and any thread may read.

use probes::{Counter, IoRecord};

/// Counters of a queue of a ublk disk since the disk was created.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Number of requests that the kernel has sent to the queue.
    pub requests: Counter,
    /// Results of requests by kind; zeroing and deallocation count as other.
    pub io: IoRecord,
    /// Number of times that the queue's thread has slept.
    pub sleeps: Counter,
}

/// Counters of a ublk disk and its queues.
#[derive(Debug)]
pub struct DiskStats {
    /// Number N of the device `/dev/ublkbN`.
    pub id: u32,
    /// Counters of each queue of the disk.
    pub queues: Vec<QueueStats>,
}
