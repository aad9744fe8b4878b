//! Suite `processes`: the same disks served by one process, and by one process for each disk.
//! Measures memory, start, throughput, and weights, which have no effect between processes.

use super::scratch::Scratch;
use super::server::{Server, ServerConfig};
use super::{Plan, SuiteResults};
use crate::results::Case;
use anyhow::{Context, Result, anyhow};
use load::device::DeviceTarget;
use load::job::Job;
use load::stats::Measured;
use output::{OutputError, outln};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

const SUITE: &str = "processes";
const DISKS: usize = 8;
/// Number of I/Os in flight on each disk.
const DEPTH: u16 = 4;
/// Volume that stores nothing, so that only vnvme is measured.
const VOLUME: &str = "null://1T";
/// Size in bytes of the slices of one file, for the weights. Both slices compete for the file's
/// device.
const SLICE: u64 = 256 << 20;
const SLICE_DEPTH: u16 = 64;
/// Ramp time, in which the tuner finds the device's depth before shares are measured.
const RAMP: Duration = Duration::from_millis(1500);

/// Distribution of the disks over processes.
#[derive(Clone, Copy)]
enum ProcessLayout {
    Together,
    Each,
}

impl ProcessLayout {
    const ALL: [ProcessLayout; 2] = [ProcessLayout::Together, ProcessLayout::Each];

    fn word(self) -> &'static str {
        match self {
            ProcessLayout::Together => "one process",
            ProcessLayout::Each => "a process each",
        }
    }
}

/// Server processes, and the process of each disk.
struct Servers {
    servers: Vec<Server>,
    urls: Vec<String>,
}

impl Servers {
    fn start(plan: &Plan, way: ProcessLayout, volumes: &[String]) -> Result<Self> {
        let shares = match way {
            ProcessLayout::Together => vec![volumes],
            ProcessLayout::Each => volumes.chunks(1).collect(),
        };
        let (mut servers, mut urls) = (Vec::new(), Vec::new());
        for volumes in shares {
            let serve = ServerConfig {
                volumes: volumes.to_vec(),
                ..ServerConfig::one("", false, &[])
            };
            let server = Server::start(&plan.vnvme, &serve)?;
            urls.extend((0..volumes.len()).map(|index| server.url(index)));
            servers.push(server);
        }
        Ok(Self { servers, urls })
    }

    /// Loads the disks with one job each, all at the same time.
    fn load(&self, job: &Job) -> Result<Vec<Measured>> {
        let targets = self.urls.iter().map(|url| DeviceTarget::open(url, job));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        std::thread::scope(|scope| {
            let threads = targets.iter();
            let threads = threads.map(|target| scope.spawn(|| load::run(target, job, &mut ())));
            let threads: Vec<_> = threads.collect();
            let ended = threads.into_iter().map(|thread| {
                let ended = thread.join();
                ended.map_err(|_| anyhow!("a load ended by a bug"))?
            });
            ended.collect()
        })
    }
}

fn case(name: &str, depth: u16) -> Case<'_> {
    Case {
        suite: SUITE,
        case: name,
        depth: depth.into(),
        queues: 0,
    }
}

/// Creates the job of a client. Clients wait by interrupts, because polling would take the CPU from
/// workers on small machines.
fn job(plan: &Plan, depth: u16, ramp: Duration) -> Job {
    Job {
        interrupt: true,
        ramp: plan.ramp.max(ramp),
        ..plan.job(depth, &[])
    }
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let mut outcome = SuiteResults::default();
    let scratch = Scratch::new_in(&plan.output)?;
    let file = scratch.path().join("disk.raw");
    fill(&file)?;
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for way in ProcessLayout::ALL {
            cost(plan, &mut outcome, way)?;
            weights(plan, &mut outcome, way, &file)?;
        }
    }
    // A closed output is ignored: the results are written to their file all the same.
    let _ = print(&outcome);
    Ok(outcome)
}

/// Measures the cost of serving idle disks, and their throughput together.
fn cost(plan: &Plan, outcome: &mut SuiteResults, way: ProcessLayout) -> Result<()> {
    let volumes = vec![VOLUME.to_owned(); DISKS];
    let servers = Servers::start(plan, way, &volumes)?;
    let (mut memory, mut processes, mut threads) = (0, 0, 0);
    for server in &servers.servers {
        let footprint = server.footprint()?;
        memory += footprint.memory;
        processes += footprint.processes;
        threads += footprint.threads;
    }
    let count = servers.servers.len().max(1) as f64;
    let start: Duration = servers.servers.iter().map(Server::started_in).sum();
    let measured = servers.load(&job(plan, DEPTH, Duration::ZERO))?;
    let rate: f64 = measured.iter().map(Measured::iops).sum();
    let name = format!("{DISKS} disks, {}", way.word());
    let case = case(&name, DEPTH);
    let c = &mut outcome.collector;
    c.add(case, "memory", "MiB", memory as f64 / f64::from(1 << 20));
    c.add(case, "processes", "1", processes as f64);
    c.add(case, "threads", "1", threads as f64);
    c.add(case, "start", "ms", start.as_secs_f64() * 1e3 / count);
    c.add(case, "iops", "1/s", rate);
    Ok(())
}

/// Measures two slices of a file with weights, of which the second is due three times as much as
/// the first.
fn weights(plan: &Plan, outcome: &mut SuiteResults, way: ProcessLayout, file: &Path) -> Result<()> {
    let slice = |number: u64, weight: u32| {
        let (file, offset) = (file.display(), number * SLICE);
        format!("{file}?offset={offset}&length={SLICE}&weight={weight}")
    };
    let servers = Servers::start(plan, way, &[slice(0, 100), slice(1, 300)])?;
    let measured = servers.load(&job(plan, SLICE_DEPTH, RAMP))?;
    let rates: Vec<f64> = measured.iter().map(Measured::iops).collect();
    let all: f64 = rates.iter().sum();
    let name = format!("weights 1:3, {}", way.word());
    let case = case(&name, SLICE_DEPTH);
    if let Some(first) = rates.first() {
        let c = &mut outcome.collector;
        c.add(case, "share", "ratio", first / all.max(1e-9));
        c.add(case, "iops", "1/s", all);
    }
    Ok(())
}

/// Writes a file without holes, because holes would be read without the device.
fn fill(path: &Path) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("{}", path.display()))?;
    let piece = vec![0x5a; 1 << 20];
    for _ in 0..2 * SLICE / piece.len() as u64 {
        file.write_all(&piece)?;
    }
    Ok(file.sync_all()?)
}

fn print(outcome: &SuiteResults) -> Result<(), OutputError> {
    for row in outcome.collector.clone().figures().rows {
        outln!(
            "{:<32} {:<10} {:>12.3} {}",
            row.case,
            row.metric,
            row.value,
            row.unit
        );
    }
    Ok(())
}
