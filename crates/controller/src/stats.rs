//! Counters, each written by the one thread that owns what is counted, and read by anyone without
//! stopping it.

use probes::{Histogram, Summary};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A counter with one writer: a plain load and store, no read-modify-write.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owner calls this.
    pub fn add(&self, n: u64) {
        let now = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(now, Ordering::Relaxed);
    }

    /// Sets it, where it is no count but a state. Only the owner calls this.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one queue pair: index 0 is the admin queue.
///
/// They go with the queue from worker to worker; no two queues share a cache line, as they may be
/// at work on two cores.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// Commands fetched.
    pub commands: Counter,
    /// Completions posted.
    pub completions: Counter,
    /// Doorbells that came as register writes: an exit and a message each. Counted by the
    /// controller's own worker.
    pub mmio_doorbells: Counter,
    /// Times that a new submission queue tail was found in memory.
    pub shadow_doorbells: Counter,
    /// Times that EventIdx was armed before going to sleep.
    pub arms: Counter,
    /// Interrupts sent for the queue's completions.
    pub interrupts: Counter,
    /// The worker that the queue lives on. Set by the controller's own worker.
    pub worker: Counter,
    /// Made when the first one is sent: most queues never send any.
    interrupt_cycles: OnceLock<Box<Histogram>>,
}

impl QueueStats {
    /// Cycles ([`probes::cycles`]) to send an interrupt, system call included. Only the owner
    /// records.
    pub fn interrupt_cycles(&self) -> &Histogram {
        self.interrupt_cycles.get_or_init(Box::default)
    }

    /// What was recorded there.
    pub fn interrupt_summary(&self) -> Summary {
        let recorded = self.interrupt_cycles.get();
        recorded.map_or_else(Summary::default, |histogram| histogram.summary())
    }
}

/// What one worker did for a controller.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoStats {
    /// Read commands completed (Read, Compare and Verify).
    pub host_reads: Counter,
    /// Write commands completed.
    pub host_writes: Counter,
    /// Bytes read by the host.
    pub bytes_read: Counter,
    /// Bytes written by the host.
    pub bytes_written: Counter,
    /// Nanoseconds in which at least one I/O command was outstanding on this worker.
    pub busy_ns: Counter,
}

/// What a controller did since it was made: SMART's counters and more ("NVMe Base 2.1",
/// 5.1.12.1.3).
#[derive(Debug, Default)]
pub struct ControllerStats {
    /// Commands that ended with a media and data integrity error.
    pub media_errors: Counter,
    /// Entries ever made in the error log.
    pub error_log_entries: Counter,
    /// Times that the controller was powered on, i.e. a VMM attached.
    pub power_cycles: Counter,
    /// Times that power was lost, the controller reset or the VMM gone without a shutdown
    /// notification.
    pub unsafe_shutdowns: Counter,
    /// Controller-level resets.
    pub resets: Counter,
    /// Queues that went from one worker to another.
    pub migrations: Counter,
    /// Per queue pair, admin first.
    pub queues: Vec<QueueStats>,
    /// Per worker, the controller's own first.
    pub shares: Vec<Arc<IoStats>>,
}

impl ControllerStats {
    /// Counters for the admin queue and `io_queues` more, which may live on `workers` workers.
    pub fn new(io_queues: u16, workers: u16) -> Self {
        ControllerStats {
            queues: (0..=io_queues).map(|_| QueueStats::default()).collect(),
            shares: (0..workers.max(1)).map(|_| Arc::default()).collect(),
            ..Default::default()
        }
    }

    fn sum(&self, each: impl Fn(&IoStats) -> &Counter) -> u64 {
        let all = self.shares.iter().map(|share| each(share).get());
        all.fold(0, u64::wrapping_add)
    }

    /// Read commands completed (Read, Compare and Verify).
    pub fn host_reads(&self) -> u64 {
        self.sum(|share| &share.host_reads)
    }

    /// Write commands completed.
    pub fn host_writes(&self) -> u64 {
        self.sum(|share| &share.host_writes)
    }

    /// Bytes read by the host.
    pub fn bytes_read(&self) -> u64 {
        self.sum(|share| &share.bytes_read)
    }

    /// Bytes written by the host.
    pub fn bytes_written(&self) -> u64 {
        self.sum(|share| &share.bytes_written)
    }

    /// Nanoseconds in which at least one I/O command was outstanding: those of the busiest worker,
    /// as nobody adds up over all of them when they overlap.
    pub fn busy_ns(&self) -> u64 {
        let all = self.shares.iter().map(|share| share.busy_ns.get());
        all.max().unwrap_or(0)
    }
}
