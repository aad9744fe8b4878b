//! Counters of everything that a process serves, as numbers of one moment.

use super::{DeviceStatus, PathChoice, VolumeErrors, VolumeLimits};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All counters since the process began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// One for each controller.
    pub controllers: Vec<ControllerCounters>,
    /// One for each vhost-user-blk export.
    #[serde(default)]
    pub vhost_user_blk: Vec<VhostBlkCounters>,
    /// One for each block device of the host.
    #[serde(default)]
    pub ublk: Vec<UblkCounters>,
    /// Volumes with limits or weights.
    #[serde(default)]
    pub volumes: Vec<VolumeLimits>,
    /// Volumes whose requests have failed, or that have a policy for those.
    #[serde(default)]
    pub on_error: Vec<VolumeErrors>,
    /// Devices below.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
    /// One for each worker whose io_uring was used.
    #[serde(default)]
    pub rings: Vec<RingCounters>,
    /// One for each worker.
    #[serde(default)]
    pub workers: Vec<WorkerCounters>,
    /// The same by disk and namespace, with how long commands took, and of the process itself.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub measured: metrics::Snapshot,
}

/// What happened at a socket since the process began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SocketCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Times that clients had to wait, because too many had come within a second.
    pub delayed: u64,
    /// Times that none could be accepted: no descriptor was left, for example.
    pub failed: u64,
}

/// Counters of one controller since it is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ControllerCounters {
    /// The disk's name.
    #[serde(default)]
    pub name: String,
    /// Its socket.
    pub socket: String,
    /// Who came there.
    #[serde(default)]
    pub clients: SocketCounters,
    /// Read commands completed, Compare and Verify among them.
    pub host_reads: u64,
    /// Write commands completed.
    pub host_writes: u64,
    /// Bytes read by the host.
    pub bytes_read: u64,
    /// Bytes written by the host.
    pub bytes_written: u64,
    /// Entries ever made in the error log.
    pub errors: u64,
    /// Controller-level resets.
    pub resets: u64,
    /// Queues that went from one worker to another.
    #[serde(default)]
    pub moves: u64,
    /// Queue pairs that were used, by ID; 0 is the admin queue.
    pub queues: Vec<QueueCounters>,
    /// Namespaces that have a direct path to a device.
    #[serde(default)]
    pub direct: Vec<PathCounters>,
}

/// Counters of one queue pair.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueueCounters {
    /// Queue ID.
    pub qid: usize,
    /// Commands fetched.
    pub commands: u64,
    /// Completions posted.
    pub completions: u64,
    /// Doorbells that came as messages.
    pub mmio_doorbells: u64,
    /// Doorbells that were found in memory.
    pub shadow_doorbells: u64,
    /// Times that EventIdx was armed.
    pub arms: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// Cycles to send them.
    #[serde(default)]
    pub interrupt_cycles: Cycles,
    /// The worker that it lives on.
    #[serde(default)]
    pub worker: u64,
}

/// Cycles of one kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Cycles {
    /// How often it was done.
    pub count: u64,
    /// Sum, in cycles.
    pub total: u64,
    /// Cycles each time, on average.
    pub average: f64,
    /// The average as a time, in nanoseconds.
    pub average_ns: f64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// The most.
    pub max: u64,
}

/// Counters of a namespace's direct path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathCounters {
    /// The namespace.
    pub nsid: u32,
    /// The path of commands that come now.
    pub path: PathChoice,
    /// One for each physical queue pair.
    pub lanes: Vec<LaneCounters>,
}

/// Counters of one physical queue pair's share for a namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LaneCounters {
    /// Commands that went to the device.
    pub commands: u64,
    /// Commands that were refused before.
    pub refused: u64,
    /// Commands that were larger than the device takes.
    pub split: u64,
    /// Commands whose data was copied.
    pub bounced: u64,
    /// Bytes that were copied.
    pub bounced_bytes: u64,
    /// To translate a command.
    pub translate: Cycles,
    /// To complete one.
    pub complete: Cycles,
}

/// Counters of one vhost-user-blk export since it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostBlkCounters {
    /// The disk's name.
    #[serde(default)]
    pub name: String,
    /// Its socket.
    pub socket: String,
    /// A front-end is there.
    pub connected: bool,
    /// Who came there.
    #[serde(default)]
    pub clients: SocketCounters,
    /// Front-ends that connected.
    pub connections: u64,
    /// Requests of an earlier process that were begun again.
    pub resubmitted: u64,
    /// Queues that were used, by index.
    pub queues: Vec<VhostBlkQueueCounters>,
}

/// Counters of one request queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostBlkQueueCounters {
    /// Index.
    pub queue: usize,
    /// Requests fetched.
    pub requests: u64,
    /// Bytes read by the guest.
    pub bytes_read: u64,
    /// Bytes written by the guest.
    pub bytes_written: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Times that the guest rang.
    pub kicks: u64,
    /// Times that the queue was armed.
    pub arms: u64,
    /// Interrupts sent.
    pub notifications: u64,
}

/// Counters of one block device of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UblkCounters {
    /// The disk's name.
    #[serde(default)]
    pub name: String,
    /// Its node.
    pub device: String,
    /// Path or URL of its volume.
    pub volume: String,
    /// Requests and bytes, by queue.
    pub queues: Vec<UblkQueueCounters>,
}

/// Counters of one queue of a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UblkQueueCounters {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Flushes.
    pub flushes: u64,
    /// Ranges zeroed or deallocated.
    pub discards: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Times that the queue's thread slept.
    pub sleeps: u64,
}

/// What passed through one thread's io_uring, as of its last system call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RingCounters {
    /// The thread that owns it.
    pub thread: String,
    /// Requests to files and block devices.
    pub requests: u64,
    /// Operations that they took.
    pub operations: u64,
    /// Times that operations were handed to the kernel.
    pub batches: u64,
    /// System calls: one for each batch, and those that fetch completions while there is nothing to
    /// submit.
    pub system_calls: u64,
    /// Operations on memory that the kernel has pinned.
    pub fixed: u64,
    /// Requests copied through a bounce buffer.
    pub bounced: u64,
}

/// Counters of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkerCounters {
    /// Its thread.
    pub thread: String,
    /// Times that it made no round for a second or longer.
    pub stalls: u64,
    /// The longest of them in milliseconds.
    pub longest_stall_ms: u64,
    /// It stands still now, and has for so long, in milliseconds; 0: it does not.
    pub stalled_ms: u64,
    /// What it does, if it stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
}
