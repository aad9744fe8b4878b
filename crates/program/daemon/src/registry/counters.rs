//! Counters of the served disks, as the control API shows them: a snapshot of one moment.

use crate::parts::{ublk, vhost_blk};
use control::api::{
    ControllerCounters, QueueCounters, SocketCounters, UblkCounters, UblkQueueCounters,
    VhostBlkCounters, VhostBlkQueueCounters,
};
use controller::{ControllerStats, QueueStats};
use probes::IoKind;
use std::path::Path;
use worker::AcceptStats;

/// Returns the counters of a listening socket in the form of the management API.
fn socket_counters(stats: &AcceptStats) -> SocketCounters {
    SocketCounters {
        accepted: stats.accepted(),
        delayed: stats.delayed(),
        failed: stats.failed(),
    }
}

/// Returns the counters of an NVMe controller in the form of the management API.
pub fn controller(
    name: &str,
    socket: &Path,
    stats: &ControllerStats,
    accepts: &AcceptStats,
) -> ControllerCounters {
    let queue = |(qid, q): (usize, &QueueStats)| QueueCounters {
        qid,
        commands: q.commands.get(),
        completions: q.completions.get(),
        mmio_doorbells: q.mmio_doorbells.get(),
        shadow_doorbells: q.shadow_doorbells.get(),
        arms: q.arms.get(),
        interrupts: q.interrupts.get(),
        interrupt_cycles: crate::open::direct::cycles(q.interrupt_summary()),
        worker: q.worker.get(),
    };
    ControllerCounters {
        name: name.to_owned(),
        socket: socket.display().to_string(),
        clients: socket_counters(accepts),
        host_reads: stats.host_reads(),
        host_writes: stats.host_writes(),
        bytes_read: stats.bytes_read(),
        bytes_written: stats.bytes_written(),
        errors: stats.error_log_entries.get(),
        resets: stats.resets.get(),
        moves: stats.migrations.get(),
        queues: stats
            .queues
            .iter()
            .enumerate()
            .map(queue)
            .filter(|q| q.commands + q.mmio_doorbells > 0)
            .collect(),
        direct: Vec::new(),
    }
}

/// Returns the counters of a vhost-user-blk export in the form of the management API.
pub fn vhost_blk(name: &str, socket: &Path, stats: &vhost_blk::Stats) -> VhostBlkCounters {
    let queue = |(queue, q): (usize, &vhost_blk::QueueStats)| VhostBlkQueueCounters {
        queue,
        requests: q.requests.get(),
        bytes_read: q.io.bytes_read().get(),
        bytes_written: q.io.bytes_written().get(),
        errors: q.io.all_failures(),
        kicks: q.kicks.get(),
        arms: q.arms.get(),
        notifications: q.notifications.get(),
    };
    VhostBlkCounters {
        name: name.to_owned(),
        socket: socket.display().to_string(),
        connected: stats.is_connected(),
        clients: socket_counters(&stats.accepts),
        connections: stats.connections.get(),
        resubmitted: stats.resubmitted.get(),
        queues: stats
            .queues
            .iter()
            .enumerate()
            .map(queue)
            .filter(|q| q.requests + q.kicks > 0)
            .collect(),
    }
}

/// Returns the counters of a ublk block device in the form of the management API.
pub fn ublk(name: &str, volume: &str, stats: &ublk::DiskStats) -> UblkCounters {
    let queue = |q: &ublk::QueueStats| UblkQueueCounters {
        reads: q.io.operations(IoKind::Read).get(),
        writes: q.io.operations(IoKind::Write).get(),
        bytes_read: q.io.bytes_read().get(),
        bytes_written: q.io.bytes_written().get(),
        flushes: q.io.operations(IoKind::Flush).get(),
        discards: q.io.operations(IoKind::Other).get(),
        errors: q.io.all_failures(),
        sleeps: q.sleeps.get(),
    };
    UblkCounters {
        name: name.to_owned(),
        device: format!("/dev/ublkb{}", stats.id),
        volume: volume.into(),
        queues: stats.queues.iter().map(queue).collect(),
    }
}
