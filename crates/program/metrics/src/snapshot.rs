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
    /// Names of the disks that are not served.
    #[serde(default)]
    pub unserved: Vec<String>,
    /// Rate limits and weights of the volumes that have any.
    pub limits: Vec<Limits>,
    /// Volumes whose requests have failed, or that have an error policy.
    #[serde(default)]
    pub on_error: Vec<OnError>,
    /// Physical devices that volumes are on.
    pub devices: Vec<Device>,
    /// Workers, by number.
    pub workers: Vec<Worker>,
    /// Properties of the process itself.
    pub process: Process,
}

/// State and counters of one disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    /// Name of the disk, unique in the daemon.
    pub name: String,
    /// Kind of the front-end, by its name in the configuration.
    pub kind: String,
    /// Socket or block device of the disk.
    pub address: String,
    /// Whether a client is connected.
    pub connected: bool,
    /// Number of accepted client connections.
    pub connections: u64,
    /// Number of controller-level resets.
    pub resets: u64,
    /// Number of queue migrations between workers.
    pub migrations: u64,
    /// Counters of each namespace. Exports and block devices have a single one, number 1.
    pub namespaces: Vec<Namespace>,
    /// Queues that have been used.
    pub queues: Vec<Queue>,
    /// Counters that only this kind of disk has, by name ([`KIND_COUNTERS`](crate::KIND_COUNTERS)).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

impl Disk {
    /// Returns the number of fetched I/O commands that are not completed. The admin queue is
    /// excluded, because it always has an outstanding command that waits for events.
    pub fn in_flight(&self) -> u64 {
        let admin = |queue: &Queue| self.kind == "controller" && queue.id == 0;
        let io = self.queues.iter().filter(|queue| !admin(queue));
        io.map(Queue::in_flight).fold(0, u64::wrapping_add)
    }
}

/// Counts of operations, by kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operations {
    /// Number of read operations, including Compare.
    pub read: u64,
    /// Number of write operations.
    pub write: u64,
    /// Number of flush operations.
    pub flush: u64,
    /// Number of operations of all other kinds.
    pub other: u64,
}

impl Operations {
    /// Returns the number of operations of one kind.
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

    /// Returns the number of operations of all kinds.
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
    /// Path or URL of the volume; empty when unknown.
    pub volume: String,
    /// Number of completed commands, including failed ones.
    pub operations: Operations,
    /// Number of bytes that the host has read.
    pub bytes_read: u64,
    /// Number of bytes that the host has written.
    pub bytes_written: u64,
    /// Number of failed commands, by reason; reasons that did not occur are absent.
    pub errors: BTreeMap<String, u64>,
    /// Latencies in nanoseconds from fetch to posted completion, by operation: of one in 61 reads
    /// and writes, of all other operations.
    pub latency: BTreeMap<String, Distribution>,
    /// Number of a queue's outstanding commands, sampled when a timed command was fetched.
    pub depth: Distribution,
    /// Whether commands currently use the direct path to a device; `None` if there is no such path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
    /// Number of commands on the direct path.
    #[serde(default)]
    pub direct_commands: u64,
    /// Number of direct commands whose data was copied.
    #[serde(default)]
    pub direct_bounced: u64,
}

impl Namespace {
    /// Creates counters of zero for the namespace with this ID.
    pub fn new(nsid: u32) -> Self {
        Self {
            nsid,
            ..Self::default()
        }
    }

    /// Adds the counters of one worker or queue. `ns_per_cycle`: nanoseconds per cycle of
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

    /// Returns the number of failed commands.
    pub fn failures(&self) -> u64 {
        self.errors.values().copied().fold(0, u64::wrapping_add)
    }
}

/// A queue pair of a controller, or a request queue of an export or block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Queue identifier; 0 is a controller's admin queue.
    pub id: u64,
    /// Worker that currently serves the queue, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u64>,
    /// Number of commands that were fetched from the queue.
    pub commands: u64,
    /// Number of commands of the queue that were completed.
    pub completions: u64,
    /// Number of doorbells received as register writes or kicks.
    pub mmio_doorbells: u64,
    /// Number of doorbell values found in memory.
    pub shadow_doorbells: u64,
    /// Number of times that the queue was armed before a sleep.
    pub arms: u64,
    /// Number of interrupts sent for the queue.
    pub interrupts: u64,
}

impl Queue {
    /// Returns the number of commands that were fetched and not completed.
    pub const fn in_flight(&self) -> u64 {
        // The two were not read at the same moment.
        self.commands.saturating_sub(self.completions)
    }
}

/// Rate limits and weight of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Path or URL of the volume, as configured.
    pub volume: String,
    /// Limits of operations per second in total, for reads, and for writes; 0: no limit.
    pub iops: [u64; 3],
    /// Limits of bytes per second in total, for reads, and for writes; 0: no limit.
    pub bps: [u64; 3],
    /// Number of the volume's requests that had to wait because of its limits.
    pub delayed: u64,
    /// Total waiting time of requests in nanoseconds.
    pub throttled_ns: u64,
    /// Weight among the volumes that share its device, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// Counters of a volume's failed requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnError {
    /// Path or URL of the volume, as configured.
    pub volume: String,
    /// Number of failed reads, counting each repetition.
    pub read_errors: u64,
    /// Number of failed requests that are not reads, counting each repetition.
    pub write_errors: u64,
    /// Number of failures because no space was left, for all requests.
    pub no_space: u64,
    /// Number of repetitions of failed requests.
    pub repeated: u64,
    /// Number of requests that wait until the disk is resumed.
    pub held: u64,
}

/// A physical device that volumes are on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// URL of the device.
    pub device: String,
    /// State of the device: live, suspended or gone.
    pub state: String,
    /// Number of resets of the device so far.
    pub resets: u64,
}

/// Counters of a worker (a thread that serves queues).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Number of the worker.
    pub id: u64,
    /// Time in nanoseconds during which the worker had work.
    pub busy_ns: u64,
    /// Time spent polling without finding work, in nanoseconds.
    pub polling_ns: u64,
    /// Time spent sleeping, in nanoseconds.
    pub asleep_ns: u64,
    /// Processor time of the thread in nanoseconds, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Number of completed sleeps.
    pub wake_ups: u64,
    /// Number of times that the worker made no progress for a second or longer.
    pub stalls: u64,
    /// Number of requests through the worker's io_uring.
    pub ring_requests: u64,
    /// Number of system calls for the worker's io_uring.
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
    /// Number of previous processes that served under the same keeper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// Time without service, in nanoseconds, before this process replaced the previous one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_pause_ns: Option<u64>,
    /// Description of how the previous process ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_end: Option<String>,
    /// Whether all configured disks are being served.
    #[serde(default)]
    pub ready: bool,
    /// Processor time of the process in nanoseconds.
    pub cpu_ns: u64,
    /// Resident memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// Anonymous part of the resident memory in bytes, without files and guest memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anonymous: Option<u64>,
    /// Virtual memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_memory: Option<u64>,
    /// Number of threads of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u64>,
    /// Start time of the process, in seconds since 1970-01-01 UTC.
    pub start: f64,
}
