//! Counters, written by the one thread that owns the queues and read by anyone without stopping it.

use probes::{Histogram, Summary};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer: a plain load and store, no read-modify-write.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owner calls this.
    pub fn add(&self, n: u64) {
        let now = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(now, Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one queue pair: index 0 is the admin queue.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Commands fetched.
    pub commands: Counter,
    /// Completions posted.
    pub completions: Counter,
    /// Doorbells that came as register writes: an exit and a message each.
    pub mmio_doorbells: Counter,
    /// Times that a new submission queue tail was found in memory.
    pub shadow_doorbells: Counter,
    /// Times that EventIdx was armed before going to sleep.
    pub arms: Counter,
    /// Interrupts sent for the queue's completions.
    pub interrupts: Counter,
    /// Made when the first one is sent: most queues never send any.
    interrupt_cycles: OnceLock<Box<Histogram>>,
}

impl QueueStats {
    /// Cycles ([`probes::cycles`]) to send an interrupt, system call included. Only the owner records.
    pub fn interrupt_cycles(&self) -> &Histogram {
        self.interrupt_cycles.get_or_init(Box::default)
    }

    /// What was recorded there.
    pub fn interrupt_summary(&self) -> Summary {
        let recorded = self.interrupt_cycles.get();
        recorded.map_or_else(Summary::default, |histogram| histogram.summary())
    }
}

/// What a controller did since it was made: SMART's counters and more ("NVMe Base 2.1", 5.1.12.1.3).
#[derive(Debug, Default)]
pub struct ControllerStats {
    /// Read commands completed (Read, Compare and Verify).
    pub host_reads: Counter,
    /// Write commands completed.
    pub host_writes: Counter,
    /// Bytes read by the host.
    pub bytes_read: Counter,
    /// Bytes written by the host.
    pub bytes_written: Counter,
    /// Nanoseconds in which at least one I/O command was outstanding.
    pub busy_ns: Counter,
    /// Commands that ended with a media and data integrity error.
    pub media_errors: Counter,
    /// Entries ever made in the error log.
    pub error_log_entries: Counter,
    /// Times that the controller was powered on, i.e. a VMM attached.
    pub power_cycles: Counter,
    /// Times that power was lost, the controller reset or the VMM gone without a shutdown notification.
    pub unsafe_shutdowns: Counter,
    /// Controller-level resets.
    pub resets: Counter,
    /// Per queue pair, admin first.
    pub queues: Vec<QueueStats>,
}

impl ControllerStats {
    /// Counters for the admin queue and `io_queues` more.
    pub fn new(io_queues: u16) -> Self {
        ControllerStats {
            queues: (0..=io_queues).map(|_| QueueStats::default()).collect(),
            ..Default::default()
        }
    }
}
