//! Short slices of load, each with a ping-pong of a cache line before and after it.
//!
//! The contenders take turns: each round has one slice of each. When the round trips before and
//! after a slice agree, the slice counts for that distance. Otherwise the CPUs were moved
//! meanwhile, and the slice is measured again. All lines that a controller and its host exchange
//! are in the host's memory, and so are those of the ping-pong, which uses the same source of
//! memory.

use super::pingpong::{self, Ping};
use super::server::Server;
use super::{Cores, Plan};
use crate::distance::agree;
use crate::results::{Case, Collector, SlicePosition};
use anyhow::{Context, Result};
use dma::Memory;
use load::job::Job;
use load::lane::Target;
use load::stats::Measured;
use std::rc::Rc;
use std::time::Duration;

/// Duration of a slice: much shorter than the time in which the host moves a CPU.
const SLICE: Duration = Duration::from_millis(25);
/// Duration of load before it is measured.
const RAMP: Duration = Duration::from_millis(5);
/// Duration of a ping-pong.
const PING: Duration = Duration::from_millis(3);
/// Pause before a ping-pong. A worker polls for up to a millisecond after its last work, and the
/// ping-pong needs the CPU.
const POLLING: Duration = Duration::from_micros(1500);
/// Maximum number of repetitions of a slice.
const RETRIES: u32 = 2;

/// Function that applies load for a ramp time, and then for a measured time.
pub type Load<'a> = Box<dyn Fn(Duration, Duration) -> Result<Measured> + 'a>;

/// A target and its server. The target is dropped first.
struct LoadedTarget<T> {
    target: T,
    server: Rc<Server>,
    job: Job,
    /// Whether the server is stopped outside its own slices.
    in_turn: bool,
}

impl<T: Target> LoadedTarget<T> {
    fn run(&self, ramp: Duration, runtime: Duration) -> Result<Measured> {
        let job = Job {
            ramp,
            runtime,
            ..self.job.clone()
        };
        if self.in_turn {
            self.server.stand_still(false)?;
        }
        let measured = load::run(&self.target, &job, &mut ());
        if self.in_turn {
            self.server.stand_still(true)?;
        }
        measured
    }
}

impl<T> Drop for LoadedTarget<T> {
    /// Continues the server first, because it has to answer when the target disconnects.
    fn drop(&mut self) {
        if self.in_turn {
            let _ = self.server.stand_still(false);
        }
    }
}

/// Creates a load of a target by a job. The server lives as long as the load.
pub fn load<'a, T: Target + 'a>(server: Rc<Server>, target: T, job: Job) -> Load<'a> {
    let loaded = LoadedTarget {
        target,
        server,
        job,
        in_turn: false,
    };
    Box::new(move |ramp, runtime| loaded.run(ramp, runtime))
}

/// Creates a load like [`load()`], for a server that polls as long as it has a client, because
/// nothing signals mapped doorbells. The server is stopped while another one on its CPU is
/// measured.
///
/// # Errors
/// An error when the server cannot be stopped.
pub fn load_in_turn<'a, T: Target + 'a>(
    server: Rc<Server>,
    target: T,
    job: Job,
) -> Result<Load<'a>> {
    server.stand_still(true)?;
    let loaded = LoadedTarget {
        target,
        server,
        job,
        in_turn: true,
    };
    Ok(Box::new(move |ramp, runtime| loaded.run(ramp, runtime)))
}

/// A server and its load, to be measured in slices.
pub struct Contender<'a> {
    /// Name in the results.
    pub case: String,
    pub depth: u16,
    pub queues: u16,
    /// Whether the contender is one queue that polls a target which completes within microseconds,
    /// so that a longer time without a completion is a gap.
    pub shows_gaps: bool,
    /// Goal in nanoseconds for an I/O outside gaps, as a function of the depth and the round trip.
    pub goal: Option<fn(u32, f64) -> Option<f64>>,
    pub load: Load<'a>,
    /// Equal load on the program to compare with, if there is one.
    pub beside: Option<Load<'a>>,
}

impl Contender<'_> {
    /// Returns the identity of the contender's figures.
    pub fn case<'a>(&'a self, suite: &'a str) -> Case<'a> {
        Case {
            suite,
            case: &self.case,
            depth: self.depth.into(),
            queues: self.queues.into(),
        }
    }
}

/// Ping-pong between the two CPUs.
pub struct Pings {
    client: usize,
    server: usize,
    memory: Memory,
    /// Last result, as long as no load has run since.
    last: Option<Ping>,
}

impl Pings {
    pub fn new(cores: &Cores, plan: &Plan) -> Result<Self> {
        Ok(Self {
            client: *cores.client.first().context("no CPU")?,
            server: *cores.server.first().context("no second CPU")?,
            memory: plan.memory.source().make(pingpong::PAGE)?,
            last: None,
        })
    }

    fn now(&self) -> Result<Ping> {
        std::thread::sleep(POLLING);
        pingpong::line(self.client, self.server, PING, &self.memory)
    }

    /// Measures a slice. Returns its round trip and figures if the round trips before and after it
    /// agree.
    fn slice(&mut self, load: &Load<'_>) -> Result<Option<(Ping, Measured)>> {
        for _ in 0..=RETRIES {
            let before = match self.last.take() {
                Some(last) => last,
                None => self.now()?,
            };
            let measured = match load(RAMP, SLICE) {
                // Another guest of the host had the CPUs for all of the slice.
                Err(error) if error.is::<load::NothingEnded>() => continue,
                measured => measured?,
            };
            let after = self.now()?;
            self.last = Some(after);
            if agree(before.round_trip, after.round_trip) {
                return Ok(Some((before.mean(after), measured)));
            }
        }
        Ok(None)
    }
}

/// Returns the number of rounds in each run of a plan.
pub fn rounds(plan: &Plan) -> u32 {
    let rounds = plan.runtime.as_nanos() / SLICE.as_nanos();
    u32::try_from(rounds).unwrap_or(u32::MAX).max(1)
}

/// Measures the contenders in turn, for the number of rounds in a run of the plan. `run` is the
/// number of the run.
pub fn take(
    suite: &str,
    contenders: &[Contender<'_>],
    pings: &mut Pings,
    plan: &Plan,
    run: u32,
    collector: &mut Collector,
) -> Result<()> {
    let rounds = rounds(plan);
    for round in 0..rounds {
        let id = run * rounds + round;
        // The order rotates with each round, so that none is always measured first.
        let first = round as usize % contenders.len().max(1);
        let (rest, start) = contenders.split_at(first);
        for contender in start.iter().chain(rest) {
            one(suite, contender, id, pings, collector)?;
        }
    }
    Ok(())
}

/// Measures one contender, and the compared program, as part of a round. Returns the round trip,
/// the I/Os per second and their median latency in nanoseconds, if the CPUs were not moved.
pub fn one(
    suite: &str,
    contender: &Contender<'_>,
    id: u32,
    pings: &mut Pings,
    collector: &mut Collector,
) -> Result<Option<(Ping, f64, f64)>> {
    let ours = pings.slice(&contender.load)?;
    if let Some((ping, measured)) = &ours {
        add(suite, contender, (id, *ping), measured, collector);
    }
    let result = ours.as_ref().map(|(ping, measured)| {
        let p50 = measured.both().percentile(50.0) as f64;
        (*ping, measured.iops(), p50)
    });
    let Some(beside) = &contender.beside else {
        return Ok(result);
    };
    let theirs = pings.slice(beside)?;
    if let (Some((one, ours)), Some((other, theirs))) = (ours, theirs)
        && agree(one.round_trip, other.round_trip)
    {
        let taken = SlicePosition {
            round: id,
            round_trip: one.mean(other).round_trip,
        };
        let of = ours.iops() / theirs.iops().max(1e-9);
        let case = contender.case(suite);
        collector.add_at(case, "of_beside", "ratio", of, taken);
        if contender.shows_gaps {
            let of = theirs.nanos_outside_gaps() / ours.nanos_outside_gaps().max(1e-9);
            collector.add_at(case, "running_of_beside", "ratio", of, taken);
        }
        // Medians leave out the time that the host takes from a CPU now and then.
        let [ours, theirs] = [ours, theirs].map(|m| m.both().percentile(50.0) as f64);
        let of = theirs / ours.max(1.0);
        collector.add_at(case, "p50_of_beside", "ratio", of, taken);
    }
    Ok(result)
}

fn add(
    suite: &str,
    contender: &Contender<'_>,
    (round, ping): (u32, Ping),
    measured: &Measured,
    collector: &mut Collector,
) {
    let taken = SlicePosition {
        round,
        round_trip: ping.round_trip,
    };
    let case = contender.case(suite);
    let mut one = |metric, unit, value| collector.add_at(case, metric, unit, value, taken);
    let nanos = 1e9 / measured.iops().max(1e-9);
    let running = measured.nanos_outside_gaps();
    let both = measured.both();
    one("iops", "1/s", measured.iops());
    one("ns_per_io", "ns", nanos);
    // The ping-pong that the goal is stated in is without its gaps, too.
    if contender.shows_gaps {
        one("ns_running", "ns", running);
        one("gap_share", "ratio", measured.gap_share());
        one("ping_gap_share", "ratio", ping.gap_share);
    }
    one("p50_ns", "ns", both.percentile(50.0) as f64);
    one("p99_ns", "ns", both.percentile(99.0) as f64);
    one("p99.9_ns", "ns", both.percentile(99.9) as f64);
    one("rtt_ns", "ns", taken.round_trip);
    if let Some(goal) = contender.goal
        && let Some(goal) = goal(contender.depth.into(), taken.round_trip)
    {
        one("of_goal", "ratio", running / goal);
    }
}
