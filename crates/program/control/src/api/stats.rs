//! Counters of the whole process as of one moment.

use super::{DeviceStatus, PathChoice, VolumeErrors, VolumeLimits};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All counters since the start of the process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// NVMe controllers.
    pub controllers: Vec<ControllerCounters>,
    /// vhost-user-blk exports.
    #[serde(default)]
    pub vhost_user_blk: Vec<VhostBlkCounters>,
    /// Block devices of the host.
    #[serde(default)]
    pub ublk: Vec<UblkCounters>,
    /// Volumes with limits or weights.
    #[serde(default)]
    pub volumes: Vec<VolumeLimits>,
    /// Volumes with failed requests or an error policy.
    #[serde(default)]
    pub on_error: Vec<VolumeErrors>,
    /// Devices below volumes, and servers of network volumes.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
    /// io_uring instances of workers, if used.
    #[serde(default)]
    pub rings: Vec<RingCounters>,
    /// Workers.
    #[serde(default)]
    pub workers: Vec<WorkerCounters>,
    /// Counters by disk and namespace, with latencies, and the state of the process.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub measured: metrics::Snapshot,
}

/// Counters of a listening socket since the start of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SocketCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Number of times that clients had to wait because of the rate limit.
    pub delayed: u64,
    /// Number of times that accepting failed, for example for lack of descriptors.
    pub failed: u64,
}

/// Counters of a controller since it was added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ControllerCounters {
    /// Name of the disk.
    #[serde(default)]
    pub name: String,
    /// Path of the socket.
    pub socket: String,
    /// Counters of the socket.
    #[serde(default)]
    pub clients: SocketCounters,
    /// Completed read commands, including Compare and Verify.
    pub host_reads: u64,
    /// Completed write commands.
    pub host_writes: u64,
    /// Bytes read by the host.
    pub bytes_read: u64,
    /// Bytes written by the host.
    pub bytes_written: u64,
    /// Entries made in the error log.
    pub errors: u64,
    /// Controller-level resets.
    pub resets: u64,
    /// Queue migrations between workers.
    #[serde(default)]
    pub moves: u64,
    /// Queue pairs in use, sorted by ID; 0 is the admin queue.
    pub queues: Vec<QueueCounters>,
    /// Namespaces with a direct path to a device.
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
    /// Doorbells received as messages.
    pub mmio_doorbells: u64,
    /// Doorbells found in memory.
    pub shadow_doorbells: u64,
    /// Number of times that EventIdx was armed.
    pub arms: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// Cycles spent to send interrupts.
    #[serde(default)]
    pub interrupt_cycles: Cycles,
    /// Worker of the queue.
    #[serde(default)]
    pub worker: u64,
}

/// Distribution of the cycles of one kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Cycles {
    /// Number of measurements.
    pub count: u64,
    /// Sum, in cycles.
    pub total: u64,
    /// Average in cycles.
    pub average: f64,
    /// Average in nanoseconds.
    pub average_ns: f64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Maximum.
    pub max: u64,
}

/// Counters of a namespace's direct path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathCounters {
    /// Namespace ID.
    pub nsid: u32,
    /// Path of new commands.
    pub path: PathChoice,
    /// Physical queue pairs.
    pub lanes: Vec<LaneCounters>,
}

/// Counters of one physical queue pair's share for a namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LaneCounters {
    /// Commands passed to the device.
    pub commands: u64,
    /// Commands refused before the device.
    pub refused: u64,
    /// Commands split because they exceed the device's maximum transfer.
    pub split: u64,
    /// Commands whose data was copied through a bounce buffer.
    pub bounced: u64,
    /// Bytes copied through a bounce buffer.
    pub bounced_bytes: u64,
    /// Cycles to translate a command.
    pub translate: Cycles,
    /// Cycles to complete a command.
    pub complete: Cycles,
}

/// Counters of a vhost-user-blk export since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostBlkCounters {
    /// Name of the disk.
    #[serde(default)]
    pub name: String,
    /// Path of the socket.
    pub socket: String,
    /// Whether a front-end is connected.
    pub connected: bool,
    /// Counters of the socket.
    #[serde(default)]
    pub clients: SocketCounters,
    /// Connections of front-ends.
    pub connections: u64,
    /// Requests resubmitted after an earlier process ended.
    pub resubmitted: u64,
    /// Queues in use, sorted by index.
    pub queues: Vec<VhostBlkQueueCounters>,
}

/// Counters of one request queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostBlkQueueCounters {
    /// Index of the queue.
    pub queue: usize,
    /// Requests fetched.
    pub requests: u64,
    /// Bytes read by the guest.
    pub bytes_read: u64,
    /// Bytes written by the guest.
    pub bytes_written: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Notifications received from the guest.
    pub kicks: u64,
    /// Number of times that the queue was armed.
    pub arms: u64,
    /// Interrupts sent.
    pub notifications: u64,
}

/// Counters of a block device of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UblkCounters {
    /// Name of the disk.
    #[serde(default)]
    pub name: String,
    /// Path of the device node.
    pub device: String,
    /// Path or URL of the volume.
    pub volume: String,
    /// Counters of each queue.
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
    /// Number of times that the queue's thread slept.
    pub sleeps: u64,
}

/// Counters of a thread's io_uring, as of its last system call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RingCounters {
    /// Name of the thread.
    pub thread: String,
    /// Requests to files and block devices.
    pub requests: u64,
    /// Operations needed for the requests.
    pub operations: u64,
    /// Batches of operations submitted to the kernel.
    pub batches: u64,
    /// System calls: one for each batch, and those that only wait for completions.
    pub system_calls: u64,
    /// Operations on registered (pinned) memory.
    pub fixed: u64,
    /// Requests copied through a bounce buffer.
    pub bounced: u64,
}

/// Counters of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkerCounters {
    /// Name of the thread.
    pub thread: String,
    /// Number of times that the worker made no round for a second or longer.
    pub stalls: u64,
    /// Longest stall in milliseconds.
    pub longest_stall_ms: u64,
    /// Duration of the present stall in milliseconds; 0 if there is none.
    pub stalled_ms: u64,
    /// Activity of the worker during the present stall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
}
