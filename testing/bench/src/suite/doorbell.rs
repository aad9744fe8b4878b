//! Suite `doorbell`: the gain from shadow doorbells, and the number of remaining MMIO doorbells.
//!
//! Doorbells are trapped (a message each), as a VMM has them. The client polls for completions, and
//! rings for each I/O that it submits, as fio does. `batched`: it rings once for all I/Os that it
//! can submit. `sleeping`: the worker sleeps at once, so each arming and wake-up is counted.
//! `interrupt`: the client sleeps too, until an interrupt arrives.

use super::pool::TargetPool;
use super::server::{Program, Server, ServerConfig};
use super::slices::{self, Contender, Pings};
use super::{Cores, Plan, SuiteResults};
use anyhow::{Result, bail};
use load::job::{Doorbells, Job};
use std::rc::Rc;

const SUITE: &str = "doorbell";
/// Measured points of the suite: queue depth and number of queues.
const POINTS: [(u16, u16); 6] = [(1, 1), (2, 1), (4, 1), (8, 1), (32, 1), (32, 4)];
/// Measured points of the variants that sleep.
const FEW_POINTS: [(u16, u16); 2] = [(1, 1), (32, 1)];

struct DoorbellVariant {
    words: &'static str,
    /// Maximum number of I/Os for each doorbell.
    batch: u16,
    idle_window: Option<u64>,
    interrupt: bool,
    points: &'static [(u16, u16)],
}

const WAYS: [DoorbellVariant; 5] = [
    DoorbellVariant {
        words: "",
        batch: 1,
        idle_window: None,
        interrupt: false,
        points: &POINTS,
    },
    DoorbellVariant {
        words: " batched",
        batch: u16::MAX,
        idle_window: None,
        interrupt: false,
        points: &POINTS,
    },
    DoorbellVariant {
        words: " sleeping",
        batch: 1,
        idle_window: Some(0),
        interrupt: false,
        points: &POINTS,
    },
    DoorbellVariant {
        words: " sleeping batched",
        batch: u16::MAX,
        idle_window: Some(0),
        interrupt: false,
        points: &FEW_POINTS,
    },
    DoorbellVariant {
        words: " interrupt",
        batch: 1,
        idle_window: Some(0),
        interrupt: true,
        points: &FEW_POINTS,
    },
];

/// Name for `--only` of the variant without a suffix.
const PLAIN: &str = "polling";

impl DoorbellVariant {
    fn name(&self) -> &'static str {
        match self.words.trim_start() {
            "" => PLAIN,
            words => words,
        }
    }
}

/// Checks that these words select cases of this suite.
pub fn check_only(only: &[String]) -> Result<()> {
    let names = WAYS.each_ref().map(DoorbellVariant::name);
    match only.iter().find(|word| !names.contains(&word.as_str())) {
        Some(word) => bail!("--only {word}: the suite doorbell has {}", names.join(", ")),
        None => Ok(()),
    }
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let chosen = plan.chosen(&WAYS.each_ref().map(DoorbellVariant::name));
    let cores = Cores::pair()?;
    let mut outcome = SuiteResults::default();
    let mut pings = Pings::new(&cores, plan)?;
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for way in WAYS.iter().filter(|way| chosen.contains(&way.name())) {
            for &point in way.points {
                pair(&mut outcome, &mut pings, plan, run, &cores, way, point)?;
            }
        }
    }
    Ok(outcome)
}

/// Measures a variant with and without shadow doorbells, alternately.
fn pair(
    outcome: &mut SuiteResults,
    pings: &mut Pings,
    plan: &Plan,
    run: u32,
    cores: &Cores,
    way: &DoorbellVariant,
    (depth, queues): (u16, u16),
) -> Result<()> {
    let (mut contenders, mut servers) = (Vec::new(), Vec::new());
    for (state, doorbells) in [("off", Doorbells::Mmio), ("on", Doorbells::Shadow)] {
        let job = Job {
            doorbells,
            batch: way.batch,
            interrupt: way.interrupt,
            ..plan.job(depth, &cores.client)
        };
        let served = |program: &Program| -> Result<_> {
            let server = Rc::new(Server::start(
                program,
                &ServerConfig {
                    idle_window: way.idle_window,
                    ..ServerConfig::one(
                        "null://1T",
                        false,
                        cores.server.get(..1).unwrap_or_default(),
                    )
                },
            )?);
            // A single thread for all queues: the client has one core.
            let pool = TargetPool::queues(&server.url(0), &job, queues, queues)?;
            let job = pool.job(&job);
            Ok((server.clone(), slices::load(server, pool, job)))
        };
        let (server, load) = served(&plan.vnvme)?;
        let beside = plan.beside.as_ref().map(served).transpose()?;
        servers.push(server);
        contenders.push(Contender {
            case: format!("shadow {state}{}", way.words),
            depth,
            queues,
            shows_gaps: !way.interrupt,
            goal: None,
            load,
            beside: beside.map(|(_, load)| load),
        });
    }
    slices::take(SUITE, &contenders, pings, plan, run, &mut outcome.collector)?;
    for (contender, server) in contenders.iter().zip(servers) {
        let case = contender.case(SUITE);
        let per_io = server.mmio_per_io()?;
        outcome.collector.add(case, "mmio_per_io", "1", per_io);
    }
    Ok(())
}
