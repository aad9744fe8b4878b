//! Suite `scale`: many controllers or queues on one and two workers; a busy controller beside many
//! idle ones; and a controller with one command at a time beside many busy ones. One thread loads
//! all of them.

use super::pool::TargetPool;
use super::server::{Program, Server, ServerConfig};
use super::slices::{self, Contender, Load, Pings};
use super::tail::TailLoad;
use super::{Cores, Plan, SuiteResults};
use anyhow::{Result, bail};
use load::job::Job;
use std::rc::Rc;
use std::time::Duration;

const SUITE: &str = "scale";
const CONTROLLERS: [u16; 5] = [1, 2, 4, 8, 16];
const QUEUES: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Numbers of I/Os in flight on each queue.
const DEPTHS: [u16; 2] = [4, 32];
/// Numbers of controllers of which one is busy, with [`CROWD_DEPTHS`] I/Os in flight.
const CROWD: [u16; 2] = [1, 200];
const CROWD_DEPTHS: [u16; 2] = [1, 32];
/// Time under load after which idle controllers are armed and no longer polled.
const ARMING: Duration = Duration::from_millis(300);
/// Numbers of busy controllers beside one with a command at a time. Each busy one has
/// [`BUSY_DEPTH`] I/Os in flight.
const BUSY: [u16; 2] = [0, 16];
const BUSY_DEPTH: u16 = 32;
/// Parts of the suite, for `--only`.
const PARTS: [&str; 3] = ["load", "crowd", "tail"];
/// Time under load after which queues are no longer moved between workers.
const SPREADING: Duration = Duration::from_secs(2);
const VOLUME: &str = "null://1T";

/// Checks that these words select cases of this suite.
pub fn check_only(only: &[String]) -> Result<()> {
    match only.iter().find(|word| !PARTS.contains(&word.as_str())) {
        Some(word) => bail!("--only {word}: the suite scale has {}", PARTS.join(", ")),
        None => Ok(()),
    }
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let parts = plan.chosen(&PARTS);
    let cores = Cores::pair()?;
    let mut outcome = SuiteResults::default();
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
    let mut pings = Pings::new(&cores, plan)?;
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for depth in DEPTHS.into_iter().filter(|_| parts.contains(&"load")) {
            for workers in [1, 2] {
                let words = match (workers, crowded) {
                    (1, _) => "",
                    (_, false) => " two workers",
                    (_, true) => " two workers, one on the load's CPU",
                };
                let setup = Setup {
                    plan,
                    cpus: server.get(..workers).unwrap_or_default(),
                    workers,
                    words,
                    job: plan.job(depth, &cores.client),
                };
                for group in [setup.controllers(), setup.queues()] {
                    let c = &mut outcome.collector;
                    if workers == 1 {
                        // All of them are compared with one: they take turns.
                        let group = group.iter().map(|make| make(&setup));
                        let group = group.collect::<Result<Vec<_>>>()?;
                        slices::take(SUITE, &group, &mut pings, plan, run, c)?;
                        continue;
                    }
                    // Contenders that take turns would not stay busy, and their queues would not
                    // stay on the workers that they were spread to.
                    for make in &group {
                        let contender = make(&setup)?;
                        (contender.load)(SPREADING, Duration::from_millis(1))?;
                        slices::take(SUITE, &[contender], &mut pings, plan, run, c)?;
                    }
                }
            }
        }
    }
    if parts.contains(&"crowd") {
        for (run, depth) in (0..plan.runs).flat_map(|run| CROWD_DEPTHS.map(|depth| (run, depth))) {
            let setup = Setup {
                plan,
                cpus: server.get(..1).unwrap_or_default(),
                workers: 1,
                words: "",
                job: plan.job(depth, &cores.client),
            };
            let group = CROWD.map(|count| setup.crowd(count));
            let group = group.into_iter().collect::<Result<Vec<_>>>()?;
            for contender in &group {
                (contender.load)(ARMING, Duration::from_millis(1))?;
            }
            slices::take(SUITE, &group, &mut pings, plan, run, &mut outcome.collector)?;
        }
    }
    if parts.contains(&"tail") {
        for run in 0..plan.runs {
            let setup = Setup {
                plan,
                cpus: server.get(..1).unwrap_or_default(),
                workers: 1,
                words: "",
                job: plan.job(1, &cores.client),
            };
            let group = BUSY.map(|count| setup.tail(count));
            let group = group.into_iter().collect::<Result<Vec<_>>>()?;
            slices::take(SUITE, &group, &mut pings, plan, run, &mut outcome.collector)?;
        }
    }
    Ok(outcome)
}

/// Clients and their server, which is dropped after them.
struct BackgroundClients {
    tail: TailLoad,
    _server: Rc<Server>,
}

impl BackgroundClients {
    fn run(&self, ramp: Duration, runtime: Duration) -> Result<load::stats::Measured> {
        self.tail.run(ramp, runtime)
    }
}

/// Settings that several contenders share.
struct Setup<'a> {
    plan: &'a Plan,
    cpus: &'a [usize],
    workers: usize,
    words: &'static str,
    job: Job,
}

/// Function that starts a contender.
type StartContender = Box<dyn Fn(&Setup<'_>) -> Result<Contender<'static>>>;

impl Setup<'_> {
    /// Returns contenders with one to sixteen controllers of one queue each.
    fn controllers(&self) -> Vec<StartContender> {
        let make = |count: u16| -> StartContender {
            Box::new(move |setup| {
                let case = format!("controllers {count}{}", setup.words);
                let open = move |server: &Server, job: &Job| {
                    let urls: Vec<String> = (0..count.into()).map(|i| server.url(i)).collect();
                    TargetPool::controllers(&urls, job, urls.len())
                };
                setup.contender(case, count, count, open)
            })
        };
        CONTROLLERS.into_iter().map(make).collect()
    }

    /// Returns contenders with one to 64 queues of a controller, of which either all or one are
    /// loaded.
    fn queues(&self) -> Vec<StartContender> {
        let make = |(count, loaded): (u16, u16)| -> StartContender {
            Box::new(move |setup| {
                let idle = if loaded < count { " one busy" } else { "" };
                let case = format!("queues {count}{idle}{}", setup.words);
                let open = move |server: &Server, job: &Job| {
                    TargetPool::queues(&server.url(0), job, count, loaded)
                };
                setup.contender(case, 1, count, open)
            })
        };
        let counts = QUEUES.into_iter().map(|count| (count, count));
        let one_busy = QUEUES.into_iter().skip(1).map(|count| (count, 1));
        counts.chain(one_busy).map(make).collect()
    }

    /// Returns a contender with `count` controllers of one queue each, of which one is busy.
    fn crowd(&self, count: u16) -> Result<Contender<'static>> {
        let open = move |server: &Server, job: &Job| {
            let urls: Vec<String> = (0..count.into()).map(|i| server.url(i)).collect();
            TargetPool::controllers(&urls, job, 1)
        };
        self.contender(format!("crowd of {count}"), count, 1, open)
    }

    /// Returns a contender with one controller that has a command at a time, beside `busy` busy
    /// controllers.
    fn tail(&self, busy: u16) -> Result<Contender<'static>> {
        let case = format!("one beside {busy} busy");
        self.loaded_by(case, busy + 1, 1, |server| {
            let urls: Vec<String> = (0..=busy.into()).map(|i| server.url(i)).collect();
            let beside = BackgroundClients {
                tail: TailLoad::open(&urls, &self.job, BUSY_DEPTH)?,
                _server: server,
            };
            Ok(Box::new(move |ramp, runtime| beside.run(ramp, runtime)))
        })
    }

    fn contender(
        &self,
        case: String,
        controllers: u16,
        queues: u16,
        open: impl Fn(&Server, &Job) -> Result<TargetPool>,
    ) -> Result<Contender<'static>> {
        self.loaded_by(case, controllers, queues, |server| {
            let pool = open(&server, &self.job)?;
            let job = pool.job(&self.job);
            Ok(slices::load(server, pool, job))
        })
    }

    fn loaded_by(
        &self,
        case: String,
        controllers: u16,
        queues: u16,
        load: impl Fn(Rc<Server>) -> Result<Load<'static>>,
    ) -> Result<Contender<'static>> {
        let served = |program: &Program| -> Result<_> {
            let serve = ServerConfig {
                volumes: vec![VOLUME.to_owned(); controllers.into()],
                workers: self.workers,
                ..ServerConfig::one(VOLUME, false, self.cpus)
            };
            load(Rc::new(Server::start(program, &serve)?))
        };
        Ok(Contender {
            case,
            depth: self.job.depth,
            queues,
            shows_gaps: false,
            goal: None,
            load: served(&self.plan.vnvme)?,
            // With two workers there is no turn to take: see above.
            beside: match &self.plan.beside {
                Some(program) if self.workers == 1 => Some(served(program)?),
                _ => None,
            },
        })
    }
}
