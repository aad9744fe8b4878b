//! Prometheus text format of a snapshot.

use crate::catalog as m;
use crate::text::{Exposition, Label};
use crate::{Disk, Distribution, KindCounters, Metric, Namespace, Queue, Snapshot, Worker};
use probes::{Failure, IoKind};
use std::fmt::Display;

/// Upper bounds of latency buckets: the label, and nanoseconds.
const TIMES: [(&str, u64); 24] = [
    ("2e-07", 200),
    ("5e-07", 500),
    ("1e-06", 1_000),
    ("2e-06", 2_000),
    ("5e-06", 5_000),
    ("1e-05", 10_000),
    ("2e-05", 20_000),
    ("5e-05", 50_000),
    ("0.0001", 100_000),
    ("0.0002", 200_000),
    ("0.0005", 500_000),
    ("0.001", 1_000_000),
    ("0.002", 2_000_000),
    ("0.005", 5_000_000),
    ("0.01", 10_000_000),
    ("0.02", 20_000_000),
    ("0.05", 50_000_000),
    ("0.1", 100_000_000),
    ("0.2", 200_000_000),
    ("0.5", 500_000_000),
    ("1", 1_000_000_000),
    ("2", 2_000_000_000),
    ("5", 5_000_000_000),
    ("10", 10_000_000_000),
];

/// Upper bounds of queue depth buckets: the label, and the number of commands.
const DEPTHS: [(&str, u64); 11] = [
    ("1", 1),
    ("2", 2),
    ("4", 4),
    ("8", 8),
    ("16", 16),
    ("32", 32),
    ("64", 64),
    ("128", 128),
    ("256", 256),
    ("512", 512),
    ("1024", 1024),
];

const NS_PER_SECOND: f64 = 1e9;

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / NS_PER_SECOND
}

/// Text of the exposition under construction.
#[derive(Default)]
struct Page(Exposition);

impl Page {
    /// Writes a sample for each item.
    fn each<'a, T: 'a, V: Display>(
        &mut self,
        metric: &Metric,
        items: impl IntoIterator<Item = &'a T>,
        sample: impl Fn(&'a T, &mut dyn FnMut(&[Label<'_>], V)),
    ) {
        let mut family = self.0.family(metric);
        for item in items {
            sample(item, &mut |labels, value| family.sample(labels, value));
        }
    }

    fn one(&mut self, metric: &Metric, value: Option<impl Display>) {
        if let Some(value) = value {
            self.0.family(metric).sample(&[], value);
        }
    }
}

/// Calls `each` with every namespace of every disk, and the labels of both.
fn namespaces<'a>(disks: &'a [Disk], mut each: impl FnMut(&'a str, &str, &'a Namespace)) {
    for disk in disks {
        for namespace in &disk.namespaces {
            each(&disk.name, &namespace.nsid.to_string(), namespace);
        }
    }
}

/// Returns the sum of a counter over a disk's queues.
fn sum(disk: &Disk, of: impl Fn(&Queue) -> u64) -> u64 {
    disk.queues.iter().map(of).fold(0, u64::wrapping_add)
}

impl Snapshot {
    /// Returns the Prometheus text format, as served at `/metrics`.
    pub fn prometheus(&self) -> String {
        let mut page = Page::default();
        page.0
            .family(&m::BUILD_INFO)
            .sample(&[("version", &self.process.version)], 1);
        self.disks(&mut page);
        self.namespaces(&mut page);
        self.queues(&mut page);
        self.limits(&mut page);
        self.on_error(&mut page);
        self.paths(&mut page);
        self.workers(&mut page);
        self.process(&mut page);
        self.kind_counters(&mut page, m::KIND_COUNTERS);
        page.0.finish()
    }

    fn disks(&self, page: &mut Page) {
        page.each(&m::DISK_INFO, &self.disks, |disk, put| {
            let (kind, address) = (&*disk.kind, &*disk.address);
            let labels = [("disk", &*disk.name), ("kind", kind), ("address", address)];
            put(&labels, 1);
        });
        page.each(&m::DISK_UNSERVED, &self.unserved, |name, put| {
            put(&[("disk", &**name)], 1);
        });
        type Get = fn(&Disk) -> u64;
        let all: [(&Metric, Get); 4] = [
            (&m::DISK_CONNECTED, |disk| disk.connected.into()),
            (&m::DISK_CONNECTIONS, |disk| disk.connections),
            (&m::DISK_RESETS, |disk| disk.resets),
            (&m::DISK_MIGRATIONS, |disk| disk.migrations),
        ];
        for (metric, get) in all {
            page.each(metric, &self.disks, |disk, put| {
                put(&[("disk", &disk.name)], get(disk));
            });
        }
    }

    fn kind_counters(&self, page: &mut Page, kinds: &'static [KindCounters]) {
        for KindCounters { kind, rows } in kinds {
            let disks = self.disks.iter().filter(|disk| disk.kind == *kind);
            for (counter, metric) in *rows {
                page.each(metric, disks.clone(), |disk, put| {
                    if let Some(value) = disk.counters.get(*counter) {
                        put(&[("disk", &disk.name)], *value);
                    }
                });
            }
        }
    }

    fn namespaces(&self, page: &mut Page) {
        let mut family = page.0.family(&m::OPERATIONS);
        namespaces(&self.disks, |disk, nsid, ns| {
            if ns.nsid == 0 {
                return;
            }
            for kind in IoKind::ALL {
                let labels = [("disk", disk), ("namespace", nsid), ("op", kind.name())];
                family.sample(&labels, ns.operations.of(kind));
            }
        });
        let mut family = page.0.family(&m::BYTES);
        namespaces(&self.disks, |disk, nsid, ns| {
            if ns.nsid == 0 {
                return;
            }
            for (op, bytes) in [("read", ns.bytes_read), ("write", ns.bytes_written)] {
                let labels = [("disk", disk), ("namespace", nsid), ("op", op)];
                family.sample(&labels, bytes);
            }
        });
        let mut family = page.0.family(&m::ERRORS);
        namespaces(&self.disks, |disk, nsid, ns| {
            for failure in Failure::ALL {
                let kind = failure.name();
                let labels = [("disk", disk), ("namespace", nsid), ("kind", kind)];
                family.sample(&labels, ns.errors.get(kind).unwrap_or(&0));
            }
        });
        self.distributions(page);
    }

    fn distributions(&self, page: &mut Page) {
        for (metric, sampled) in [(&m::LATENCY_SAMPLED, true), (&m::LATENCY, false)] {
            let mut family = page.0.family(metric);
            namespaces(&self.disks, |disk, nsid, ns| {
                for kind in IoKind::ALL {
                    let Some(latency) = ns.latency.get(kind.name()) else {
                        continue;
                    };
                    if kind.is_sampled() == sampled {
                        let labels = [("disk", disk), ("namespace", nsid), ("op", kind.name())];
                        let sum = seconds(latency.sum);
                        family.histogram(&labels, below(latency, &TIMES), latency.count(), sum);
                    }
                }
            });
        }
        let mut family = page.0.family(&m::DEPTH_SAMPLED);
        namespaces(&self.disks, |disk, nsid, ns| {
            let depth = &ns.depth;
            if !depth.is_empty() {
                let labels = [("disk", disk), ("namespace", nsid)];
                family.histogram(&labels, below(depth, &DEPTHS), depth.count(), depth.sum);
            }
        });
    }

    fn queues(&self, page: &mut Page) {
        type Get = fn(&Queue) -> u64;
        page.each(&m::IN_FLIGHT, &self.disks, |disk, put| {
            put(&[("disk", &disk.name)], disk.in_flight());
        });
        let all: [(&Metric, Get); 5] = [
            (&m::COMMANDS, |queue| queue.commands),
            (&m::MMIO, |queue| queue.mmio_doorbells),
            (&m::SHADOW, |queue| queue.shadow_doorbells),
            (&m::ARMS, |queue| queue.arms),
            (&m::INTERRUPTS, |queue| queue.interrupts),
        ];
        for (metric, get) in all {
            page.each(metric, &self.disks, |disk, put| {
                put(&[("disk", &disk.name)], sum(disk, get));
            });
        }
    }

    fn limits(&self, page: &mut Page) {
        for (metric, bytes) in [(&m::LIMIT_IOPS, false), (&m::LIMIT_BPS, true)] {
            page.each(metric, &self.limits, |limits, put| {
                let rates = if bytes { limits.bps } else { limits.iops };
                for (op, rate) in ["all", "read", "write"].into_iter().zip(rates) {
                    put(&[("volume", &limits.volume), ("op", op)], rate);
                }
            });
        }
        page.each(&m::THROTTLED, &self.limits, |limits, put| {
            put(&[("volume", &limits.volume)], seconds(limits.throttled_ns));
        });
        page.each(&m::THROTTLED_REQUESTS, &self.limits, |limits, put| {
            put(&[("volume", &limits.volume)], limits.delayed);
        });
        page.each(&m::WEIGHT, &self.limits, |limits, put| {
            if let Some(weight) = limits.weight {
                put(&[("volume", &limits.volume)], weight);
            }
        });
    }

    fn on_error(&self, page: &mut Page) {
        page.each(&m::VOLUME_ERRORS, &self.on_error, |one, put| {
            put(&[("volume", &one.volume), ("op", "read")], one.read_errors);
            put(
                &[("volume", &one.volume), ("op", "write")],
                one.write_errors,
            );
        });
        page.each(&m::VOLUME_NO_SPACE, &self.on_error, |one, put| {
            put(&[("volume", &one.volume)], one.no_space);
        });
        page.each(&m::VOLUME_REPEATED, &self.on_error, |one, put| {
            put(&[("volume", &one.volume)], one.repeated);
        });
        page.each(&m::VOLUME_STOPPED, &self.on_error, |one, put| {
            put(&[("volume", &one.volume)], u64::from(one.held > 0));
        });
        page.each(&m::VOLUME_HELD, &self.on_error, |one, put| {
            put(&[("volume", &one.volume)], one.held);
        });
    }

    fn paths(&self, page: &mut Page) {
        type Get = fn(&Namespace, bool) -> u64;
        let all: [(&Metric, Get); 3] = [
            (&m::PATH_DIRECT, |_, direct| direct.into()),
            (&m::PATH_COMMANDS, |ns, _| ns.direct_commands),
            (&m::PATH_BOUNCED, |ns, _| ns.direct_bounced),
        ];
        for (metric, get) in all {
            let mut family = page.0.family(metric);
            namespaces(&self.disks, |disk, nsid, ns| {
                if let Some(direct) = ns.direct {
                    let labels = [("disk", disk), ("namespace", nsid)];
                    family.sample(&labels, get(ns, direct));
                }
            });
        }
        page.each(&m::DEVICE_UP, &self.devices, |device, put| {
            let labels = [("device", &*device.device), ("state", &*device.state)];
            put(&labels, u8::from(device.state == "live"));
        });
        page.each(&m::DEVICE_RESETS, &self.devices, |device, put| {
            put(&[("device", &device.device)], device.resets);
        });
    }

    fn workers(&self, page: &mut Page) {
        type Time = fn(&Worker) -> Option<u64>;
        let times: [(&Metric, Time); 4] = [
            (&m::WORKER_BUSY, |worker| Some(worker.busy_ns)),
            (&m::WORKER_POLLING, |worker| Some(worker.polling_ns)),
            (&m::WORKER_ASLEEP, |worker| Some(worker.asleep_ns)),
            (&m::WORKER_CPU, |worker| worker.cpu_ns),
        ];
        for (metric, get) in times {
            page.each(metric, &self.workers, |worker, put| {
                if let Some(time) = get(worker) {
                    put(&[("worker", &worker.id.to_string())], seconds(time));
                }
            });
        }
        type Count = fn(&Worker) -> u64;
        let counts: [(&Metric, Count); 4] = [
            (&m::WORKER_WAKE_UPS, |worker| worker.wake_ups),
            (&m::WORKER_STALLS, |worker| worker.stalls),
            (&m::RING_REQUESTS, |worker| worker.ring_requests),
            (&m::RING_CALLS, |worker| worker.ring_calls),
        ];
        for (metric, get) in counts {
            page.each(metric, &self.workers, |worker, put| {
                put(&[("worker", &worker.id.to_string())], get(worker));
            });
        }
    }

    fn process(&self, page: &mut Page) {
        let process = &self.process;
        page.one(&m::PROCESS_CPU, Some(seconds(process.cpu_ns)));
        page.one(&m::PROCESS_RSS, process.resident);
        page.one(&m::PROCESS_ANONYMOUS, process.anonymous);
        page.one(&m::PROCESS_VM, process.virtual_memory);
        page.one(&m::PROCESS_THREADS, process.threads);
        page.one(&m::PROCESS_START, Some(process.start));
        page.one(&m::PROCESS_RESTARTS, process.restarts);
        page.one(&m::PROCESS_PAUSE, process.last_pause_ns.map(seconds));
    }
}

/// Returns the number of values up to each bound.
fn below(
    of: &Distribution,
    bounds: &[(&'static str, u64)],
) -> impl Iterator<Item = (&'static str, u64)> {
    let limits: Vec<u64> = bounds.iter().map(|(_, bound)| *bound).collect();
    let names: Vec<&'static str> = bounds.iter().map(|(name, _)| *name).collect();
    names.into_iter().zip(of.cumulative(&limits))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests;
#[cfg(test)]
pub(crate) use tests::full as example;
