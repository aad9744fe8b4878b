//! State and counters of a daemon at one moment. Counters count since the process began.

use crate::Distribution;
use probes::{Failure, IoKind, IoRecord};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// State and counters of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Time of the snapshot, in nanoseconds of a monotonic clock, for rates.
    pub at_ns: u64,
    /// Disks, in the order of the configuration.
    pub disks: Vec<Disk>,
    /// Names of disks that are unavailable.
    #[serde(default)]
    pub unserved: Vec<String>,
    /// Volumes with limits or weights.
    pub limits: Vec<Limits>,
    /// Volumes whose requests have failed, or that have an error policy.
    #[serde(default)]
    pub on_error: Vec<OnError>,
    /// Devices below.
    pub devices: Vec<Device>,
    /// The workers, by number.
    pub workers: Vec<Worker>,
    /// The process itself.
    pub process: Process,
}

/// Kind of a disk's front-end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskKind {
    /// An NVMe controller, over vfio-user.
    #[default]
    Controller,
    /// A virtio block device, over vhost-user.
    VhostUserBlk,
    /// A block device of the host.
    Ublk,
}

impl DiskKind {
    /// Returns the name used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::VhostUserBlk => "vhost-user-blk",
            Self::Ublk => "ublk",
        }
    }
}

/// State and counters of one disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    /// Name of the disk, unique in the daemon.
    pub name: String,
    /// Kind of the front-end.
    pub kind: DiskKind,
    /// Socket or block device of the disk.
    pub address: String,
    /// A client is attached.
    pub connected: bool,
    /// Clients that were accepted.
    pub connections: u64,
    /// Controller-level resets.
    pub resets: u64,
    /// Queues that went from one worker to another.
    pub migrations: u64,
    /// Counters of each namespace. Exports and block devices have one, number 1.
    pub namespaces: Vec<Namespace>,
    /// Queues that were used.
    pub queues: Vec<Queue>,
}

impl Disk {
    /// Returns the number of I/O commands that were fetched and not completed. A controller's admin
    /// queue always has one, which waits for events.
    pub fn in_flight(&self) -> u64 {
        let admin = |queue: &Queue| self.kind == DiskKind::Controller && queue.id == 0;
        let io = self.queues.iter().filter(|queue| !admin(queue));
        io.map(Queue::in_flight).fold(0, u64::wrapping_add)
    }
}

/// Numbers by operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operations {
    /// Reads, and Compare.
    pub read: u64,
    /// Writes.
    pub write: u64,
    /// Flushes.
    pub flush: u64,
    /// Remaining kinds.
    pub other: u64,
}

impl Operations {
    /// Returns the count of one kind.
    pub const fn of(&self, kind: IoKind) -> u64 {
        match kind {
            IoKind::Read => self.read,
            IoKind::Write => self.write,
            IoKind::Flush => self.flush,
            IoKind::Other => self.other,
        }
    }

    const fn of_mut(&mut self, kind: IoKind) -> &mut u64 {
        match kind {
            IoKind::Read => &mut self.read,
            IoKind::Write => &mut self.write,
            IoKind::Flush => &mut self.flush,
            IoKind::Other => &mut self.other,
        }
    }

    /// Returns the sum of all kinds.
    pub fn all(&self) -> u64 {
        let each = IoKind::ALL.map(|kind| self.of(kind));
        each.into_iter().fold(0, u64::wrapping_add)
    }
}

/// Counters of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Namespace {
    /// Namespace ID; 0: commands without an existing namespace.
    pub nsid: u32,
    /// Path or URL of its volume; empty where that is not known any more.
    pub volume: String,
    /// Commands that ended, well or not.
    pub operations: Operations,
    /// Number of bytes that the host has read.
    pub bytes_read: u64,
    /// Number of bytes that the host has written.
    pub bytes_written: u64,
    /// Commands that failed, by kind; kinds that did not happen are left out.
    pub errors: BTreeMap<String, u64>,
    /// Times of commands in nanoseconds from fetch to post, by operation: of reads and writes one
    /// in 61, of further operations all.
    pub latency: BTreeMap<String, Distribution>,
    /// Commands that a queue had in flight when one was fetched that is timed.
    pub depth: Distribution,
    /// Whether commands take the direct path to a device now; `None` if there is no such path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
    /// Commands that took it.
    #[serde(default)]
    pub direct_commands: u64,
    /// Number of direct commands whose data was copied.
    #[serde(default)]
    pub direct_bounced: u64,
}

impl Namespace {
    /// Creates empty counters.
    pub fn new(nsid: u32) -> Self {
        Self {
            nsid,
            ..Self::default()
        }
    }

    /// Adds the counters of one worker, or one queue. `ns_per_cycle`: nanoseconds for each cycle of
    /// [`probes::cycles`].
    pub fn add(&mut self, record: &IoRecord, ns_per_cycle: f64) {
        let add = |to: &mut u64, n: u64| *to = to.wrapping_add(n);
        for kind in IoKind::ALL {
            add(self.operations.of_mut(kind), record.operations(kind).get());
            if let Some(histogram) = record.latency(kind) {
                let latency = self.latency.entry(kind.name().to_owned()).or_default();
                latency.add(&Distribution::of(histogram, ns_per_cycle));
            }
        }
        add(&mut self.bytes_read, record.bytes_read().get());
        add(&mut self.bytes_written, record.bytes_written().get());
        for failure in Failure::ALL {
            let count = record.failures(failure);
            if count > 0 {
                add(
                    self.errors.entry(failure.name().to_owned()).or_default(),
                    count,
                );
            }
        }
        if let Some(depth) = record.depth() {
            self.depth.add(&Distribution::of(depth, 1.0));
        }
    }

    /// Returns the number of commands that failed.
    pub fn failures(&self) -> u64 {
        self.errors.values().copied().fold(0, u64::wrapping_add)
    }
}

/// Queue pair of a controller, or request queue of an export or block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Queue identifier; 0 is a controller's admin queue.
    pub id: u64,
    /// The worker that serves it now, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u64>,
    /// Commands fetched.
    pub commands: u64,
    /// Commands completed.
    pub completions: u64,
    /// Doorbells that arrived as register writes, or kicks.
    pub mmio_doorbells: u64,
    /// Doorbells that were found in memory.
    pub shadow_doorbells: u64,
    /// Times that it was armed before sleep.
    pub arms: u64,
    /// Interrupts sent.
    pub interrupts: u64,
}

impl Queue {
    /// Returns the number of commands fetched and not completed.
    pub const fn in_flight(&self) -> u64 {
        // The two were not read at the same moment.
        self.commands.saturating_sub(self.completions)
    }
}

/// Limits and weight of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Path or URL, as it was given.
    pub volume: String,
    /// Operations per second, together, reads, writes; 0: no limit.
    pub iops: [u64; 3],
    /// Bytes per second, together, read, written; 0: no limit.
    pub bps: [u64; 3],
    /// Requests that had to wait.
    pub delayed: u64,
    /// Sum of the throttled times, in nanoseconds.
    pub throttled_ns: u64,
    /// Weight among the slices of its device, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// Error counters of a volume's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnError {
    /// Path or URL, as it was given.
    pub volume: String,
    /// Reads that failed, each time that they did.
    pub read_errors: u64,
    /// Number of further requests that failed.
    pub write_errors: u64,
    /// Number of errors, of both kinds, for want of space.
    pub no_space: u64,
    /// Failed requests that were begun once more.
    pub repeated: u64,
    /// Requests that wait until somebody has the disk go on.
    pub held: u64,
}

/// A device below.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// URL of the device.
    pub device: String,
    /// State of the device: live, suspended or gone.
    pub state: String,
    /// Number of resets so far.
    pub resets: u64,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Number of the worker.
    pub id: u64,
    /// Nanoseconds in which it had work.
    pub busy_ns: u64,
    /// Time in which the worker polled without finding work.
    pub polling_ns: u64,
    /// Time in which the worker slept.
    pub asleep_ns: u64,
    /// Processor time of the thread, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Sleeps that have ended.
    pub wake_ups: u64,
    /// Times that it made no round for a second or longer.
    pub stalls: u64,
    /// Requests that went through its io_uring.
    pub ring_requests: u64,
    /// System calls of its io_uring.
    pub ring_calls: u64,
}

/// State of the process; fields that could not be read are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// The program's version.
    pub version: String,
    /// Process ID.
    #[serde(default)]
    pub pid: u32,
    /// Process ID of the keeper process, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper: Option<u32>,
    /// Processes that served before this one, under a keeper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// Time without service before this process replaced the previous one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_pause_ns: Option<u64>,
    /// End of the previous process, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_end: Option<String>,
    /// All configured disks are being served.
    #[serde(default)]
    pub ready: bool,
    /// Processor time in nanoseconds.
    pub cpu_ns: u64,
    /// Resident memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// Anonymous part of the resident memory, without files and guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anonymous: Option<u64>,
    /// Virtual memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_memory: Option<u64>,
    /// Number of threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u64>,
    /// Start time of the process, in seconds since 1970-01-01 UTC.
    pub start: f64,
}
