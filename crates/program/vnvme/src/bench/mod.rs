//! `vnvme bench`: runs the load generator (crate `load`) on a target that the user names.
//!
//! [`in_use`] refuses disks that are in use. Measurement suites are a separate program, which
//! [`suites`] runs.

mod in_use;
pub mod suites;
mod target;

use anyhow::Result;
use clap::Args;
use load::fio;
use load::job::{Job, JobArgs};
use load::lane::Target;
use load::progress::{Progress, nanos, quantity};
use load::signature;
use load::stats::{Flow, Measured};
use output::{OutputError, outln};
use target::with_target;

/// Help text after the options.
pub const HELP: &str = "\
Targets:
  nvme://0000:44:00.0/1        namespace 1 of an NVMe device, through VFIO (bind
                               it first: vnvme bind 0000:44:00.0)
  vfio-user:///tmp/vm0.sock/1  namespace 1 of a controller at this socket
  vhost-user-blk:///tmp/vm1.sock
                               a vhost-user-blk export, through one queue
  null://1T, file:///disks/a.raw, qcow2:///disks/a.qcow2, nbd://HOST/EXPORT
                               any volume of \"vnvme serve\", behind a controller
                               in this process, on the thread of the load
  /disks/a.raw, /dev/vdb, /dev/ublkb0
                               a file or block device, directly through io_uring,
                               for comparison

Writes and trims destroy data. A target that holds any (a filesystem, a
partition table, or bytes other than zero at its start or end) is refused
without --destroy-data; a target in use (mounted, swap, part of another device,
locked by another process) is always refused.

Latency is the time from submission until the completion is seen, measured at
high rates for one I/O in up to 31.

\"vnvme bench VOLUME --against fio|spdk|qemu-storage-daemon\" serves the volume by
vnvme and by that program in turn, under the same load, and prints both medians,
the ratio and the round trip between the two CPUs. fio loads the file itself.
\"vnvme bench --suite NAME\" runs a suite of measurements. Both are in the program
vnvme-bench, which must be installed beside this one; \"vnvme-bench --help\" lists
the suites.";

/// Options of `vnvme bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Target to load, a URL or path
    #[arg(value_name = "TARGET")]
    target: String,
    #[command(flatten)]
    job: JobArgs,
    /// Overwrite a target that holds data: a filesystem, a partition table, or any bytes other than
    /// zero at its start or end
    #[arg(long)]
    destroy_data: bool,
    /// Print results in the layout of fio's JSON
    #[arg(long)]
    json: bool,
    /// Include histograms, as fio's json+ does
    #[arg(long, requires = "json")]
    bins: bool,
}

impl BenchArgs {
    /// Measures.
    pub fn run(self) -> Result<()> {
        let job = self.job.job()?;
        let single = Single {
            name: &self.target,
            job: &job,
            destroy_data: self.destroy_data,
        };
        let measured = with_target(&self.target, &job, single)?;
        if self.json {
            let document = fio::document(&self.target, &job, &measured, self.bins);
            outln!("{}", serde_json::to_string_pretty(&document)?);
        } else {
            print(&measured)?;
        }
        Ok(())
    }
}

/// Benchmark of a single job, independent of the type of the target.
struct Single<'a> {
    name: &'a str,
    job: &'a Job,
    destroy_data: bool,
}

impl target::Visitor for Single<'_> {
    fn visit<T: Target>(self, target: &T) -> Result<Measured> {
        let geometry = target.geometry();
        eprintln!("{}", geometry.description);
        // Volumes of these schemes keep nothing after the process ends.
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

/// Prints the results of a measurement as text.
fn print(measured: &Measured) -> Result<(), OutputError> {
    let flows = [
        ("read", &measured.read),
        ("write", &measured.write),
        ("trim", &measured.trim),
    ];
    for (name, flow) in flows {
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
