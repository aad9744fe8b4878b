//! Suite `limit`: time that a controller adds to the two unavoidable transfers of a cache line.

use super::copying::Copying;
use super::pingpong;
use super::server::{Program, Server, ServerConfig};
use super::slices::{self, Contender, Load, Pings};
use super::{Cores, Plan, SuiteResults};
use crate::results::Case;
use anyhow::{Context, Result};
use load::device::DeviceTarget;
use load::job::{Doorbells, Job, Rw};
use std::rc::Rc;
use std::time::Duration;

const SUITE: &str = "limit";
const NULL: &str = "null";
const MEMORY: &str = "memory";
const VOLUMES: [(&str, &str); 2] = [(NULL, "null://1T"), (MEMORY, "mem://256M")];
/// Size in bytes of the memory volume, and of each write that fills it.
const SIZE: u64 = 256 << 20;
const FILL: u64 = 128 << 10;
const DEPTHS: [u16; 3] = [1, 32, 128];

/// Returns the project's goal for a command on the null volume, in nanoseconds, at a round trip of
/// `rtt`.
pub fn goal(depth: u32, rtt: f64) -> Option<f64> {
    match depth {
        1 => Some(1.25 * rtt + 200.0),
        32 => Some(0.2 * rtt + 90.0),
        128 => Some(0.1 * rtt + 80.0),
        _ => None,
    }
}

/// Returns a job that writes the whole memory volume, because unwritten memory is not allocated.
fn written(job: &Job) -> Job {
    Job {
        rw: Rw::Write,
        bs: FILL,
        ios: Some(SIZE / FILL),
        ramp: Duration::ZERO,
        ..job.clone()
    }
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let cores = Cores::pair()?;
    let client = *cores.client.first().context("no CPU")?;
    let server = *cores.server.first().context("no second CPU")?;
    let mut outcome = SuiteResults::default();
    let copying = Copying::new(SIZE)?;
    let source = plan.memory.source();
    let mut pings = Pings::new(&cores, plan)?;
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        let c = &mut outcome.collector;
        for depth in DEPTHS {
            let mut contenders = Vec::new();
            for (name, volume) in VOLUMES {
                for mapped in [true, false] {
                    let way = if mapped { "mapped" } else { "shadow" };
                    let of =
                        |program: &Program| served(plan, program, volume, mapped, depth, &cores);
                    contenders.push(Contender {
                        case: format!("{name} {way}"),
                        depth,
                        queues: 1,
                        shows_gaps: true,
                        goal: (name == NULL).then_some(goal),
                        load: of(&plan.vnvme)?,
                        beside: plan.beside.as_ref().map(of).transpose()?,
                    });
                }
            }
            slices::take(SUITE, &contenders, &mut pings, plan, run, c)?;
        }
        let case = |case, depth| Case {
            suite: SUITE,
            case,
            depth,
            queues: 1,
        };
        c.add(
            case("copying", 1),
            "copy_ns",
            "ns",
            copying.measure(server, pingpong::SPAN)?,
        );
        let pair = pingpong::measure(client, server, pingpong::SPAN, &source)?;
        c.add(case("pingpong", 1), "rtt_ns", "ns", pair.line);
        c.add(case("pingpong", 1), "entry_rtt_ns", "ns", pair.entry);
        if let Some(far) = plan.memory.farthest() {
            c.add(case("pingpong", 1), "far_rtt_ns", "ns", far);
        }
    }
    Ok(outcome)
}

/// Starts a server of one controller, and returns it with its load.
fn served<'a>(
    plan: &Plan,
    program: &Program,
    volume: &str,
    mapped: bool,
    depth: u16,
    cores: &Cores,
) -> Result<Load<'a>> {
    let cpus = cores.server.get(..1).unwrap_or_default();
    let server = Server::start(program, &ServerConfig::one(volume, mapped, cpus))?;
    let doorbells = if mapped {
        Doorbells::Mmio
    } else {
        Doorbells::Shadow
    };
    let job = Job {
        doorbells,
        ..plan.job(depth, &cores.client)
    };
    let target = DeviceTarget::open(&server.url(0), &job)?;
    if volume.starts_with("mem") {
        load::run(&target, &written(&job), &mut ())?;
    }
    slices::load_in_turn(Rc::new(server), target, job)
}
