//! Suite `scale`: more controllers, more queues, on one worker and on two. This side loads all of
//! them from one thread.

use super::pool::Pool;
use super::server::{Serve, Server};
use super::{Cores, Outcome, Plan};
use crate::results::Case;
use anyhow::Result;
use std::time::Duration;

const SUITE: &str = "scale";
const CONTROLLERS: [u16; 5] = [1, 2, 4, 8, 16];
const QUEUES: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];
/// I/Os in flight on each queue.
const DEPTHS: [u16; 2] = [4, 32];
/// After this time under load, queues are where they will stay.
const SPREADING: Duration = Duration::from_secs(2);
const VOLUME: &str = "null://1T";

pub fn run(plan: &Plan) -> Result<Outcome> {
    let cores = Cores::pair()?;
    let mut outcome = Outcome::default();
    // The second worker's, which is the load's where there is no third.
    let mut server = cores.server.clone();
    let crowded = server.len() < 2;
    if crowded {
        server.extend(&cores.client);
        outcome.leave_out(
            "two workers with a CPU each",
            "they need three CPUs, one of them for the load; here the second worker shares the load's, so that what two workers \
             cost is seen, and not what they gain",
        );
    }
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for workers in [1, 2] {
            let words = match (workers, crowded) {
                (1, _) => "",
                (_, false) => " two workers",
                (_, true) => " two workers, one on the load's CPU",
            };
            let cpus = server.get(..workers).unwrap_or_default();
            // Queues go to the second worker when the first has been busy for a while.
            let plan = &Plan {
                ramp: if workers > 1 {
                    plan.ramp.max(SPREADING)
                } else {
                    plan.ramp
                },
                ..plan.clone()
            };
            let serve = |controllers: u16| Serve {
                volumes: vec![VOLUME.to_owned(); controllers.into()],
                workers,
                ..Serve::one(VOLUME, false, cpus)
            };
            for depth in DEPTHS {
                let job = plan.job(depth, &cores.client);
                for controllers in CONTROLLERS {
                    let server = Server::start(&plan.vnvme, &serve(controllers))?;
                    let urls: Vec<String> =
                        (0..controllers.into()).map(|i| server.url(i)).collect();
                    let pool = Pool::controllers(&urls, &job)?;
                    let case = format!("controllers {controllers}{words}");
                    measure(&mut outcome, &pool, &job, &case, controllers)?;
                }
                for queues in QUEUES {
                    for loaded in [queues, 1] {
                        let idle = if loaded < queues { " one busy" } else { "" };
                        let server = Server::start(&plan.vnvme, &serve(1))?;
                        let pool = Pool::queues(&server.url(0), &job, queues, loaded)?;
                        let case = format!("queues {queues}{idle}{words}");
                        measure(&mut outcome, &pool, &job, &case, queues)?;
                        if queues == 1 {
                            break;
                        }
                    }
                }
            }
        }
    }
    Ok(outcome)
}

fn measure(
    outcome: &mut Outcome,
    pool: &Pool,
    job: &super::Job,
    case: &str,
    queues: u16,
) -> Result<()> {
    let measured = load::run(pool, &pool.job(job), &mut ())?;
    let case = Case {
        suite: SUITE,
        case,
        depth: job.depth.into(),
        queues: queues.into(),
    };
    outcome.collector.add(case, "iops", "1/s", measured.iops());
    outcome
        .collector
        .add(case, "p99_ns", "ns", measured.read.percentile(99.0) as f64);
    Ok(())
}
