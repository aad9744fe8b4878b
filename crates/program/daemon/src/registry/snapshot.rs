//! Metrics of the process: snapshots of the counters of everything that it serves.

use crate::keep::KeeperSession;
use crate::registry::Registry;
use crate::registry::descriptions::DiskDescriptions;
use crate::serve::peers::Peers;
use metrics::{Device, Limits, Process, Snapshot, Worker};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Facts about the process that never change, for metrics and the management API.
#[derive(Clone)]
pub struct ProcessInfo {
    began: Instant,
    /// Start time of the process in seconds since 1970.
    start: f64,
    /// The process's status file in `/proc`, opened before the sandbox is entered, which blocks
    /// opening files.
    status: Option<Arc<File>>,
}

impl Default for ProcessInfo {
    fn default() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            began: Instant::now(),
            start: since.map_or(0.0, |since| since.as_secs_f64()),
            status: File::open("/proc/self/status").ok().map(Arc::new),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Builder of a metrics snapshot, which makes the names of disks unique.
pub struct SnapshotBuilder<'a> {
    pub described: &'a DiskDescriptions,
    pub ns_per_cycle: f64,
    /// Names assigned to disks so far. Two disks of the same name would look like one to readers of
    /// the metrics.
    names: BTreeSet<String>,
}

impl<'a> SnapshotBuilder<'a> {
    pub fn new(described: &'a DiskDescriptions) -> Self {
        Self {
            described,
            ns_per_cycle: 1e9 / probes::cycles_per_second(),
            names: BTreeSet::new(),
        }
    }

    /// Returns the disk's name, or the whole path if another disk has that name.
    pub fn name(&mut self, socket: &Path) -> String {
        let name = self.described.name(socket);
        if self.names.insert(name.clone()) {
            return name;
        }
        let mut name = socket.display().to_string();
        // Names with invalid UTF-8 may convert to the same text.
        while !self.names.insert(name.clone()) {
            name.push('\'');
        }
        name
    }
}

fn workers(peers: &Peers, registry: &Registry) -> Vec<Worker> {
    let rings = registry.rings.counters();
    let all = (0..).zip(peers.handles()).map(|(id, handle)| {
        let (load, thread) = (handle.load(), format!("worker-{id}"));
        let ring = rings.iter().find(|ring| ring.thread == thread);
        Worker {
            id,
            busy_ns: nanoseconds(load.busy()),
            polling_ns: nanoseconds(load.polling()),
            asleep_ns: nanoseconds(load.asleep()),
            cpu_ns: handle.pulse().cpu_time().map(nanoseconds),
            wake_ups: load.wake_ups(),
            stalls: handle.stalls().count(),
            ring_requests: ring.map_or(0, |ring| ring.requests),
            ring_calls: ring.map_or(0, |ring| ring.system_calls),
        }
    });
    all.collect()
}

/// Maximum length in bytes of `/proc/self/status` that is read.
const STATUS_MAX: usize = 8192;

fn process(about: &ProcessInfo, keeper: &KeeperSession) -> Process {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let mut status = vec![0; STATUS_MAX];
    let read = about
        .status
        .as_ref()
        .map(|file| file.read_at(&mut status, 0));
    status.truncate(read.and_then(Result::ok).unwrap_or(0));
    let status = String::from_utf8_lossy(&status);
    // "VmRSS:      1234 kB" (proc_pid_status(5)).
    let number = |key: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let bytes = |key| number(key)?.checked_mul(1024);
    Process {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cpu_ns: u64::try_from(cpu.tv_sec)
            .unwrap_or(0)
            .saturating_mul(1_000_000_000)
            .saturating_add(u64::try_from(cpu.tv_nsec).unwrap_or(0)),
        resident: bytes("VmRSS:"),
        anonymous: bytes("RssAnon:"),
        virtual_memory: bytes("VmSize:"),
        threads: number("Threads:"),
        start: about.start,
        pid: std::process::id(),
        keeper: keeper.pid(),
        restarts: (keeper.is_kept() && !keeper.is_systemd()).then(|| keeper.history().restarts),
        last_end: keeper.history().how.clone(),
        ready: keeper.serves(),
        last_pause_ns: keeper
            .last_pause()
            .map(|pause| u64::try_from(pause.as_nanos()).unwrap_or(0)),
    }
}

impl Registry {
    /// Returns a snapshot of all metrics of the process.
    pub fn numbers(&self) -> Snapshot {
        let limits = self.limits.list().into_iter().map(|limits| Limits {
            iops: [limits.iops, limits.read_iops, limits.write_iops],
            bps: [limits.bps, limits.read_bps, limits.write_bps],
            delayed: limits.delayed,
            throttled_ns: limits.throttled_us.saturating_mul(1000),
            weight: limits.weight,
            volume: limits.volume,
        });
        let mut told = BTreeSet::new();
        let on_error = self.on_error.list(&self.described).into_iter();
        let on_error = on_error.filter(|one| told.insert(one.volume.clone()));
        let on_error = on_error.map(|one| metrics::OnError {
            volume: one.volume,
            read_errors: one.read_errors,
            write_errors: one.write_errors,
            no_space: one.no_space,
            repeated: one.repeated,
            held: one.held,
        });
        let mut seen = BTreeSet::new();
        let devices = self.devices.list().into_iter().map(|device| Device {
            state: device.state.name().to_owned(),
            device: device.device,
            resets: device.resets,
        });
        Snapshot {
            at_ns: nanoseconds(self.about.began.elapsed()),
            disks: self.disks(SnapshotBuilder::new(&self.described)),
            unserved: self.unserved.all(),
            // A volume of several disks is listed once.
            limits: limits
                .filter(|limits| seen.insert(limits.volume.clone()))
                .collect(),
            on_error: on_error.collect(),
            devices: devices.collect(),
            workers: self
                .peers()
                .map_or_else(Vec::new, |peers| workers(peers, self)),
            process: process(&self.about, &self.keeper),
        }
    }
}
