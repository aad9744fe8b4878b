//! Suite `tcp`: our initiator against our front-end, process to process over TCP on this machine.
//! An echo of the same bytes, measured slice by slice, is the limit.
//!
//! Each side has a CPU. The two sides of the echo either poll or sleep in the kernel: our figure is
//! divided by the faster of the two.

mod echo;
mod initiator;

use super::server::{Program, Server, ServerConfig};
use super::slices::{self, Contender, Load, Pings};
use super::{Cores, Plan, SuiteResults};
use crate::distance::agree;
use crate::results::{Case, Collector, SlicePosition};
use anyhow::{Context, Result, ensure};
use echo::{EchoTarget, Wait};
use initiator::{InitiatorTarget, Setup};
use load::job::Job;
use std::rc::Rc;

const SUITE: &str = "tcp";
/// Volume without latency, so that only the transport takes time.
const VOLUME: &str = "null://1T";

/// Measured cases: depth, connections, digests.
const CASES: [(u16, u16, bool); 6] = [
    (1, 1, false),
    (32, 1, false),
    (128, 4, false),
    (1, 1, true),
    (32, 1, true),
    (128, 4, true),
];

/// Words that select cases by depth.
const DEPTHS: [&str; 3] = ["1", "32", "128"];
const DIGESTS: [&str; 2] = ["plain", "digests"];

/// Refuses words that select no cases.
pub fn check_only(only: &[String]) -> Result<()> {
    let known = [&DEPTHS[..], &DIGESTS].concat();
    for word in only {
        ensure!(
            known.contains(&word.as_str()),
            "--only {word}: the suite tcp has no such cases"
        );
    }
    Ok(())
}

/// Returns the cases that a plan selects.
fn cases(plan: &Plan) -> impl Iterator<Item = (u16, u16, bool)> {
    let (depths, digests) = (plan.chosen(&DEPTHS), plan.chosen(&DIGESTS));
    CASES.into_iter().filter(move |(depth, _, digest)| {
        let word = DIGESTS[usize::from(*digest)];
        depths.contains(&depth.to_string().as_str()) && digests.contains(&word)
    })
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let cores = Cores::pair()?;
    let mut outcome = SuiteResults::default();
    let mut pings = Pings::new(&cores, plan)?;
    let cpus = cores.server.get(..1).unwrap_or_default();
    let serve = |program: &Program| {
        let serve = ServerConfig {
            volumes: Vec::new(),
            subsystems: vec![VOLUME.to_owned()],
            ..ServerConfig::one("", false, cpus)
        };
        Server::start(program, &serve).map(Rc::new)
    };
    let server = serve(&plan.vnvme)?;
    let other = plan.beside.as_ref().map(serve).transpose()?;
    let mut quotients = Vec::new();
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for case in cases(plan) {
            let sides = Sides::new(plan, case, &server, other.as_ref(), &cores)?;
            sides.measure(
                plan,
                run,
                &mut pings,
                &mut outcome.collector,
                &mut quotients,
            )?;
        }
    }
    for (depth, connections, digests) in cases(plan) {
        let of: Vec<_> = quotients
            .iter()
            .filter(|(case, _)| *case == (depth, connections, digests))
            .map(|(_, quotient)| *quotient)
            .collect();
        say((depth, connections, digests), &of);
    }
    Ok(outcome)
}

/// Figures of one round.
#[derive(Clone, Copy, Debug)]
struct Quotient {
    ours: f64,
    limit: f64,
    /// Median latency in nanoseconds.
    p50: f64,
    limit_p50: f64,
}

fn say(case: (u16, u16, bool), of: &[Quotient]) {
    use crate::results::median;
    let each = |value: fn(&Quotient) -> f64| median(&of.iter().map(value).collect::<Vec<_>>());
    let (depth, connections, digests) = case;
    eprintln!(
        "  depth {depth}, {connections} connection{}{}: {:.0} IOPS of {:.0}: {:.3}; p50 {:.2} us, of \
         the echo {:.2}: {:+.2} us ({} rounds)",
        if connections == 1 { "" } else { "s" },
        if digests { ", digests" } else { "" },
        each(|q| q.ours),
        each(|q| q.limit),
        each(|q| q.ours / q.limit.max(1e-9)),
        each(|q| q.p50) / 1e3,
        each(|q| q.limit_p50) / 1e3,
        each(|q| q.p50 - q.limit_p50) / 1e3,
        of.len(),
    );
}

/// Our own connection, and the echoes.
struct Sides<'a> {
    case: (u16, u16, bool),
    ours: Contender<'a>,
    echoes: Vec<Contender<'a>>,
}

impl<'a> Sides<'a> {
    fn new(
        plan: &Plan,
        case: (u16, u16, bool),
        server: &Rc<Server>,
        other: Option<&Rc<Server>>,
        cores: &Cores,
    ) -> Result<Self> {
        let (depth, connections, digests) = case;
        let job = plan.job(depth, &cores.client);
        let cpu = *cores.server.first().context("no second CPU")?;
        let suffix = if digests { " digests" } else { "" };
        let contender = |word: &str, load, beside| Contender {
            case: format!("{word}{suffix}"),
            depth,
            queues: connections,
            shows_gaps: false,
            goal: None,
            load,
            beside,
        };
        let ours = |server: &Rc<Server>| {
            let target = InitiatorTarget {
                address: server.subsystem(0),
                nqn: server.nqn(0),
                setup: Setup {
                    connections,
                    digests,
                },
            };
            slices::load(server.clone(), target, job.clone())
        };
        // Sleeping is measured with one connection only.
        let waits = match connections {
            1 => &[Wait::Polling, Wait::Blocking][..],
            _ => &[Wait::Polling],
        };
        let echoes = waits.iter().map(|&wait| {
            let target = EchoTarget {
                wait,
                connections,
                digests,
                cpu,
            };
            let word = match wait {
                Wait::Polling => "echo",
                Wait::Blocking => "echo sleeping",
            };
            contender(word, echo(target, job.clone()), None)
        });
        Ok(Self {
            case,
            ours: contender("vnvme", ours(server), other.map(ours)),
            echoes: echoes.collect(),
        })
    }

    /// Measures all sides in turn, as many times as the plan's run has slices.
    fn measure(
        &self,
        plan: &Plan,
        run: u32,
        pings: &mut Pings,
        collector: &mut Collector,
        quotients: &mut Vec<((u16, u16, bool), Quotient)>,
    ) -> Result<()> {
        let rounds = slices::rounds(plan);
        for round in 0..rounds {
            let id = run * rounds + round;
            let all: Vec<&Contender<'_>> =
                std::iter::once(&self.ours).chain(&self.echoes).collect();
            let mut found = vec![None; all.len()];
            // The order rotates with each round, so that none is always measured first.
            for step in 0..all.len() {
                let place = (step + round as usize) % all.len();
                found[place] = slices::one(SUITE, all[place], id, pings, collector)?;
            }
            let Some(Some((ping, iops, p50))) = found.first().copied() else {
                continue;
            };
            let echoes: Vec<_> = found[1..]
                .iter()
                .flatten()
                .filter(|(other, ..)| agree(ping.round_trip, other.round_trip))
                .collect();
            if echoes.len() < self.echoes.len() {
                continue;
            }
            let limit = echoes.iter().map(|echo| echo.1).fold(0.0, f64::max);
            let limit_p50 = echoes.iter().map(|echo| echo.2).fold(f64::MAX, f64::min);
            let taken = SlicePosition {
                round: id,
                round_trip: ping.round_trip,
            };
            let case: Case<'_> = self.ours.case(SUITE);
            collector.add_at(case, "of_echo", "ratio", iops / limit.max(1e-9), taken);
            collector.add_at(case, "p50_above_echo_ns", "ns", p50 - limit_p50, taken);
            let quotient = Quotient {
                ours: iops,
                limit,
                p50,
                limit_p50,
            };
            quotients.push((self.case, quotient));
        }
        Ok(())
    }
}

fn echo<'a>(target: EchoTarget, job: Job) -> Load<'a> {
    Box::new(move |ramp, runtime| {
        let job = Job {
            ramp,
            runtime,
            ..job.clone()
        };
        load::run(&target, &job, &mut ())
    })
}
