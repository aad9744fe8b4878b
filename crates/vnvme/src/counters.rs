//! What `vnvme stats` shows: counters of everything that a process serves, as numbers of one
//! moment.

use crate::devices::DeviceStatus;
use crate::direct::{Cycles, PathCounters};
use crate::limits::VolumeLimits;
use crate::parts::{ublk, vhost_blk};
use crate::rings::RingCounters;
use crate::watch::WorkerCounters;
use controller::{ControllerStats, QueueStats};
use output::{OutputError, outln};
use probes::IoKind;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use worker::AcceptStats;

/// The answer to `stats`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Stats {
    /// One for each socket.
    pub controllers: Vec<ControllerCounters>,
    /// One for each vhost-user-blk export.
    #[serde(default)]
    pub vhost_user_blk: Vec<VhostBlkCounters>,
    /// One for each block device of the host.
    #[serde(default)]
    pub ublk: Vec<DiskCounters>,
    /// Volumes with limits or weights.
    #[serde(default)]
    pub volumes: Vec<VolumeLimits>,
    /// Devices below.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
    /// One for each worker whose io_uring was used.
    #[serde(default)]
    pub rings: Vec<RingCounters>,
    /// One for each worker.
    #[serde(default)]
    pub workers: Vec<WorkerCounters>,
}

/// What happened at a socket since the process began.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SocketCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Times that clients had to wait, because too many had come within a second.
    pub delayed: u64,
    /// Times that none could be accepted: no descriptor was left, for example.
    pub failed: u64,
}

impl SocketCounters {
    /// As they are now.
    pub fn of(stats: &AcceptStats) -> Self {
        Self {
            accepted: stats.accepted(),
            delayed: stats.delayed(),
            failed: stats.failed(),
        }
    }

    /// For people: nothing, where nothing was out of the ordinary.
    fn print(&self) -> Result<(), OutputError> {
        if self.delayed + self.failed > 0 {
            outln!(
                "  connections {}   made to wait {}   failed {}",
                self.accepted,
                self.delayed,
                self.failed
            );
        }
        Ok(())
    }
}

/// Counters of one controller since the process began.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ControllerCounters {
    /// Its socket.
    pub socket: PathBuf,
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
#[derive(Debug, Default, Serialize, Deserialize)]
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

impl ControllerCounters {
    /// As they are now.
    pub fn of(socket: &Path, stats: &ControllerStats, accepts: &AcceptStats) -> Self {
        let queue = |(qid, q): (usize, &QueueStats)| QueueCounters {
            qid,
            commands: q.commands.get(),
            completions: q.completions.get(),
            mmio_doorbells: q.mmio_doorbells.get(),
            shadow_doorbells: q.shadow_doorbells.get(),
            arms: q.arms.get(),
            interrupts: q.interrupts.get(),
            interrupt_cycles: q.interrupt_summary().into(),
            worker: q.worker.get(),
        };
        ControllerCounters {
            socket: socket.to_owned(),
            clients: SocketCounters::of(accepts),
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
}

/// Counters of one export since the process began.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct VhostBlkCounters {
    /// Its socket.
    pub socket: PathBuf,
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
#[derive(Debug, Default, Serialize, Deserialize)]
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

impl VhostBlkCounters {
    /// As they are now.
    pub fn of(socket: &Path, stats: &vhost_blk::Stats) -> Self {
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
            socket: socket.to_owned(),
            connected: stats.is_connected(),
            clients: SocketCounters::of(&stats.accepts),
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

    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        outln!("{} (vhost-user-blk)", self.socket.display());
        outln!(
            "  {}   connections {}   resubmitted {}",
            if self.connected {
                "connected"
            } else {
                "not connected"
            },
            self.connections,
            self.resubmitted
        );
        self.clients.print()?;
        outln!(
            "  {:>5} {:>12} {:>10} {:>10} {:>8} {:>10} {:>10} {:>13} {:>9}",
            "queue",
            "requests",
            "MB read",
            "MB written",
            "errors",
            "kicks",
            "arms",
            "notifications",
            "kicks/req"
        );
        for q in &self.queues {
            outln!(
                "  {:>5} {:>12} {:>10} {:>10} {:>8} {:>10} {:>10} {:>13} {:>9.3}",
                q.queue,
                q.requests,
                q.bytes_read / 1_000_000,
                q.bytes_written / 1_000_000,
                q.errors,
                q.kicks,
                q.arms,
                q.notifications,
                q.kicks as f64 / q.requests.max(1) as f64
            );
        }
        Ok(())
    }
}

/// Counters of one disk.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DiskCounters {
    /// Its node.
    pub device: PathBuf,
    /// Path or URL of its volume.
    pub volume: String,
    /// Requests and bytes, by queue.
    pub queues: Vec<DiskQueueCounters>,
}

/// Counters of one queue of a disk.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DiskQueueCounters {
    pub reads: u64,
    pub writes: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub flushes: u64,
    /// Ranges zeroed or deallocated.
    pub discards: u64,
    pub errors: u64,
    /// Times that the queue's thread slept.
    pub sleeps: u64,
}

impl DiskCounters {
    /// As they are now.
    pub fn of(volume: &str, stats: &ublk::DiskStats) -> Self {
        let queue = |q: &ublk::QueueStats| DiskQueueCounters {
            reads: q.io.operations(IoKind::Read).get(),
            writes: q.io.operations(IoKind::Write).get(),
            bytes_read: q.io.bytes_read().get(),
            bytes_written: q.io.bytes_written().get(),
            flushes: q.io.operations(IoKind::Flush).get(),
            discards: q.io.operations(IoKind::Other).get(),
            errors: q.io.all_failures(),
            sleeps: q.sleeps.get(),
        };
        Self {
            device: format!("/dev/ublkb{}", stats.id).into(),
            volume: volume.into(),
            queues: stats.queues.iter().map(queue).collect(),
        }
    }

    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        outln!("{}  ({})", self.device.display(), self.volume);
        outln!(
            "  {:>5} {:>12} {:>10} {:>12} {:>10} {:>9} {:>9} {:>7} {:>10}",
            "queue",
            "reads",
            "MB",
            "writes",
            "MB",
            "flushes",
            "discards",
            "errors",
            "sleeps"
        );
        for (i, q) in self.queues.iter().enumerate() {
            outln!(
                "  {:>5} {:>12} {:>10} {:>12} {:>10} {:>9} {:>9} {:>7} {:>10}",
                i,
                q.reads,
                q.bytes_read / 1_000_000,
                q.writes,
                q.bytes_written / 1_000_000,
                q.flushes,
                q.discards,
                q.errors,
                q.sleeps
            );
        }
        Ok(())
    }
}

impl Stats {
    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        self.ublk.iter().try_for_each(DiskCounters::print)?;
        for c in &self.controllers {
            outln!("{}", c.socket.display());
            c.clients.print()?;
            outln!(
                "  reads {} ({} MB)   writes {} ({} MB)   errors {}   resets {}",
                c.host_reads,
                c.bytes_read / 1_000_000,
                c.host_writes,
                c.bytes_written / 1_000_000,
                c.errors,
                c.resets
            );
            outln!(
                "  {:>5} {:>12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>9} {:>7}",
                "queue",
                "commands",
                "completions",
                "mmio",
                "shadow",
                "arms",
                "interrupts",
                "mmio/cmd",
                "worker"
            );
            for q in &c.queues {
                let per_command = q.mmio_doorbells as f64 / q.commands.max(1) as f64;
                outln!(
                    "  {:>5} {:>12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>9.3} {:>7}",
                    q.qid,
                    q.commands,
                    q.completions,
                    q.mmio_doorbells,
                    q.shadow_doorbells,
                    q.arms,
                    q.interrupts,
                    per_command,
                    q.worker
                );
            }
            for direct in &c.direct {
                direct.print()?;
            }
        }
        self.vhost_user_blk
            .iter()
            .try_for_each(VhostBlkCounters::print)?;
        self.volumes.iter().try_for_each(VolumeLimits::print)?;
        self.devices.iter().try_for_each(DeviceStatus::print)?;
        self.rings.iter().try_for_each(RingCounters::print)?;
        self.workers.iter().try_for_each(WorkerCounters::print)?;
        Ok(())
    }
}
