//! Suite `doorbell`: what shadow doorbells gain, and how many MMIO doorbells are left.
//!
//! Doorbells are trapped (a message each), as a VMM has them; this side polls for completions, and
//! rings for each I/O that it submits, as fio does. `batched`: it rings once for all that it can
//! submit. `sleeping`: the worker goes to sleep at once, so each arming and wake-up shows.
//! `interrupt`: this side sleeps too, until an interrupt comes.

use super::pool::Pool;
use super::server::{Serve, Server};
use super::{Cores, Outcome, Plan};
use crate::results::Case;
use anyhow::Result;
use load::job::{Doorbells, Job};

const SUITE: &str = "doorbell";
/// Depth and queues.
const POINTS: [(u16, u16); 6] = [(1, 1), (2, 1), (4, 1), (8, 1), (32, 1), (32, 4)];
/// Points of the cases that sleep.
const FEW_POINTS: [(u16, u16); 2] = [(1, 1), (32, 1)];

struct Way {
    words: &'static str,
    /// I/Os for each ring, at most.
    batch: u16,
    idle_window: Option<u64>,
    interrupt: bool,
    points: &'static [(u16, u16)],
}

const WAYS: [Way; 5] = [
    Way {
        words: "",
        batch: 1,
        idle_window: None,
        interrupt: false,
        points: &POINTS,
    },
    Way {
        words: " batched",
        batch: u16::MAX,
        idle_window: None,
        interrupt: false,
        points: &POINTS,
    },
    Way {
        words: " sleeping",
        batch: 1,
        idle_window: Some(0),
        interrupt: false,
        points: &POINTS,
    },
    Way {
        words: " sleeping batched",
        batch: u16::MAX,
        idle_window: Some(0),
        interrupt: false,
        points: &FEW_POINTS,
    },
    Way {
        words: " interrupt",
        batch: 1,
        idle_window: Some(0),
        interrupt: true,
        points: &FEW_POINTS,
    },
];

pub fn run(plan: &Plan) -> Result<Outcome> {
    let cores = Cores::pair()?;
    let mut outcome = Outcome::default();
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for way in &WAYS {
            for &(depth, queues) in way.points {
                for doorbells in [Doorbells::Mmio, Doorbells::Shadow] {
                    let server = Server::start(
                        &plan.vnvme,
                        &Serve {
                            idle_window: way.idle_window,
                            ..Serve::one(
                                "null://1T",
                                false,
                                cores.server.get(..1).unwrap_or_default(),
                            )
                        },
                    )?;
                    let job = Job {
                        doorbells,
                        batch: way.batch,
                        interrupt: way.interrupt,
                        ..plan.job(depth, &cores.client)
                    };
                    // One thread for all queues: this side has one core.
                    let pool = Pool::queues(&server.url(0), &job, queues, queues)?;
                    let measured = load::run(&pool, &pool.job(&job), &mut ())?;
                    let state = match doorbells {
                        Doorbells::Mmio => "off",
                        Doorbells::Shadow => "on",
                    };
                    let case = format!("shadow {state}{}", way.words);
                    let case = Case {
                        suite: SUITE,
                        case: &case,
                        depth: depth.into(),
                        queues: queues.into(),
                    };
                    let c = &mut outcome.collector;
                    c.add(case, "iops", "1/s", measured.iops());
                    c.add(case, "p50_ns", "ns", measured.read.percentile(50.0) as f64);
                    c.add(case, "p99_ns", "ns", measured.read.percentile(99.0) as f64);
                    c.add(case, "mmio_per_io", "1", server.mmio_per_io()?);
                }
            }
        }
    }
    Ok(outcome)
}
