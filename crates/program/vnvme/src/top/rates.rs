//! Rates of disks, queues and workers between two snapshots.

use super::recent::RecentTimes;
use metrics::{Disk, Distribution, Namespace, OnError, Snapshot};
use probes::IoKind;

/// Value for each kind of command: read, write, flush and others.
pub type ByKind<T> = [T; IoKind::ALL.len()];

/// Activity of a disk in the interval between two refreshes.
#[derive(Clone, Debug, Default)]
pub struct DiskRates {
    pub name: String,
    pub kind: String,
    pub address: String,
    pub connected: bool,
    /// Number of outstanding commands at the end of the interval.
    pub in_flight: u64,
    /// Average number of outstanding commands that measured commands found; `None` without any.
    pub depth: Option<f64>,
    /// Average number of requests that waited for limits.
    pub throttled: f64,
    /// Number of requests that wait until the disk is resumed.
    pub held: u64,
    /// Failed requests of the disk's volumes per second.
    pub failed: f64,
    /// Workers that serve the disk's queues.
    pub workers: Vec<u64>,
    pub namespaces: Vec<NamespaceRates>,
    pub queues: Vec<QueueRates>,
    /// Distribution of the latencies of reads and writes, in nanoseconds.
    pub latency: RecentTimes,
}

/// Activity of a namespace in an interval; all rates are per second.
#[derive(Clone, Debug, Default)]
pub struct NamespaceRates {
    pub nsid: u32,
    pub volume: String,
    pub operations: ByKind<f64>,
    pub read: f64,
    pub written: f64,
    pub errors: f64,
    /// Distribution of latencies for each kind of command, in nanoseconds.
    pub latency: ByKind<RecentTimes>,
    pub direct: Option<bool>,
}

/// Activity of a queue in the interval between two refreshes.
#[derive(Clone, Debug, Default)]
pub struct QueueRates {
    pub id: u64,
    pub worker: Option<u64>,
    /// Number of commands per second that were fetched from the queue.
    pub commands: f64,
    pub in_flight: u64,
    /// Number of doorbell register writes per command.
    pub mmio: f64,
    /// Number of interrupts per command.
    pub interrupts: f64,
    /// Number of times per second that the queue was armed for sleep.
    pub arms: f64,
}

/// Activity of a worker in an interval, as shares of the time.
#[derive(Clone, Debug, Default)]
pub struct WorkerRates {
    /// Number of the worker, after the name of its instance if several are shown.
    pub name: String,
    pub busy: f64,
    pub polling: f64,
    pub asleep: f64,
}

/// Activity of all that the daemon serves, in the interval between two refreshes.
#[derive(Clone, Debug, Default)]
pub struct Rates {
    /// End of the interval in nanoseconds, by the daemon's monotonic clock.
    pub at_ns: u64,
    pub disks: Vec<DiskRates>,
    pub workers: Vec<WorkerRates>,
    /// Processor time used, as a number of processors (1.0 for each).
    pub cpu: f64,
    pub resident: Option<u64>,
    /// Instances without an answer, each with the reason.
    pub unanswered: Vec<String>,
}

impl DiskRates {
    pub fn operations(&self) -> f64 {
        let each = self.namespaces.iter().flat_map(|ns| ns.operations);
        each.sum()
    }

    pub fn read(&self) -> f64 {
        self.namespaces.iter().map(|ns| ns.read).sum()
    }

    pub fn written(&self) -> f64 {
        self.namespaces.iter().map(|ns| ns.written).sum()
    }

    pub fn errors(&self) -> f64 {
        self.namespaces.iter().map(|ns| ns.errors).sum()
    }
}

/// Merges the latencies of reads and writes of a disk's namespaces.
fn of_disk(namespaces: &[NamespaceRates]) -> RecentTimes {
    let mut all = RecentTimes::default();
    for namespace in namespaces {
        for (kind, latency) in IoKind::ALL.into_iter().zip(&namespace.latency) {
            if kind.is_sampled() {
                all.times.add(&latency.times);
            }
        }
    }
    all
}

/// Returns the increase of a counter. A smaller value means a new process: its counters begin at 0.
fn grown(now: u64, before: u64) -> f64 {
    match now.checked_sub(before) {
        Some(difference) => difference as f64,
        None => now as f64,
    }
}

impl Rates {
    /// Computes the rates between two snapshots of one daemon. A counter without an earlier value
    /// counts from 0.
    pub fn between(before: &Snapshot, now: &Snapshot) -> Self {
        let interval = grown(now.at_ns, before.at_ns).max(1.0) / 1e9;
        let nothing = Disk::default();
        let disks = now.disks.iter().map(|disk| {
            let same = before.disks.iter().find(|d| d.name == disk.name);
            disk_between(same.unwrap_or(&nothing), disk, (before, now), interval)
        });
        let workers = now.workers.iter().map(|worker| {
            let same = before.workers.iter().find(|w| w.id == worker.id);
            let same = same.cloned().unwrap_or_default();
            let part = |now, before| (grown(now, before) / 1e9 / interval).min(1.0);
            WorkerRates {
                name: worker.id.to_string(),
                busy: part(worker.busy_ns, same.busy_ns),
                polling: part(worker.polling_ns, same.polling_ns),
                asleep: part(worker.asleep_ns, same.asleep_ns),
            }
        });
        Self {
            at_ns: now.at_ns,
            disks: disks.collect(),
            workers: workers.collect(),
            cpu: grown(now.process.cpu_ns, before.process.cpu_ns) / 1e9 / interval,
            resident: now.process.resident,
            unanswered: Vec::new(),
        }
    }
}

impl Rates {
    /// Adds the rates of an instance. The names of its disks and workers get that of the instance.
    pub fn add(&mut self, instance: &str, other: Self) {
        self.disks
            .extend(other.disks.into_iter().map(|disk| DiskRates {
                name: format!("{instance}/{}", disk.name),
                ..disk
            }));
        let workers = other.workers.into_iter();
        self.workers.extend(workers.map(|worker| WorkerRates {
            name: format!("{instance} {}", worker.name),
            ..worker
        }));
        self.cpu += other.cpu;
        let resident = [self.resident, other.resident].into_iter().flatten();
        self.resident = resident.reduce(u64::saturating_add);
    }
}

fn disk_between(
    before: &Disk,
    now: &Disk,
    (old, new): (&Snapshot, &Snapshot),
    interval: f64,
) -> DiskRates {
    let mut depth = Distribution::default();
    let none = Namespace::default();
    let namespaces = now.namespaces.iter().map(|ns| {
        let same = before.namespaces.iter().find(|n| n.nsid == ns.nsid);
        let same = same.unwrap_or(&none);
        depth.add(&ns.depth.since(&same.depth));
        namespace_between(same, ns, interval)
    });
    let namespaces: Vec<NamespaceRates> = namespaces.collect();
    let queues = now.queues.iter().map(|queue| {
        let same = before.queues.iter().find(|q| q.id == queue.id);
        let same = same.copied().unwrap_or_default();
        let commands = grown(queue.commands, same.commands);
        let each = |now, before| grown(now, before) / commands.max(1.0);
        QueueRates {
            id: queue.id,
            worker: queue.worker,
            commands: commands / interval,
            in_flight: queue.in_flight(),
            mmio: each(queue.mmio_doorbells, same.mmio_doorbells),
            interrupts: each(queue.interrupts, same.interrupts),
            arms: grown(queue.arms, same.arms) / interval,
        }
    });
    let throttled = |snapshot: &Snapshot| {
        let of = |volume: &str| now.namespaces.iter().any(|ns| ns.volume == volume);
        let waited = snapshot.limits.iter().filter(|l| of(&l.volume));
        waited.map(|l| l.throttled_ns).fold(0, u64::wrapping_add)
    };
    let on_error = |snapshot: &Snapshot, value: fn(&OnError) -> u64| {
        let of = |volume: &str| now.namespaces.iter().any(|ns| ns.volume == volume);
        let own = snapshot.on_error.iter().filter(|one| of(&one.volume));
        own.map(value).fold(0, u64::wrapping_add)
    };
    let failed = |snapshot: &Snapshot| on_error(snapshot, |one| one.read_errors + one.write_errors);
    let mut workers: Vec<u64> = now.queues.iter().filter_map(|q| q.worker).collect();
    workers.sort_unstable();
    workers.dedup();
    DiskRates {
        name: now.name.clone(),
        kind: now.kind.clone(),
        address: now.address.clone(),
        connected: now.connected,
        in_flight: now.in_flight(),
        depth: depth.average(),
        throttled: grown(throttled(new), throttled(old)) / 1e9 / interval,
        held: on_error(new, |one| one.held),
        failed: grown(failed(new), failed(old)) / interval,
        workers,
        queues: queues.collect(),
        latency: of_disk(&namespaces),
        namespaces,
    }
}

fn namespace_between(before: &Namespace, now: &Namespace, interval: f64) -> NamespaceRates {
    let rate = |now, before| grown(now, before) / interval;
    let none = Distribution::default();
    NamespaceRates {
        nsid: now.nsid,
        volume: now.volume.clone(),
        operations: IoKind::ALL.map(|k| rate(now.operations.of(k), before.operations.of(k))),
        read: rate(now.bytes_read, before.bytes_read),
        written: rate(now.bytes_written, before.bytes_written),
        errors: rate(now.failures(), before.failures()),
        latency: IoKind::ALL.map(|kind| {
            let of = |ns: &'_ Namespace| ns.latency.get(kind.name()).cloned();
            let now = of(now).unwrap_or_default();
            let times = now.since(&of(before).unwrap_or_else(|| none.clone()));
            RecentTimes {
                times,
                is_longer: false,
            }
        }),
        direct: now.direct,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests {
    use super::*;
    use metrics::Queue;

    fn at(seconds: u64, reads: u64) -> Snapshot {
        let mut namespace = Namespace::new(1);
        namespace.operations.read = reads;
        namespace.bytes_read = reads.wrapping_mul(4096);
        Snapshot {
            at_ns: seconds * 1_000_000_000,
            disks: vec![Disk {
                name: "a".into(),
                namespaces: vec![namespace],
                queues: vec![Queue {
                    id: 1,
                    commands: reads,
                    completions: reads,
                    mmio_doorbells: reads / 2,
                    ..Queue::default()
                }],
                ..Disk::default()
            }],
            ..Snapshot::default()
        }
    }

    #[test]
    fn rates_are_computed_per_second() {
        let rates = Rates::between(&at(10, 1000), &at(12, 5000));
        let disk = &rates.disks[0];
        assert_eq!((disk.operations(), disk.read()), (2000.0, 8192000.0));
        assert_eq!(
            (disk.queues[0].commands, disk.queues[0].mmio),
            (2000.0, 0.5)
        );
    }

    #[test]
    fn restarted_daemon_has_no_negative_rates() {
        let rates = Rates::between(&at(10, 1000), &at(2, 600));
        assert!(rates.disks[0].operations() >= 0.0);
        let rates = Rates::between(&at(10, u64::MAX), &at(11, 600));
        assert_eq!(rates.disks[0].operations(), 600.0);
    }

    #[test]
    fn new_disk_counts_from_zero() {
        let rates = Rates::between(&Snapshot::default(), &at(1, 500));
        assert_eq!(rates.disks[0].operations(), 500.0);
    }
}
