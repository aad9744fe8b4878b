//! Suite `mediate`: a device alone, and behind direct and generic mediation.
//!
//! The device is simulated by a controller on a null volume. Its requests take as long as those of
//! the document's Optane, or no time. Alone, it has a CPU and a process to itself. Behind mediation
//! it runs in the mediating thread: with a CPU of its own it would compete with the loading thread
//! on machines with two CPUs. The device's own work for a command, which real hardware would do,
//! thus counts as a cost of mediation.
//!
//! All variants exist at the same time, with the processes of idle ones stopped. They are loaded in
//! turn for a fraction of a second each. Ratios and added times are computed within one turn; the
//! figures are their medians.

use super::counters::{ControllerCounters, Cycles};
use super::server::{Program, Server, ServerConfig};
use super::{Cores, Plan, SuiteResults};
use crate::report::documents;
use crate::results::{Case, Collector};
use anyhow::{Context, Result};
use load::device::DeviceTarget;
use load::job::{Doorbells, Job};
use load::stats::Measured;
use output::{OutputError, outln};

const SUITE: &str = "mediate";
const DEPTHS: [u16; 2] = [1, 32];
/// Number of turns in a run, in which the variants are loaded one after the other.
const SLICES: u32 = 5;
/// Simulated devices: one with the latency of the document's device, and one without latency, which
/// the document does not have.
const DEVICES: [(&str, &str); 2] = [("", "null://1T?latency=6.4us"), ("instant", "null://1T")];
const WAYS: [(&str, Option<&'static str>); 3] = [
    ("bare", None),
    ("direct", Some("direct")),
    ("generic", Some("generic")),
];

/// Returns the average over several distributions.
fn average(all: impl Iterator<Item = Cycles>) -> Option<f64> {
    let (mut count, mut total) = (0, 0.0);
    for cycles in all {
        count += cycles.count;
        total += cycles.total as f64;
    }
    (count > 0).then(|| total / count as f64)
}

/// Returns the average cycles to translate, to complete and to interrupt, where measured.
fn cycles(counters: &[ControllerCounters]) -> [(&'static str, Option<f64>); 3] {
    let lanes = || {
        let paths = counters.iter().flat_map(|c| &c.direct);
        paths.flat_map(|path| &path.lanes)
    };
    let queues = counters
        .iter()
        .flat_map(|c| &c.queues)
        .filter(|q| q.qid > 0);
    [
        (
            "translate_cycles",
            average(lanes().map(|lane| lane.translate)),
        ),
        (
            "complete_cycles",
            average(lanes().map(|lane| lane.complete)),
        ),
        (
            "interrupt_cycles",
            average(queues.map(|q| q.interrupt_cycles)),
        ),
    ]
}

/// A variant, ready to be loaded. Its process is stopped while another variant is loaded.
struct ReadyVariant {
    target: DeviceTarget,
    served: Server,
    case: String,
}

impl Drop for ReadyVariant {
    /// Resumes the process first, because the driver releases the device by messages that the
    /// process has to answer.
    fn drop(&mut self) {
        let _ = self.served.stand_still(false);
    }
}

impl ReadyVariant {
    fn start(
        vnvme: &Program,
        (way, path): (&str, Option<&'static str>),
        (device, volume): (&str, &str),
        job: &Job,
        server: usize,
    ) -> Result<Self> {
        let words = [way, if job.interrupt { "interrupt" } else { "" }, device];
        let words: Vec<&str> = words.into_iter().filter(|w| !w.is_empty()).collect();
        let below = match path {
            Some(_) => format!("controller+{volume}"),
            None => volume.to_owned(),
        };
        let served = Server::start(
            vnvme,
            &ServerConfig {
                path,
                ..ServerConfig::one(&below, true, &[server])
            },
        )?;
        let target = DeviceTarget::open(&served.url(0), job)?;
        served.stand_still(true)?;
        Ok(Self {
            served,
            target,
            case: words.join(" "),
        })
    }

    fn case(&self, depth: u16) -> Case<'_> {
        Case {
            suite: SUITE,
            case: &self.case,
            depth: depth.into(),
            queues: 1,
        }
    }

    fn slice(&self, job: &Job) -> Result<Measured> {
        self.served.stand_still(false)?;
        let measured = load::run(&self.target, job, &mut ());
        self.served.stand_still(true)?;
        measured
    }
}

/// Measures the variants of one device in turn, within a fraction of a second of each other, so
/// that other load on the machine affects all of them.
fn compare(
    plan: &Plan,
    device: (&str, &str),
    interrupt: bool,
    depth: u16,
    collector: &mut Collector,
) -> Result<()> {
    let cores = Cores::pair()?;
    let client = *cores.client.first().context("no CPU")?;
    let server = *cores.server.first().context("no second CPU")?;
    let job = Job {
        doorbells: Doorbells::Mmio,
        interrupt,
        runtime: plan.runtime / SLICES,
        ramp: plan.ramp.min(plan.runtime / SLICES / 4),
        ..plan.job(depth, &[client])
    };
    let ways = WAYS
        .iter()
        .map(|way| ReadyVariant::start(&plan.vnvme, *way, device, &job, server));
    let ways = ways.collect::<Result<Vec<_>>>()?;
    for slice in 0..SLICES as usize {
        let mut bare = 0.0;
        let mut others = Vec::new();
        for turn in 0..ways.len() {
            let at = (slice + turn) % ways.len();
            let Some(way) = ways.get(at) else {
                continue;
            };
            let measured = way.slice(&job)?;
            let case = way.case(depth);
            collector.add(case, "iops", "1/s", measured.iops());
            let percentile = |p| measured.read.percentile(p) as f64;
            collector.add(case, "p50_ns", "ns", percentile(50.0));
            collector.add(case, "p99_ns", "ns", percentile(99.0));
            if at == 0 {
                bare = measured.iops();
            } else {
                others.push((case, measured.iops()));
            }
        }
        for (case, iops) in others {
            collector.add(case, "of_bare", "ratio", iops / bare);
            if depth == 1 {
                collector.add(case, "added_ns", "ns", 1e9 / iops - 1e9 / bare);
            }
        }
    }
    for way in &ways {
        way.served.stand_still(false)?;
        let case = way.case(depth);
        for (metric, value) in cycles(&way.served.counters()?) {
            if let Some(value) = value {
                collector.add(case, metric, "cycles", value);
            }
        }
        way.served.stand_still(true)?;
    }
    Ok(())
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let mut outcome = SuiteResults::default();
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for device in DEVICES {
            for interrupt in [false, true] {
                for depth in DEPTHS {
                    compare(plan, device, interrupt, depth, &mut outcome.collector)?;
                }
            }
        }
    }
    // A closed output is ignored: the results are written to their file all the same.
    let _ = print(&outcome);
    Ok(outcome)
}

/// Prints the figures beside those of the document.
fn print(outcome: &SuiteResults) -> Result<(), OutputError> {
    let rows = outcome.collector.clone().figures().rows;
    let at = |case: &str, depth: u32, metric: &str| {
        let found =
            |r: &&crate::results::Row| r.case == case && r.depth == depth && r.metric == metric;
        rows.iter().find(found).map(|row| row.value)
    };
    let text = |value: Option<f64>, digits: usize| {
        value.map_or("-".into(), |value| format!("{value:.digits$}"))
    };
    outln!(
        "{:<28} {:>10} {:>9} {:>9} {:>8} {:>11} {:>9} {:>9} {:>9}",
        "",
        "IOPS, 1",
        "of bare",
        "added, us",
        "p50, us",
        "IOPS, 32",
        "translate",
        "complete",
        "interrupt"
    );
    let mut cases: Vec<&str> = Vec::new();
    for row in &rows {
        if !cases.contains(&row.case.as_str()) {
            cases.push(&row.case);
        }
    }
    for case in cases {
        let bare = case
            .replacen("direct", "bare", 1)
            .replacen("generic", "bare", 1);
        let iops = at(case, 1, "iops");
        let share = at(case, 1, "of_bare").map(|share| 100.0 * share);
        let added = at(case, 1, "added_ns").map(|ns| ns / 1000.0);
        outln!(
            "{case:<28} {:>10} {:>8}% {:>9} {:>8} {:>11} {:>9} {:>9} {:>9}",
            text(iops, 0),
            text(share, 1),
            text(added, 3),
            text(at(case, 1, "p50_ns").map(|ns| ns / 1000.0), 3),
            text(at(case, 32, "iops"), 0),
            text(at(case, 1, "translate_cycles"), 1),
            text(at(case, 1, "complete_cycles"), 1),
            text(at(case, 1, "interrupt_cycles"), 1),
        );
        if let Some(stated) = documents::MDEV.iter().find(|stated| stated.case == case) {
            let base = documents::MDEV.iter().find(|stated| stated.case == bare);
            let share = base.map(|base| 100.0 * stated.iops / base.iops);
            let added = base.map(|base| stated.latency_us - base.latency_us);
            outln!(
                "{:<28} {:>10} {:>8}% {:>9} {:>8} {:>11} {:>9} {:>9} {:>9}",
                "  nvme-mdev",
                text(Some(stated.iops), 0),
                text(share, 1),
                text(added, 3),
                text(Some(stated.latency_us), 3),
                "-",
                text(stated.translate, 1),
                text(stated.complete, 1),
                text(stated.interrupt, 1),
            );
        }
    }
    Ok(())
}
