//! Suite `share`: slices of one device, loaded at the same time, with unequal load, weights and
//! limits.
//!
//! The device is simulated, with a latency and few units. It is slow enough that CPUs are not the
//! bottleneck, even when two clients and two workers share two of them. Clients wait by interrupts,
//! workers sleep, and the device needs no CPU.

use super::server::{Server, ServerConfig};
use super::{Plan, SuiteResults};
use crate::results::Case;
use anyhow::{Result, anyhow};
use load::device::DeviceTarget;
use load::job::Job;
use load::stats::Measured;
use load::virtio::VirtioTarget;
use output::{OutputError, outln};
use std::time::Duration;

const SUITE: &str = "share";
/// Device that processes two requests at a time, some thousands per second.
const NARROW: &str = "null://1T?latency=250us&units=2&name=d";
/// Device that processes all requests at the same time.
const WIDE: &str = "null://1T?latency=250us&units=64&name=d";
/// Ramp time, in which the tuner finds the device's depth before measuring.
const RAMP: Duration = Duration::from_millis(1500);
/// Limit of a slice in requests per second.
const LIMIT: u32 = 2000;
const LIMIT_TIME: Duration = Duration::from_secs(10);

/// Kind of client that loads a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    /// A guest with an NVMe driver.
    Nvme,
    /// A guest with a virtio driver.
    Virtio,
}

use Client::{Nvme, Virtio};

/// A device and the two clients that share it.
struct Share {
    name: &'static str,
    clients: [Client; 2],
    /// URL options of each slice.
    options: [&'static str; 2],
    depths: [u16; 2],
}

const SHARES: [Share; 6] = [
    Share {
        name: "equal",
        clients: [Nvme, Nvme],
        options: ["weight=100", "weight=100"],
        depths: [4, 64],
    },
    Share {
        name: "equal without weights",
        clients: [Nvme, Nvme],
        options: ["", ""],
        depths: [4, 64],
    },
    Share {
        name: "weights 1:3",
        clients: [Nvme, Nvme],
        options: ["weight=100", "weight=300"],
        depths: [64, 64],
    },
    Share {
        name: "weights 1:3, unequal load",
        clients: [Nvme, Nvme],
        options: ["weight=100", "weight=300"],
        depths: [64, 16],
    },
    Share {
        name: "equal, NVMe and virtio",
        clients: [Nvme, Virtio],
        options: ["weight=100", "weight=100"],
        depths: [4, 64],
    },
    Share {
        name: "equal, virtio and NVMe",
        clients: [Virtio, Nvme],
        options: ["weight=100", "weight=100"],
        depths: [4, 64],
    },
];

impl Share {
    fn has_virtio(&self) -> bool {
        self.clients.contains(&Virtio)
    }
}

fn slice(device: &str, number: usize, options: &str) -> String {
    let sign = if options.is_empty() { "" } else { "&" };
    format!("{device}&offset={number}G&length=1G{sign}{options}")
}

fn serve(
    plan: &Plan,
    volumes: Vec<String>,
    exports: Vec<String>,
    workers: usize,
) -> Result<Server> {
    Server::start(
        &plan.vnvme,
        &ServerConfig {
            volumes,
            exports,
            workers,
            idle_window: Some(0),
            ..ServerConfig::one("", false, &[])
        },
    )
}

/// A slice that is ready to be loaded.
enum LoadedSlice {
    Nvme(DeviceTarget),
    Virtio(VirtioTarget),
}

impl LoadedSlice {
    /// Opens slice `index` among those with this kind of client.
    fn open(server: &Server, client: Client, index: usize, job: &Job) -> Result<Self> {
        Ok(match client {
            Nvme => LoadedSlice::Nvme(DeviceTarget::open(&server.url(index), job)?),
            Virtio => LoadedSlice::Virtio(VirtioTarget::open(&server.export(index), job)?),
        })
    }

    fn run(&self, job: &Job) -> Result<Measured> {
        match self {
            LoadedSlice::Nvme(target) => load::run(target, job, &mut ()),
            LoadedSlice::Virtio(target) => load::run(target, job, &mut ()),
        }
    }
}

/// Loads several slices of a server at the same time.
fn together(server: &Server, jobs: &[(Client, usize, Job)]) -> Result<Vec<Measured>> {
    let open = |(client, index, job): &(Client, usize, Job)| -> Result<(LoadedSlice, Job)> {
        Ok((
            LoadedSlice::open(server, *client, *index, job)?,
            job.clone(),
        ))
    };
    let targets = jobs.iter().map(open).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = targets
            .iter()
            .map(|(target, job)| scope.spawn(move || target.run(job)))
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Measured>>| {
            let ended = thread.join();
            ended.map_err(|_| anyhow!("a load ended by a bug"))?
        };
        threads.into_iter().map(join).collect()
    })
}

fn job(plan: &Plan, depth: u16) -> Job {
    Job {
        interrupt: true,
        ramp: plan.ramp.max(RAMP),
        ..plan.job(depth, &[])
    }
}

fn case(name: &str, depth: u16) -> Case<'_> {
    Case {
        suite: SUITE,
        case: name,
        depth: depth.into(),
        queues: 1,
    }
}

fn p99(measured: &Measured) -> f64 {
    measured.read.percentile(99.0) as f64
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let mut outcome = SuiteResults::default();
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for (workers, words) in [(1, "one worker"), (2, "two workers")] {
            for share in &SHARES {
                if share.has_virtio() {
                    // An export has a thread of its own, so there is one way to do it.
                    if workers == 1 {
                        shares(plan, &mut outcome, share, workers, share.name)?;
                    }
                    continue;
                }
                let name = format!("{}, {words}", share.name);
                shares(plan, &mut outcome, share, workers, &name)?;
            }
        }
        limits(plan, &mut outcome)?;
    }
    // A closed output is ignored: the results are written to their file all the same.
    let _ = print(&outcome);
    Ok(outcome)
}

fn shares(
    plan: &Plan,
    outcome: &mut SuiteResults,
    share: &Share,
    workers: usize,
    name: &str,
) -> Result<()> {
    let (mut volumes, mut exports, mut jobs) = (Vec::new(), Vec::new(), Vec::new());
    let slices = share.clients.iter().zip(share.options).zip(share.depths);
    for (number, ((client, options), depth)) in slices.enumerate() {
        let list = match client {
            Nvme => &mut volumes,
            Virtio => &mut exports,
        };
        jobs.push((*client, list.len(), job(plan, depth)));
        list.push(slice(NARROW, number, options));
    }
    let server = serve(plan, volumes, exports, workers)?;
    let measured = together(&server, &jobs)?;
    let rates: Vec<f64> = measured.iter().map(Measured::iops).collect();
    let all: f64 = rates.iter().sum();
    let c = &mut outcome.collector;
    if let Some(first) = rates.first() {
        let case = case(name, share.depths[0]);
        c.add(case, "share", "ratio", first / all.max(1e-9));
        c.add(case, "iops", "1/s", all);
    }
    Ok(())
}

/// Measures a limited slice under full load, and its neighbour with and without the limit.
fn limits(plan: &Plan, outcome: &mut SuiteResults) -> Result<()> {
    let limited = format!("weight=100&iops={LIMIT}");
    let volumes = vec![slice(WIDE, 0, "weight=100"), slice(WIDE, 1, &limited)];
    let server = serve(plan, volumes, Vec::new(), 2)?;
    let neighbour = job(plan, 4);
    let long = Job {
        runtime: plan.runtime.max(LIMIT_TIME),
        ..neighbour.clone()
    };
    let greedy = Job {
        depth: 64,
        ..long.clone()
    };
    let before = together(&server, &[(Nvme, 0, neighbour.clone())])?;
    let both = together(&server, &[(Nvme, 0, long), (Nvme, 1, greedy)])?;
    let after = together(&server, &[(Nvme, 0, neighbour)])?;
    let alone: Vec<f64> = before.iter().chain(&after).map(p99).collect();
    let alone = alone.iter().sum::<f64>() / alone.len().max(1) as f64;
    let c = &mut outcome.collector;
    if let [with, limited] = both.as_slice() {
        let case = case("limited", 4);
        c.add(case, "limited_iops", "1/s", limited.iops());
        c.add(case, "of_limit", "ratio", limited.iops() / f64::from(LIMIT));
        c.add(case, "p99_alone_ns", "ns", alone);
        c.add(case, "p99_beside_ns", "ns", p99(with));
        c.add(case, "p99_ratio", "ratio", p99(with) / alone.max(1.0));
    }
    Ok(())
}

fn print(outcome: &SuiteResults) -> Result<(), OutputError> {
    for row in outcome.collector.clone().figures().rows {
        outln!(
            "{:<44} {:<16} {:>12.3} {}",
            row.case,
            row.metric,
            row.value,
            row.unit
        );
    }
    Ok(())
}
