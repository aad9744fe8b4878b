//! `vnvme-bench TARGET --against PROGRAM`: one job on a volume that vnvme and another program serve
//! in turn, or on a file that the other program loads by itself.
//!
//! Each run starts both servers anew, one after the other, on the same CPU. Both are loaded by the
//! same client: over vfio-user beside SPDK and fio, over vhost-user beside qemu-storage-daemon. fio
//! loads the file directly, through io_uring.

mod blockdev;
mod fio;
mod spdk;

use super::pingpong::{self, SPAN};
use super::qsd::{QSD, Qsd, Start};
use super::scratch::{self, Scratch};
use super::server::{Program, Server, ServerConfig};
use super::{Choice, Cores, place};
use crate::results::median;
use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use load::device::DeviceTarget;
use load::job::{Job, JobArgs, Rw};
use load::lane::Target;
use load::progress::{nanos, quantity};
use load::signature;
use load::stats::Measured;
use load::virtio::VirtioTarget;
use output::outln;
use serde_json::{Value, json};
use spdk::Spdk;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tracing_subscriber::filter::Targets;

/// Size in bytes of each write that fills a volume in memory.
const FILL: u64 = 128 << 10;

/// Program to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// fio on a file or block device, through io_uring
    Fio,
    /// SPDK's target with null, malloc and AIO bdevs, over vfio-user
    Spdk,
    /// qemu-storage-daemon, over vhost-user-blk
    QemuStorageDaemon,
}

impl Peer {
    const fn word(self) -> &'static str {
        match self {
            Self::Fio => "fio",
            Self::Spdk => "spdk",
            Self::QemuStorageDaemon => QSD,
        }
    }

    /// Returns the name of the executable file.
    const fn program(self) -> &'static str {
        match self {
            Self::Spdk => "spdk_tgt",
            peer => peer.word(),
        }
    }

    /// Returns the way to install the program.
    const fn source(self) -> &'static str {
        match self {
            Self::Fio => "package fio",
            Self::Spdk => "it is built from SPDK's sources, ./configure --with-vfio-user",
            Self::QemuStorageDaemon => "package qemu-utils",
        }
    }
}

/// Serve a volume by vnvme and by another program in turn, and compare them.
#[derive(Parser)]
#[command(name = "vnvme bench", version, max_term_width = 120)]
pub struct Options {
    /// Volume to load, a URL or path; both programs open it in turn
    #[arg(value_name = "TARGET")]
    target: String,
    /// Program to compare with
    #[arg(long, value_enum, value_name = "PROGRAM")]
    against: Peer,
    /// Path of that program [default: it is searched for in PATH]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    #[command(flatten)]
    job: JobArgs,
    /// Runs of each program; the results are medians
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), value_name = "N")]
    runs: u32,
    /// Overwrite a target that holds data
    #[arg(long)]
    destroy_data: bool,
    /// Print results as JSON
    #[arg(long)]
    json: bool,
    /// Program to measure [default: the vnvme beside this program]
    #[arg(long, env = "VNVME_BIN", value_name = "PATH")]
    vnvme: Option<PathBuf>,
    /// Log filter for standard error
    #[arg(long, env = "VNVME_LOG", default_value = "warn", value_name = "FILTER")]
    pub log: Targets,
}

/// Result of one run of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    iops: f64,
    p50: f64,
    p99: f64,
}

impl Run {
    fn of(measured: &Measured) -> Self {
        let both = measured.both();
        Self {
            iops: measured.iops(),
            p50: both.percentile(50.0) as f64,
            p99: both.percentile(99.0) as f64,
        }
    }
}

/// Results of all runs of a program.
#[derive(Default)]
struct Runs(Vec<Run>);

impl Runs {
    fn median(&self, of: impl Fn(&Run) -> f64) -> f64 {
        median(&self.0.iter().map(of).collect::<Vec<_>>())
    }

    fn json(&self) -> Value {
        json!({
            "iops": self.median(|run| run.iops),
            "p50_ns": self.median(|run| run.p50),
            "p99_ns": self.median(|run| run.p99),
            "runs": self.0.iter().map(|run| run.iops).collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let all = || self.0.iter().map(|run| run.iops);
        format!(
            "{} IOPS ({} to {}), p50 {}, p99 {}",
            quantity(self.median(|run| run.iops)),
            quantity(all().fold(f64::INFINITY, f64::min)),
            quantity(all().fold(0.0, f64::max)),
            nanos(self.median(|run| run.p50)),
            nanos(self.median(|run| run.p99)),
        )
    }
}

/// Returns whether these arguments ask for a comparison.
pub fn is_wanted(mut args: impl Iterator<Item = String>) -> bool {
    args.any(|arg| arg == "--against" || arg.starts_with("--against="))
}

/// Returns whether the volume's bytes are gone when its server has ended.
fn is_volatile(target: &str) -> bool {
    ["null://", "mem://"]
        .iter()
        .any(|scheme| target.starts_with(scheme))
}

impl Options {
    /// Runs the comparison and prints its results.
    pub fn run(self) -> Result<()> {
        scratch::clean_up_on_signals()?;
        let volume = self.volume()?;
        let peer = Path::new(self.against.program());
        let peer = self.program.as_deref().unwrap_or(peer);
        self.find(peer)?;
        match self.against {
            Peer::Fio => fio::check(&volume)?,
            Peer::Spdk => spdk::check(&volume)?,
            Peer::QemuStorageDaemon => drop(blockdev::of(&volume)?),
        }
        let cores = Cores::pair()?;
        let (client, server) = (cores.client[0], cores.server[0]);
        let memory = place(Choice::default())?;
        let mut job = self.job.job()?;
        ensure!(!job.verify, "--verify is not possible with --against");
        job.memory = memory.source();
        if job.cpus.is_empty() {
            job.cpus.push(client);
        }
        let comparison = Comparison {
            options: &self,
            job: &job,
            volume: &volume,
            peer,
            server,
        };
        let (mut ours, mut theirs, mut trips) = (Runs::default(), Runs::default(), Vec::new());
        for run in 0..self.runs {
            eprintln!("run {} of {}", run + 1, self.runs);
            let trip = pingpong::measure(client, server, SPAN, &job.memory)?;
            trips.push(trip.line);
            ours.0.push(comparison.ours(run == 0)?);
            theirs.0.push(comparison.theirs()?);
        }
        self.print(&job, (&ours, &theirs), median(&trips))
    }

    /// Returns the volume as the servers name it: a path becomes absolute.
    fn volume(&self) -> Result<String> {
        let target = &self.target;
        if ["nvme://", "vfio-user://", "vhost-user-blk:"]
            .iter()
            .any(|one| target.starts_with(one))
        {
            bail!(
                "{target} is a device or a server; --against needs a volume that both programs can \
                 open, a path or URL such as null://1T"
            );
        }
        let path = Path::new(target);
        if path.exists() {
            return Ok(path.canonicalize()?.display().to_string());
        }
        Ok(target.clone())
    }

    /// Checks that the other program is installed.
    fn find(&self, program: &Path) -> Result<()> {
        let mut command = Command::new(program);
        command.arg("--version").stdin(Stdio::null());
        match command.output() {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "{} is not installed ({}); --program names another path",
                program.display(),
                self.against.source()
            ),
            found => found
                .map(drop)
                .with_context(|| program.display().to_string()),
        }
    }

    /// Returns the program to measure.
    fn vnvme(&self) -> Result<Program> {
        let path = match &self.vnvme {
            Some(path) => path.clone(),
            None => std::env::current_exe()?.with_file_name("vnvme"),
        };
        Ok(Program {
            path: path
                .canonicalize()
                .with_context(|| path.display().to_string())?,
            args: Vec::new(),
        })
    }

    fn print(&self, job: &Job, (ours, theirs): (&Runs, &Runs), trip: f64) -> Result<()> {
        let peer = self.against.word();
        let ratio = ours.median(|run| run.iops) / theirs.median(|run| run.iops).max(1e-9);
        if self.json {
            let document = json!({
                "target": self.target,
                "rw": job.rw.word(),
                "bs": job.bs,
                "iodepth": job.depth,
                "numjobs": job.queues,
                "vnvme": ours.json(),
                (peer): theirs.json(),
                "ratio": ratio,
                "round_trip_ns": trip,
            });
            outln!("{}", serde_json::to_string_pretty(&document)?);
            return Ok(());
        }
        let (rw, bs, depth) = (job.rw.word(), job.bs, job.depth);
        outln!("{}: {rw}, {bs} bytes, depth {depth}", self.target);
        outln!("  vnvme: {}", ours.text());
        outln!("  {peer}: {}", theirs.text());
        outln!("  vnvme of {peer}: {ratio:.2}, medians of {}", self.runs);
        outln!(
            "  round trip of a cache line between the two CPUs: {}",
            nanos(trip)
        );
        Ok(())
    }
}

/// The two sides of a comparison.
struct Comparison<'a> {
    options: &'a Options,
    job: &'a Job,
    volume: &'a str,
    peer: &'a Path,
    /// CPU of the servers.
    server: usize,
}

impl Comparison<'_> {
    /// Runs the job on vnvme. The first run refuses to overwrite data.
    fn ours(&self, is_first: bool) -> Result<Run> {
        let is_export = self.options.against == Peer::QemuStorageDaemon;
        let one = ServerConfig::one(self.volume, false, &[self.server]);
        let config = if is_export {
            ServerConfig {
                exports: vec![self.volume.to_owned()],
                volumes: Vec::new(),
                ..one
            }
        } else {
            one
        };
        let server = Server::start(&self.options.vnvme()?, &config)?;
        if is_export {
            self.load(|| VirtioTarget::open(&server.export(0), self.job), is_first)
        } else {
            self.load(|| DeviceTarget::open(&server.url(0), self.job), is_first)
        }
    }

    /// Runs the job on the other program.
    fn theirs(&self) -> Result<Run> {
        let cpus = [self.server];
        match self.options.against {
            Peer::Fio => fio::run(self.peer, self.volume, self.job),
            Peer::Spdk => {
                let spdk = Spdk::start(self.peer, self.volume, self.server)?;
                self.load(|| DeviceTarget::open(&spdk.url(), self.job), false)
            }
            Peer::QemuStorageDaemon => {
                let dir = Scratch::new()?;
                let qsd = Qsd::start(&Start {
                    program: self.peer,
                    blockdevs: &blockdev::of(self.volume)?,
                    socket: &dir.path().join("qsd.sock"),
                    cpus: &cpus,
                })?;
                self.load(|| VirtioTarget::open(&qsd.socket, self.job), false)
            }
        }
    }

    /// Runs the job on a target, which `open` opens for each use. A volume in memory is filled
    /// before it is read.
    fn load<T: Target>(&self, open: impl Fn() -> Result<T>, is_first: bool) -> Result<Run> {
        if is_first && self.job.rw.writes() && !is_volatile(self.volume) {
            signature::refuse_data(&self.options.target, &open()?, self.options.destroy_data)?;
        }
        if self.volume.starts_with("mem://") && !self.job.rw.writes() {
            let target = open()?;
            let size = self
                .job
                .size
                .map(|extent| extent.of(target.geometry().size));
            let fill = Job {
                rw: Rw::Write,
                bs: FILL,
                depth: 4,
                queues: 1,
                ios: Some(size.unwrap_or(target.geometry().size) / FILL),
                ..self.job.clone()
            };
            load::run(&target, &fill, &mut ())?;
        }
        Ok(Run::of(&load::run(&open()?, self.job, &mut ())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &[&str]) -> Options {
        Options::try_parse_from([&["vnvme bench"], words].concat()).unwrap()
    }

    #[test]
    fn comparison_is_recognised_by_its_option() {
        let wanted = |line: &str| is_wanted(line.split(' ').map(String::from));
        assert!(wanted("null://1T --against spdk"));
        assert!(wanted("--against=fio /a.raw"));
        assert!(!wanted("--suite cost"));
    }

    #[test]
    fn server_as_target_is_refused() {
        for target in [
            "vfio-user:///a.sock/1",
            "vhost-user-blk:///a",
            "nvme://0000:01:00.0/1",
        ] {
            let error = options(&[target, "--against", "spdk"]).run().unwrap_err();
            assert!(error.to_string().contains("needs a volume"), "{error}");
        }
    }

    #[test]
    fn missing_program_is_named_with_its_source() {
        let words = ["null://1T", "--against", "fio", "--program", "/none/fio"];
        let error = options(&words).run().unwrap_err().to_string();
        assert!(
            error.contains("/none/fio is not installed (package fio)"),
            "{error}"
        );
    }

    #[test]
    fn results_are_medians_of_runs() {
        let run = |iops| Run {
            iops,
            p50: 1000.0,
            p99: 2000.0,
        };
        let runs = Runs([30.0, 10.0, 20.0].map(run).to_vec());
        assert_eq!(runs.json()["iops"], 20.0);
        assert!(
            runs.text().starts_with("20 IOPS (10 to 30), p50 1.00 us"),
            "{}",
            runs.text()
        );
    }
}
