//! Counters of controllers, queues and workers. One thread, the owner of the counted object, writes
//! each counter; any thread may read it without stopping the writer.

pub use probes::Counter;
use probes::{Histogram, IoKind, IoRecord, Summary};
use std::sync::{Arc, OnceLock};

/// Counters of one queue pair.
///
/// Counters migrate with their queue from worker to worker. Each set has cache lines of its own,
/// because two queues may be used on two cores.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// Number of commands fetched from the queue pair's submission queue.
    pub commands: Counter,
    /// Number of completions posted to the completion queue.
    pub completions: Counter,
    /// Doorbell writes that arrived as register accesses, each of which costs a VM exit and a
    /// message. The controller's own worker counts them.
    pub mmio_doorbells: Counter,
    /// Times that a new submission queue tail was found in memory, without a register access.
    pub shadow_doorbells: Counter,
    /// Number of times that EventIdx was armed before the worker slept, so that the host rings a
    /// doorbell.
    pub arms: Counter,
    /// Number of interrupts sent for completions of the queue.
    pub interrupts: Counter,
    /// Index of the worker that serves the queue, stored by the controller's own worker.
    pub worker: Counter,
    /// Histogram of the processor cycles spent on sending an interrupt; allocated at the first one.
    interrupt_cycles: OnceLock<Box<Histogram>>,
}

impl QueueStats {
    /// Returns the histogram of processor cycles ([`probes::cycles`]) spent on sending an
    /// interrupt, including the system call. Only the queue's worker records into it.
    pub fn interrupt_cycles(&self) -> &Histogram {
        self.interrupt_cycles.get_or_init(Box::default)
    }

    /// Returns a summary of the histogram [`QueueStats::interrupt_cycles`].
    pub fn interrupt_summary(&self) -> Summary {
        let recorded = self.interrupt_cycles.get();
        recorded.map_or_else(Summary::default, |histogram| histogram.summary())
    }
}

/// I/O counters of one controller that a single worker updates.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoStats {
    /// Nanoseconds during which at least one I/O command was outstanding on this worker.
    pub busy_ns: Counter,
    /// Linked list of records by namespace. The record of NSID 0 counts commands for namespaces
    /// that the controller does not have.
    namespaces: OnceLock<Box<NamespaceRecord>>,
}

/// Node of a linked list of namespace records. Nodes are only added, so that the list can be read
/// without a lock. A detached namespace keeps its record and reuses it when it is reattached, so
/// there are no more records than valid NSIDs.
#[derive(Debug)]
struct NamespaceRecord {
    nsid: u32,
    record: Arc<IoRecord>,
    next: OnceLock<Box<NamespaceRecord>>,
}

impl IoStats {
    /// Returns the I/O counters of a namespace on this worker. The first call for an NSID creates
    /// them.
    pub fn namespace(&self, nsid: u32) -> Arc<IoRecord> {
        let mut place = &self.namespaces;
        loop {
            let found = place.get_or_init(|| {
                Box::new(NamespaceRecord {
                    nsid,
                    record: Arc::default(),
                    next: OnceLock::new(),
                })
            });
            if found.nsid == nsid {
                return found.record.clone();
            }
            place = &found.next;
        }
    }

    /// Returns the I/O counters of each namespace on this worker, with its NSID.
    pub fn namespaces(&self) -> impl Iterator<Item = (u32, &IoRecord)> {
        let first = self.namespaces.get();
        let all = std::iter::successors(first, |entry| entry.next.get());
        all.map(|entry| (entry.nsid, &*entry.record))
    }
}

/// Sum of a controller's I/O counters in earlier processes that have served the disk.
#[derive(Debug, Default)]
pub struct EarlierIo {
    /// Number of completed read commands in earlier processes.
    pub reads: Counter,
    /// Number of completed write commands in earlier processes.
    pub writes: Counter,
    /// Number of bytes that the host has read in earlier processes.
    pub bytes_read: Counter,
    /// Number of bytes that the host has written in earlier processes.
    pub bytes_written: Counter,
    /// Nanoseconds in earlier processes during which at least one I/O command was outstanding.
    pub busy_ns: Counter,
}

/// Counters of a controller since its creation: those of the SMART / Health Information log page
/// ("NVMe Base 2.1", 5.1.12.1.3), and others.
#[derive(Debug, Default)]
pub struct ControllerStats {
    /// Number of commands that completed with a Media and Data Integrity error.
    pub media_errors: Counter,
    /// Number of entries that were ever added to the Error Information log.
    pub error_log_entries: Counter,
    /// Number of power cycles of the controller: a VMM has attached.
    pub power_cycles: Counter,
    /// Times that the controller lost power, was reset, or lost its VMM without a shutdown
    /// notification.
    pub unsafe_shutdowns: Counter,
    /// 1 while a client is attached, otherwise 0. Set by the server of the controller's socket.
    pub connected: Counter,
    /// Number of controller-level resets.
    pub resets: Counter,
    /// Number of migrations of queues between workers.
    pub migrations: Counter,
    /// I/O counters of earlier processes, which SMART data includes.
    pub before: EarlierIo,
    /// Counters of each queue pair by queue ID; index 0 is the admin queue.
    pub queues: Vec<QueueStats>,
    /// I/O counters of each worker that serves the controller; index 0 is the controller's own
    /// worker.
    pub shares: Vec<Arc<IoStats>>,
}

impl ControllerStats {
    /// Creates counters for the admin queue and `io_queues` I/O queues, which up to `workers`
    /// workers serve.
    pub fn new(io_queues: u16, workers: u16) -> Self {
        ControllerStats {
            queues: (0..=io_queues).map(|_| QueueStats::default()).collect(),
            shares: (0..workers.max(1)).map(|_| Arc::default()).collect(),
            ..Default::default()
        }
    }

    /// Returns the namespace records of all workers. Records with the same NSID have to be added
    /// up.
    pub fn namespaces(&self) -> impl Iterator<Item = (u32, &IoRecord)> {
        self.shares.iter().flat_map(|share| share.namespaces())
    }

    fn sum(&self, each: impl Fn(&IoRecord) -> &Counter) -> u64 {
        let all = self.namespaces().map(|(_, record)| each(record).get());
        all.fold(0, u64::wrapping_add)
    }

    /// Returns the number of completed read commands (Read, Compare and Verify).
    pub fn host_reads(&self) -> u64 {
        self.sum(|record| record.operations(IoKind::Read))
            .wrapping_add(self.before.reads.get())
    }

    /// Returns the number of completed write commands.
    pub fn host_writes(&self) -> u64 {
        self.sum(|record| record.operations(IoKind::Write))
            .wrapping_add(self.before.writes.get())
    }

    /// Returns the number of bytes that the host has read, in this process and in earlier ones that
    /// served the disk.
    pub fn bytes_read(&self) -> u64 {
        self.sum(IoRecord::bytes_read)
            .wrapping_add(self.before.bytes_read.get())
    }

    /// Returns the number of bytes that the host has written, in this process and in earlier ones
    /// that served the disk.
    pub fn bytes_written(&self) -> u64 {
        self.sum(IoRecord::bytes_written)
            .wrapping_add(self.before.bytes_written.get())
    }

    /// Returns the nanoseconds in which at least one I/O command was outstanding. The value is that
    /// of the busiest worker, because it is unknown how the workers' busy times overlap.
    pub fn busy_ns(&self) -> u64 {
        let all = self.shares.iter().map(|share| share.busy_ns.get());
        let before = self.before.busy_ns.get();
        all.max().unwrap_or(0).wrapping_add(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_keeps_one_record_per_worker() {
        let stats = ControllerStats::new(1, 2);
        for (share, nsid, reads) in [(0, 1, 5), (0, 7, 1), (1, 1, 2), (0, 1, 3)] {
            let record = stats.shares[share].namespace(nsid);
            record.operations(IoKind::Read).add(reads);
        }
        let all = stats
            .namespaces()
            .map(|(nsid, r)| (nsid, r.all_operations()));
        assert_eq!(all.collect::<Vec<_>>(), [(1, 8), (7, 1), (1, 2)]);
        assert_eq!(stats.host_reads(), 11);
    }
}
