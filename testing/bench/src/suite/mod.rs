//! Benchmark suites: the same jobs on several set-ups, repeated and interleaved, so that a
//! temporarily slow machine affects all of them. A figure is the median of the runs; comparisons
//! are ratios within one run of a suite.

pub mod against;
mod copying;
mod cost;
mod counters;
mod doorbell;
mod file;
mod image;
mod limit;
mod mediate;
mod near;
mod pingpong;
mod pool;
mod processes;
mod qsd;
mod rbd;
mod scale;
mod scratch;
mod server;
mod share;
mod slices;
mod tail;
mod tcp;
mod vhost;

pub use near::{Choice, NearMemory};

use crate::results::{self, Collector, LeftOut, Machine, Results};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use load::job::Job;
use rustix::thread::{CpuSet, sched_getaffinity};
pub use server::Program;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Null and memory volumes beside the ping-pong of a cache line between the two cores
    Limit,
    /// A vhost-user-blk export of null and memory volumes beside the same ping-pong
    Vhost,
    /// Shadow doorbells off and on: IOPS and MMIO doorbells for each I/O
    Doorbell,
    /// A file behind a controller, and straight through io_uring
    File,
    /// qcow2 images, beside qemu-storage-daemon
    Image,
    /// Images of a Ceph cluster (--rbd), beside qemu-storage-daemon
    Rbd,
    /// 1 to 16 controllers, 1 to 64 queues
    Scale,
    /// A device alone, and behind mediation, direct and generic
    Mediate,
    /// Slices of one device beside each other: shares under unequal load, weights, limits
    Share,
    /// Our initiator against our front-end by NVMe/TCP, beside an echo of the same bytes
    Tcp,
    /// Many disks in one process, and in a process for each: memory, start, throughput, weights
    Processes,
    /// Instructions for each I/O, by callgrind
    Cost,
    /// All of them
    All,
}

impl Name {
    /// Checks that these words select cases of the suite; see [`Plan::only`].
    pub fn check_only(self, only: &[String]) -> Result<()> {
        match self {
            _ if only.is_empty() => Ok(()),
            Name::File => file::check_only(only),
            Name::Image => image::check_only(only),
            Name::Rbd => rbd::check_only(only),
            Name::Scale => scale::check_only(only),
            Name::Tcp => tcp::check_only(only),
            Name::Doorbell => doorbell::check_only(only),
            Name::Vhost => vhost::check_only(only),
            _ => bail!(
                "--only chooses from the suites file, image, rbd, scale, tcp, doorbell and vhost"
            ),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Name::Limit => "limit",
            Name::Vhost => "vhost",
            Name::Doorbell => "doorbell",
            Name::File => "file",
            Name::Image => "image",
            Name::Rbd => "rbd",
            Name::Scale => "scale",
            Name::Mediate => "mediate",
            Name::Share => "share",
            Name::Processes => "processes",
            Name::Tcp => "tcp",
            Name::Cost => "cost",
            Name::All => "all",
        }
    }

    /// Returns the name of the suite; `None` when it stands for all.
    pub fn only(self) -> Option<&'static str> {
        (self != Name::All).then(|| self.word())
    }

    /// Returns the default measuring time of a case, which is shorter for suites with many cases.
    fn runtime(self) -> Duration {
        match self {
            Name::Scale => Duration::from_millis(300),
            _ => Duration::from_secs(1),
        }
    }
}

/// Parameters of a benchmark run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Program to measure.
    pub vnvme: Program,
    /// Program to compare with, which is measured in turn, slice by slice.
    pub beside: Option<Program>,
    /// Path of qemu-storage-daemon; `None` for the system's.
    pub qsd: Option<PathBuf>,
    /// Images in a Ceph cluster, one for each server.
    pub rbd: Vec<String>,
    /// Words that select cases; see [`Plan::chosen`].
    pub only: Vec<String>,
    /// Measuring time of one run of a case.
    pub runtime: Duration,
    pub ramp: Duration,
    /// Number of runs of each case.
    pub runs: u32,
    /// Directory for results, and for files used by the load.
    pub output: PathBuf,
    /// File with ceilings for suite `cost`; without it the suite only counts.
    pub ceilings: Option<PathBuf>,
    /// Source of memory for queues and data.
    pub memory: NearMemory,
}

impl Plan {
    /// Returns those of `words` that `--only` selects; all of them when it selects none.
    fn chosen<'a>(&self, words: &[&'a str]) -> Vec<&'a str> {
        let asked = |word: &&&str| self.only.iter().any(|only| only == **word);
        let chosen: Vec<&str> = words.iter().filter(asked).copied().collect();
        if chosen.is_empty() {
            words.to_vec()
        } else {
            chosen
        }
    }

    /// Creates a job of this plan.
    fn job(&self, depth: u16, cpus: &[usize]) -> Job {
        Job {
            depth,
            runtime: self.runtime,
            ramp: self.ramp,
            cpus: cpus.to_vec(),
            memory: self.memory.source(),
            ..Job::default()
        }
    }
}

/// CPUs for the two ends of a measurement.
#[derive(Clone, Debug)]
struct Cores {
    /// CPUs of the loading thread.
    client: Vec<usize>,
    /// CPUs of the workers.
    server: Vec<usize>,
}

impl Cores {
    /// Returns this process's CPUs: the first one for the client, the others for the server.
    fn here() -> Result<Cores> {
        let set = sched_getaffinity(None).context("affinity")?;
        let mut all = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
        let client = all.next().into_iter().collect();
        Ok(Cores {
            client,
            server: all.collect(),
        })
    }

    /// Returns all CPUs.
    fn all(self) -> Vec<usize> {
        [self.client, self.server].concat()
    }

    /// Returns the CPUs if there are at least two, because both sides cannot poll on a single one.
    fn pair() -> Result<Cores> {
        let cores = Cores::here()?;
        if cores.server.is_empty() {
            bail!("it needs two CPUs, and this process may use one");
        }
        Ok(cores)
    }
}

/// Returns the memory source that the user chose.
pub fn place(choice: Choice) -> Result<NearMemory> {
    Ok(NearMemory::new(choice, &Cores::here()?))
}

/// Results of a suite.
#[derive(Default)]
struct SuiteResults {
    collector: Collector,
    /// Cases that were not measured, with the reason.
    left_out: Vec<(String, String)>,
    /// Violated expectation, if any. The figures are saved nevertheless.
    complaint: Option<String>,
}

impl SuiteResults {
    fn leave_out(&mut self, what: &str, why: impl ToString) {
        self.left_out.push((what.into(), why.to_string()));
    }
}

/// Runs one suite or all of them, and saves the results. `runtime` is the measuring time of each
/// case; `None` for each suite's default.
pub fn run(name: Name, runtime: Option<Duration>, plan: &Plan) -> Result<()> {
    scratch::clean_up_on_signals()?;
    let one = |name: Name, plan: &Plan| {
        let runtime = runtime.unwrap_or(name.runtime());
        let plan = plan.clone();
        one(name, &Plan { runtime, ..plan })
    };
    if name == Name::All {
        let mut complaints = Vec::new();
        for name in [
            Name::Cost,
            Name::Limit,
            Name::Vhost,
            Name::Doorbell,
            Name::File,
            Name::Image,
            Name::Rbd,
            Name::Scale,
            Name::Mediate,
            Name::Share,
            Name::Tcp,
            Name::Processes,
        ] {
            if let Err(error) = one(name, plan) {
                complaints.push(format!("{}: {error:#}", name.word()));
            }
        }
        if complaints.is_empty() {
            return Ok(());
        }
        bail!("{}", complaints.join("; "));
    }
    one(name, plan)
}

fn one(name: Name, plan: &Plan) -> Result<()> {
    let word = name.word();
    let path = plan.output.join(results::FILE);
    std::fs::create_dir_all(&plan.output).with_context(|| format!("{}", plan.output.display()))?;
    let mut results = Results::read(&path)?;
    let mut machine = Machine::here();
    eprintln!("suite {word}");
    let cpus: Vec<usize> = Cores::here().map_or_else(|_| Vec::new(), Cores::all);
    let (began, stolen) = (Instant::now(), file::stolen(&cpus));
    let outcome = match name {
        Name::Limit => limit::run(plan),
        Name::Vhost => vhost::run(plan),
        Name::Doorbell => doorbell::run(plan),
        Name::File => file::run(plan),
        Name::Image => image::run(plan),
        Name::Rbd => rbd::run(plan),
        Name::Scale => scale::run(plan),
        Name::Mediate => mediate::run(plan),
        Name::Share => share::run(plan),
        Name::Tcp => tcp::run(plan),
        Name::Processes => processes::run(plan),
        Name::Cost => cost::run(plan),
        Name::All => Ok(SuiteResults::default()),
    };
    let outcome = outcome.unwrap_or_else(|error| {
        let mut outcome = SuiteResults::default();
        outcome.leave_out("the suite", format!("{error:#}"));
        outcome.complaint = Some(format!("{error:#}"));
        outcome
    });
    let left_out = outcome.left_out.into_iter().map(|(what, why)| {
        eprintln!("left out of {word}: {what}: {why}");
        LeftOut {
            suite: word.into(),
            what,
            why,
        }
    });
    let left_out = left_out.collect();
    let stolen = file::stolen(&cpus).saturating_sub(stolen).as_secs_f64();
    machine.stolen = stolen / (began.elapsed().as_secs_f64() * cpus.len() as f64).max(1e-9);
    results.about.machine = machine;
    results.about.ran(&command());
    results.replace(word, outcome.collector.figures(), left_out);
    results.write(&path)?;
    match outcome.complaint {
        Some(complaint) => bail!("{complaint}"),
        None => Ok(()),
    }
}

/// Returns this process's command line, with the program's path reduced to its name.
fn command() -> String {
    let mut words = vec!["vnvme-bench".to_owned()];
    words.extend(std::env::args().skip(1));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_select_cases_and_unknown_word_is_refused() {
        let plan = |only: &[&str]| Plan {
            vnvme: Program::default(),
            beside: None,
            qsd: None,
            rbd: Vec::new(),
            only: only.iter().map(|word| (*word).to_owned()).collect(),
            runtime: Duration::ZERO,
            ramp: Duration::ZERO,
            runs: 1,
            output: PathBuf::new(),
            ceilings: None,
            memory: NearMemory::default(),
        };
        let some = plan(&["32", "disk", "1"]);
        assert_eq!(some.chosen(&["1", "8", "32"]), ["1", "32"]);
        assert_eq!(some.chosen(&["tmpfs", "disk"]), ["disk"]);
        assert_eq!(some.chosen(&["bare", "vnvme"]), ["bare", "vnvme"]);
        assert!(Name::File.check_only(&some.only).is_ok());
        assert!(Name::File.check_only(&plan(&["disk", "7"]).only).is_err());
        assert!(Name::Limit.check_only(&some.only).is_err());
        assert!(Name::Limit.check_only(&[]).is_ok());
    }
}
