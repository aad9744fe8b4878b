//! Suite `limit`: what a controller adds to the two hand-overs of a cache line that it cannot do
//! without.

use super::copying::Copying;
use super::pingpong;
use super::server::{Serve, Server};
use super::{Cores, Outcome, Plan};
use crate::results::Case;
use anyhow::{Context, Result};
use load::device::DeviceTarget;
use load::job::{Doorbells, Job, Rw};
use std::time::Duration;

const SUITE: &str = "limit";
const VOLUMES: [(&str, &str); 2] = [("null", "null://1T"), ("memory", "mem://256M")];
/// Bytes of the memory volume, and of each write that fills it.
const MEMORY: u64 = 256 << 20;
const FILL: u64 = 128 << 10;
const DEPTHS: [u16; 3] = [1, 32, 128];

/// What a command may cost on the null volume with mapped doorbells, in nanoseconds, at a round
/// trip of `rtt`: the project's own goal.
pub fn goal(depth: u32, rtt: f64) -> Option<f64> {
    match depth {
        1 => Some(1.25 * rtt + 200.0),
        32 => Some(0.2 * rtt + 90.0),
        128 => Some(0.1 * rtt + 80.0),
        _ => None,
    }
}

/// Writes all of the memory volume, for memory that was never written is not there.
fn written(job: &Job) -> Job {
    Job {
        rw: Rw::Write,
        bs: FILL,
        ios: Some(MEMORY / FILL),
        ramp: Duration::ZERO,
        ..job.clone()
    }
}

pub fn run(plan: &Plan) -> Result<Outcome> {
    let cores = Cores::pair()?;
    let client = *cores.client.first().context("no CPU")?;
    let server = *cores.server.first().context("no second CPU")?;
    let mut outcome = Outcome::default();
    let copying = Copying::new(MEMORY)?;
    let source = plan.memory.source();
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for depth in DEPTHS {
            for (name, volume) in VOLUMES {
                for mapped in [true, false] {
                    let way = if mapped { "mapped" } else { "shadow" };
                    let before = pingpong::measure(client, server, pingpong::SPAN, &source)?;
                    let served =
                        Server::start(&plan.vnvme, &Serve::one(volume, mapped, &[server]))?;
                    let job = Job {
                        doorbells: if mapped {
                            Doorbells::Mmio
                        } else {
                            Doorbells::Shadow
                        },
                        ..plan.job(depth, &[client])
                    };
                    let target = DeviceTarget::open(&served.url(0), &job)?;
                    let mut copy = None;
                    if name == "memory" {
                        copy = Some(copying.measure(server, pingpong::SPAN)?);
                        load::run(&target, &written(&job), &mut ())?;
                    }
                    let measured = load::run(&target, &job, &mut ())?;
                    drop((target, served));
                    let after = pingpong::measure(client, server, pingpong::SPAN, &source)?;
                    let (line, entry) = (
                        (before.line + after.line) / 2.0,
                        (before.entry + after.entry) / 2.0,
                    );
                    let c = &mut outcome.collector;
                    let case = format!("{name} {way}");
                    let case = Case {
                        suite: SUITE,
                        case: &case,
                        depth: depth.into(),
                        queues: 1,
                    };
                    let nanos = 1e9 / measured.iops().max(1e-9);
                    c.add(case, "ns_per_io", "ns", nanos);
                    c.add(case, "iops", "1/s", measured.iops());
                    c.add(case, "p50_ns", "ns", measured.read.percentile(50.0) as f64);
                    c.add(case, "p99_ns", "ns", measured.read.percentile(99.0) as f64);
                    c.add(case, "rtt_ns", "ns", line);
                    if let Some(copy) = copy {
                        c.add(case, "copy_ns", "ns", copy);
                    }
                    if let Some(goal) = goal(depth.into(), line)
                        && name == "null"
                        && mapped
                    {
                        c.add(case, "of_goal", "ratio", nanos / goal);
                    }
                    let pair = Case {
                        suite: SUITE,
                        case: "pingpong",
                        depth: 1,
                        queues: 1,
                    };
                    c.add(pair, "rtt_ns", "ns", line);
                    c.add(pair, "entry_rtt_ns", "ns", entry);
                    if let Some(far) = plan.memory.farthest() {
                        c.add(pair, "far_rtt_ns", "ns", far);
                    }
                }
            }
        }
    }
    Ok(outcome)
}
