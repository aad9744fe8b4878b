//! Suite `vhost`: a vhost-user-blk export on null and memory volumes, beside the ping-pong of a
//! cache line between the two cores.

use super::server::{Program, Server, ServerConfig};
use super::slices::{self, Contender, Load, Pings};
use super::{Cores, Plan, SuiteResults};
use anyhow::{Result, ensure};
use dma::Memory;
use driver::MemorySource;
use load::job::{Job, Rw};
use load::virtio::VirtioTarget;
use std::time::Duration;

const SUITE: &str = "vhost";
const DEPTHS: [u16; 4] = [1, 4, 32, 128];
/// Size in bytes of the memory volume, and of each write that fills it.
const SIZE: u64 = 64 << 20;
const FILL: u64 = 128 << 10;
/// Size in bytes of the memory for a queue of the largest depth, with its data.
const GUEST: usize = 4 << 20;

/// A volume and its load.
struct Kind {
    word: &'static str,
    volume: &'static str,
    rw: Rw,
}

const KINDS: [Kind; 3] = [
    Kind {
        word: "null",
        volume: "null://1T",
        rw: Rw::RandRead,
    },
    Kind {
        word: "read",
        volume: "mem://64M",
        rw: Rw::RandRead,
    },
    Kind {
        word: "write",
        volume: "mem://64M",
        rw: Rw::RandWrite,
    },
];

/// Refuses words that select no cases.
pub fn check_only(only: &[String]) -> Result<()> {
    for word in only {
        ensure!(
            DEPTHS.iter().any(|depth| depth.to_string() == *word)
                || KINDS.iter().any(|kind| kind.word == word),
            "--only {word}: the suite vhost has no such cases"
        );
    }
    Ok(())
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let cores = Cores::pair()?;
    let mut outcome = SuiteResults::default();
    let mut pings = Pings::new(&cores, plan)?;
    let depths = DEPTHS.map(|depth| depth.to_string());
    let depths = plan.chosen(&depths.each_ref().map(String::as_str));
    let words = plan.chosen(&KINDS.map(|kind| kind.word));
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        // Both programs use the same memory in turn, so that it is equally near.
        let memory = plan.memory.source().make(GUEST)?;
        for depth in DEPTHS {
            if !depths.contains(&depth.to_string().as_str()) {
                continue;
            }
            let mut contenders = Vec::new();
            for kind in KINDS.iter().filter(|kind| words.contains(&kind.word)) {
                let of = |program: &Program| served(plan, program, kind, depth, &cores, &memory);
                contenders.push(Contender {
                    case: kind.word.into(),
                    depth,
                    queues: 1,
                    shows_gaps: true,
                    goal: None,
                    load: of(&plan.vnvme)?,
                    beside: plan.beside.as_ref().map(of).transpose()?,
                });
            }
            let c = &mut outcome.collector;
            slices::take(SUITE, &contenders, &mut pings, plan, run, c)?;
        }
    }
    Ok(outcome)
}

/// Starts a server of one export, and returns it with its load.
fn served<'a>(
    plan: &Plan,
    program: &Program,
    kind: &Kind,
    depth: u16,
    cores: &Cores,
    memory: &Memory,
) -> Result<Load<'a>> {
    let cpus = cores.server.get(..1).unwrap_or_default();
    let config = ServerConfig {
        volumes: Vec::new(),
        exports: vec![kind.volume.to_owned()],
        ..ServerConfig::one("", false, cpus)
    };
    let server = Server::start(program, &config)?;
    let memory = memory.clone();
    let job = Job {
        rw: kind.rw,
        memory: MemorySource::new(move |_| Ok(memory.clone())),
        ..plan.job(depth, &cores.client)
    };
    if kind.volume.starts_with("mem") {
        // Unwritten memory is not allocated.
        let fill = Job {
            rw: Rw::Write,
            bs: FILL,
            depth: 4,
            ios: Some(SIZE / FILL),
            ramp: Duration::ZERO,
            ..job.clone()
        };
        let target = VirtioTarget::open(&server.export(0), &fill)?;
        load::run(&target, &fill, &mut ())?;
    }
    // An export accepts one front-end at a time, and one queue of it.
    Ok(Box::new(move |ramp, runtime| {
        let job = Job {
            ramp,
            runtime,
            ..job.clone()
        };
        let target = VirtioTarget::open(&server.export(0), &job)?;
        load::run(&target, &job, &mut ())
    }))
}
