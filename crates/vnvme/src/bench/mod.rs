//! `vnvme bench`: a load generator in the manner of fio, and the suites that compare this program with others.
//!
//! One job: [`job`] says what to do, [`pattern`] where and with what data, [`load`] runs a thread for each queue on a
//! [`lane::Target`], [`stats`] is what comes out, [`fio`] its layout. Targets: [`device`] (an NVMe controller through our
//! driver: VFIO, a vfio-user socket, or a controller in this process) [`virtio`] (a
//! vhost-user-blk export), and [`uring`] (a file, straight).
//!
//! Suites: [`suite`] runs jobs against `vnvme serve` processes, interleaved and repeated; [`results`] keeps the figures;
//! [`report`] shows them beside those of the documents that this project follows.

mod device;
mod fio;
mod in_use;
mod job;
mod lane;
mod load;
mod pattern;
mod progress;
mod report;
mod results;
mod signature;
mod stats;
mod suite;
mod target;
mod uring;
mod virtio;

use crate::outln;
use crate::output::OutputError;
use anyhow::{Result, ensure};
use clap::Args;
use job::{Job, JobArgs};
use lane::Target;
use progress::{Progress, nanos, quantity};
use stats::{Flow, Measured};
use std::path::PathBuf;
use target::with_target;

/// Help that comes after the options.
pub const HELP: &str = "\
Targets:
  nvme://0000:44:00.0/1       namespace 1 of an NVMe device, through VFIO (hand it over with: vnvme bind 0000:44:00.0)
  vfio-user:///tmp/vm0.sock/1 namespace 1 of a controller served at this socket
  null://1T, mem://1G, file:///disks/a.raw
                              a volume behind a controller in this process, on the thread that loads it
  /disks/a.raw, /dev/vdb      a file or block device, straight through io_uring, to compare with

--rw=write, randwrite and randrw overwrite what is there. A target that holds something (a filesystem, a partition table, or
anything but zeroes at its start and end) is refused without --destroy-data, and one that is in use (mounted, swapped to, part
of another device, locked by another process) always.

Latency is measured from submission until the completion is seen; at high rates of one I/O in up to 31.";

/// Options of `vnvme bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// What to load: a URL or a path
    #[arg(required_unless_present_any = ["suite", "report"], value_name = "TARGET")]
    target: Option<String>,
    #[command(flatten)]
    job: JobArgs,
    /// Overwrite a target that holds something: a filesystem, a partition table, or any data at its
    /// start or end
    #[arg(long, conflicts_with = "suite")]
    destroy_data: bool,
    /// Print the figures in the layout of fio's JSON
    #[arg(long)]
    json: bool,
    /// With the histograms, as fio's json+ has them
    #[arg(long, requires = "json")]
    bins: bool,
    /// Run a suite of measurements instead: limit, doorbell, file, scale, mediate, share, cost, or all of them
    #[arg(long, value_enum, value_name = "NAME", conflicts_with = "target")]
    suite: Option<suite::Name>,
    /// How often a suite measures each case; the figure is the median
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), value_name = "N")]
    runs: u32,
    /// Of the suite file only these: randread, randwrite; tmpfs, disk; 1, 8, 32; bare, waiting, beside, plain, vnvme,
    /// pinned. What no word is given for is done in full. The results then hold nothing else of it
    #[arg(long, value_delimiter = ',', requires = "suite", value_name = "LIST")]
    only: Vec<String>,
    /// Where a suite has the memory of queues and data
    #[arg(
        long,
        value_enum,
        default_value_t,
        requires = "suite",
        value_name = "PLACE"
    )]
    memory: suite::Choice,
    /// Write the report of the results that there are
    #[arg(long, conflicts_with = "target")]
    report: bool,
    /// Figures that another program measured, to be taken into the results: files in their form
    #[arg(long, value_name = "FILE", requires = "report")]
    add: Vec<PathBuf>,
    /// Directory of results.json and report.html
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    output: PathBuf,
    /// Ceilings of the suite cost; figures above them are an error
    #[arg(long, default_value = "bench/ceilings.toml", value_name = "FILE")]
    ceilings: PathBuf,
}

impl BenchArgs {
    /// Measures.
    pub fn run(self) -> Result<()> {
        let job = self.job.job()?;
        let mut verdict = Ok(());
        if let Some(name) = self.suite {
            ensure!(
                job.ios.is_none() && !job.verify,
                "a suite chooses the load itself"
            );
            name.check_only(&self.only)?;
            let plan = suite::Plan {
                only: self.only.clone(),
                runtime: job.runtime,
                ramp: job.ramp,
                runs: self.runs,
                output: self.output.clone(),
                ceilings: self.ceilings.clone(),
                memory: suite::place(self.memory)?,
            };
            let asked = self.job.runtime.map(|_| job.runtime);
            verdict = suite::run(name, asked, &plan);
        }
        if self.report || self.suite.is_some() {
            report::write(
                &self.output,
                &self.add,
                self.suite.and_then(suite::Name::only),
            )?;
            return verdict;
        }
        let target = self.target.unwrap_or_default();
        let single = Single {
            name: &target,
            job: &job,
            destroy_data: self.destroy_data,
        };
        let measured = with_target(&target, &job, single)?;
        if self.json {
            let document = fio::document(&target, &job, &measured, self.bins);
            outln!("{}", serde_json::to_string_pretty(&document)?);
        } else {
            print(&measured)?;
        }
        Ok(())
    }
}

/// What is done with a target of whatever type.
struct Single<'a> {
    name: &'a str,
    job: &'a Job,
    destroy_data: bool,
}

impl target::Visitor for Single<'_> {
    fn visit<T: Target>(self, target: &T) -> Result<Measured> {
        let geometry = target.geometry();
        eprintln!("{}", geometry.description);
        // These hold nothing that outlives the process.
        let passing = ["null://", "mem://"]
            .iter()
            .any(|scheme| self.name.starts_with(scheme));
        if self.job.rw.writes() && !passing {
            signature::refuse_data(self.name, target, self.destroy_data)?;
        }
        if self.job.verify {
            eprintln!("seed {}", self.job.seed);
        }
        let runtime = self.job.ios.is_none().then_some(self.job.runtime);
        let mut progress = Progress::new(runtime, false);
        let measured = load::run(target, self.job, &mut progress);
        progress.end();
        measured
    }
}

/// The figures for people.
fn print(measured: &Measured) -> Result<(), OutputError> {
    for (name, flow) in [("read", &measured.read), ("write", &measured.write)] {
        if flow.ios > 0 {
            print_flow(name, flow, measured)?;
        }
    }
    if measured.verified > 0 {
        outln!("verified {} blocks that were written", measured.verified);
    }
    Ok(())
}

fn print_flow(name: &str, flow: &Flow, measured: &Measured) -> Result<(), OutputError> {
    let iops = measured.rate(flow.ios);
    outln!(
        "{name}: {} IOPS, {}B/s, {} I/Os in {:.2} s",
        quantity(iops),
        quantity(measured.rate(flow.bytes)),
        flow.ios,
        measured.elapsed.as_secs_f64(),
    );
    let h = &flow.latency;
    if h.is_empty() {
        return Ok(());
    }
    outln!(
        "  latency of {}: min {}, mean {}, max {}",
        if h.len() >= flow.ios {
            "each".into()
        } else {
            format!("one in {:.0}", flow.ios as f64 / h.len() as f64)
        },
        nanos(h.min() as f64),
        nanos(flow.mean()),
        nanos(h.max() as f64),
    );
    let shown = [50.0, 90.0, 99.0, 99.9, 99.99];
    let parts = shown.map(|p| format!("p{p} {}", nanos(flow.percentile(p) as f64)));
    outln!("  {}", parts.join(", "));
    Ok(())
}
