//! Suite `mediate`: one device alone, and behind mediation, direct and generic.
//!
//! The device is simulated, by a controller on a null volume whose requests take as long as the document's Optane took, or
//! no time. Alone, it has a CPU and a process to itself, as any controller of ours. Behind mediation it lives in the very
//! thread that mediates: with a CPU of its own it would take the loading thread's away, where there are two. So what it
//! works for a command, which a real device would do by itself, is counted against mediation.

use super::super::device::DeviceTarget;
use super::super::job::{Doorbells, Job};
use super::super::load;
use super::super::report::documents;
use super::super::results::Case;
use super::server::{Serve, Server};
use super::{Cores, Outcome, Plan};
use crate::control::ControllerCounters;
use crate::direct::{Cycles, PathChoice};
use anyhow::{Context, Result};

const SUITE: &str = "mediate";
const DEPTHS: [u16; 2] = [1, 32];
/// A device with the latency of the document's, and one with none. The second is no case of the document's.
const DEVICES: [(&str, &str); 2] = [("", "null://1T?latency=6.4us"), ("instant", "null://1T")];
const WAYS: [(&str, Option<PathChoice>); 3] = [
    ("bare", None),
    ("direct", Some(PathChoice::Direct)),
    ("generic", Some(PathChoice::Generic)),
];

/// The average of several distributions.
fn average(all: impl Iterator<Item = Cycles>) -> Option<f64> {
    let (mut count, mut total) = (0, 0.0);
    for cycles in all {
        count += cycles.count;
        total += cycles.total as f64;
    }
    (count > 0).then(|| total / count as f64)
}

/// Cycles to translate, to complete and to interrupt, on average, as far as they were measured.
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

pub fn run(plan: &Plan) -> Result<Outcome> {
    let cores = Cores::pair()?;
    let client = *cores.client.first().context("no CPU")?;
    let server = *cores.server.first().context("no second CPU")?;
    let mut outcome = Outcome::default();
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for (device, volume) in DEVICES {
            for interrupt in [false, true] {
                for depth in DEPTHS {
                    for (way, path) in WAYS {
                        let words = [way, if interrupt { "interrupt" } else { "" }, device];
                        let words: Vec<&str> =
                            words.into_iter().filter(|w| !w.is_empty()).collect();
                        let case = words.join(" ");
                        let below = match path {
                            Some(_) => format!("controller+{volume}"),
                            None => volume.to_owned(),
                        };
                        let served = Server::start(&Serve {
                            path,
                            ..Serve::one(&below, true, &[server])
                        })?;
                        let job = Job {
                            doorbells: Doorbells::Mmio,
                            interrupt,
                            ..plan.job(depth, &[client])
                        };
                        let target = DeviceTarget::open(&served.url(0), &job)?;
                        let measured = load::run(&target, &job, &mut ())?;
                        let counters = served.counters()?;
                        drop((target, served));
                        let case = Case {
                            suite: SUITE,
                            case: &case,
                            depth: depth.into(),
                            queues: 1,
                        };
                        let c = &mut outcome.collector;
                        c.add(case, "iops", "1/s", measured.iops());
                        c.add(case, "p50_ns", "ns", measured.read.percentile(50.0) as f64);
                        c.add(case, "p99_ns", "ns", measured.read.percentile(99.0) as f64);
                        for (metric, value) in cycles(&counters) {
                            if let Some(value) = value {
                                c.add(case, metric, "cycles", value);
                            }
                        }
                    }
                }
            }
        }
    }
    print(&outcome);
    Ok(outcome)
}

/// The figures beside the document's.
fn print(outcome: &Outcome) {
    let rows = outcome.collector.clone().rows();
    let at = |case: &str, depth: u32, metric: &str| {
        let found = |r: &&super::super::results::Row| {
            r.case == case && r.depth == depth && r.metric == metric
        };
        rows.iter().find(found).map(|row| row.value)
    };
    let text = |value: Option<f64>, digits: usize| {
        value.map_or("-".into(), |value| format!("{value:.digits$}"))
    };
    println!(
        "{:<28} {:>10} {:>9} {:>8} {:>11} {:>9} {:>9} {:>9}",
        "", "IOPS, 1", "of bare", "p50, us", "IOPS, 32", "translate", "complete", "interrupt"
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
        let share = iops.zip(at(&bare, 1, "iops")).map(|(a, b)| 100.0 * a / b);
        println!(
            "{case:<28} {:>10} {:>8}% {:>8} {:>11} {:>9} {:>9} {:>9}",
            text(iops, 0),
            text(share, 1),
            text(at(case, 1, "p50_ns").map(|ns| ns / 1000.0), 3),
            text(at(case, 32, "iops"), 0),
            text(at(case, 1, "translate_cycles"), 1),
            text(at(case, 1, "complete_cycles"), 1),
            text(at(case, 1, "interrupt_cycles"), 1),
        );
        if let Some(stated) = documents::MDEV.iter().find(|stated| stated.case == case) {
            let base = documents::MDEV.iter().find(|stated| stated.case == bare);
            let share = base.map(|base| 100.0 * stated.iops / base.iops);
            println!(
                "{:<28} {:>10} {:>8}% {:>8} {:>11} {:>9} {:>9} {:>9}",
                "  nvme-mdev",
                text(Some(stated.iops), 0),
                text(share, 1),
                text(Some(stated.latency_us), 3),
                "-",
                text(stated.translate, 1),
                text(stated.complete, 1),
                text(stated.interrupt, 1),
            );
        }
    }
}
