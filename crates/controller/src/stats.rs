//! Counters, each written by the one thread that owns the counted object, and read by any thread
//! without stopping the writer.

pub use probes::Counter;
use probes::{Histogram, IoKind, IoRecord, Summary};
use std::sync::{Arc, OnceLock};

/// Counters of one queue pair: index 0 is the admin queue.
///
/// Counters move with their queue from worker to worker. No two queues share a cache line, as
/// they may be used on two cores.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// Commands fetched.
    pub commands: Counter,
    /// Completions posted.
    pub completions: Counter,
    /// Doorbells that arrived as register writes: an exit and a message each. Counted by the
    /// controller's own worker.
    pub mmio_doorbells: Counter,
    /// Times that a new submission queue tail was found in memory.
    pub shadow_doorbells: Counter,
    /// Times that EventIdx was armed before going to sleep.
    pub arms: Counter,
    /// Interrupts sent for the queue's completions.
    pub interrupts: Counter,
    /// Number of the worker that the queue lives on. Set by the controller's own worker.
    pub worker: Counter,
    /// Created when the first interrupt is sent: most queues never send any.
    interrupt_cycles: OnceLock<Box<Histogram>>,
}

impl QueueStats {
    /// Returns the histogram of cycles ([`probes::cycles`]) to send an interrupt, system call
    /// included. Only the owner records.
    pub fn interrupt_cycles(&self) -> &Histogram {
        self.interrupt_cycles.get_or_init(Box::default)
    }

    /// Returns a summary of [`QueueStats::interrupt_cycles`].
    pub fn interrupt_summary(&self) -> Summary {
        let recorded = self.interrupt_cycles.get();
        recorded.map_or_else(Summary::default, |histogram| histogram.summary())
    }
}

/// Counters of one worker's I/O for a controller.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoStats {
    /// Nanoseconds in which at least one I/O command was outstanding on this worker.
    pub busy_ns: Counter,
    /// Records by namespace; the record of NSID 0 has commands for namespaces that the controller
    /// does not have.
    namespaces: OnceLock<Box<NamespaceRecord>>,
}

/// Node of a list of namespace records. The list only grows, so that it is read without a lock. A
/// detached namespace keeps its record, and uses it again when it is reattached; there are no
/// more records than valid NSIDs.
#[derive(Debug)]
struct NamespaceRecord {
    nsid: u32,
    record: Arc<IoRecord>,
    next: OnceLock<Box<NamespaceRecord>>,
}

impl IoStats {
    /// Returns the record of a namespace, which is created at the first call.
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

    /// Returns all records, with their NSIDs.
    pub fn namespaces(&self) -> impl Iterator<Item = (u32, &IoRecord)> {
        let first = self.namespaces.get();
        let all = std::iter::successors(first, |entry| entry.next.get());
        all.map(|entry| (entry.nsid, &*entry.record))
    }
}

/// I/O counters of a controller from processes that have ended.
#[derive(Debug, Default)]
pub struct EarlierIo {
    /// Read commands.
    pub reads: Counter,
    /// Write commands.
    pub writes: Counter,
    /// Bytes read by the host.
    pub bytes_read: Counter,
    /// Bytes written by the host.
    pub bytes_written: Counter,
    /// Nanoseconds in which a command was outstanding.
    pub busy_ns: Counter,
}

/// Counters of a controller since its creation: SMART's counters and more ("NVMe Base 2.1",
/// 5.1.12.1.3).
#[derive(Debug, Default)]
pub struct ControllerStats {
    /// Commands that ended with a media and data integrity error.
    pub media_errors: Counter,
    /// Entries ever made in the error log.
    pub error_log_entries: Counter,
    /// Times that the controller was powered on, i.e. a VMM attached.
    pub power_cycles: Counter,
    /// Times that power was lost, or the controller was reset or the VMM disconnected, without a
    /// shutdown notification.
    pub unsafe_shutdowns: Counter,
    /// 1 while a client is attached, else 0. Set by the server of its socket.
    pub connected: Counter,
    /// Controller-level resets.
    pub resets: Counter,
    /// Migrations of queues from one worker to another.
    pub migrations: Counter,
    /// Counters of earlier processes, as far as SMART reports them.
    pub before: EarlierIo,
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

    /// Returns the records of all namespaces that have one, of each worker; the records of a
    /// namespace have to be added up.
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

    /// Bytes read by the host.
    pub fn bytes_read(&self) -> u64 {
        self.sum(IoRecord::bytes_read)
            .wrapping_add(self.before.bytes_read.get())
    }

    /// Bytes written by the host.
    pub fn bytes_written(&self) -> u64 {
        self.sum(IoRecord::bytes_written)
            .wrapping_add(self.before.bytes_written.get())
    }

    /// Returns the nanoseconds in which at least one I/O command was outstanding: those of the
    /// busiest worker, because the overlap of workers is not known.
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
    fn a_namespace_has_one_record_for_each_worker_and_keeps_it() {
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
