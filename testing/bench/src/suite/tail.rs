//! Latency of a client with one command at a time, beside busy clients. One thread loads all of
//! them, and polls that client between any two busy ones, so that the measured delay is caused by
//! the worker.

use anyhow::{Context, Result, anyhow, ensure};
use load::device::{DeviceLane, DeviceTarget};
use load::job::Job;
use load::lane::{Lane, Target};
use load::stats::Measured;
use std::time::{Duration, Instant};

/// Time limit for outstanding I/Os after the load has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Controllers of which the first has one command at a time, and the others are busy.
pub struct TailLoad {
    light: DeviceTarget,
    heavy: Vec<DeviceTarget>,
    job: Job,
    /// Number of I/Os in flight on each busy controller.
    depth: u16,
}

impl TailLoad {
    /// Opens the controllers. `job` is for the first one; each busy one has `depth` I/Os in flight.
    pub fn open(urls: &[String], job: &Job, depth: u16) -> Result<Self> {
        let mut targets = urls.iter().map(|url| DeviceTarget::open(url, job));
        Ok(Self {
            light: targets.next().context("no controller")??,
            heavy: targets.collect::<Result<_>>()?,
            job: job.clone(),
            depth,
        })
    }

    /// Loads all controllers for `ramp`, then measures for `runtime`: the commands of the first
    /// client, and the latencies of all.
    pub fn run(&self, ramp: Duration, runtime: Duration) -> Result<Measured> {
        let body = || {
            load::pin(&self.job.cpus, 0)?;
            let bytes = usize::try_from(self.job.bs)?;
            let light = self.light.lane(0, 1, bytes)?;
            let heavy = self.heavy.iter().map(|target| {
                Ok(Busy {
                    lane: target.lane(0, self.depth, bytes)?,
                    free: (0..self.depth).collect(),
                    depth: self.depth,
                })
            });
            Clients {
                light: One {
                    lane: light,
                    since: None,
                },
                heavy: heavy.collect::<Result<_>>()?,
            }
            .run(ramp, runtime)
        };
        std::thread::scope(|scope| scope.spawn(body).join())
            .map_err(|_| anyhow!("the load ended by a bug"))?
    }
}

/// A client with one command at a time.
struct One {
    lane: DeviceLane,
    /// Submission time of the command.
    since: Option<Instant>,
}

impl One {
    /// Polls for the completion of the command, and then submits the next one.
    fn turn(&mut self, measured: &mut Measured) -> Result<()> {
        let Some(since) = self.since else {
            self.since = Some(Instant::now());
            self.lane.submit(0, false, 0)?;
            return self.lane.kick();
        };
        let mut failed = None;
        if self.lane.look(&mut |_, outcome| failed = outcome.err())? > 0 {
            ensure!(failed.is_none(), "{}", failed.unwrap_or_default());
            measured.read.ios += 1;
            measured.read.record(since.elapsed().as_nanos() as u64);
            self.since = Some(Instant::now());
            self.lane.submit(0, false, 0)?;
            self.lane.kick()?;
        }
        Ok(())
    }
}

/// A controller that is kept full of commands.
struct Busy {
    lane: DeviceLane,
    free: Vec<u16>,
    depth: u16,
}

impl Busy {
    fn turn(&mut self) -> Result<()> {
        if !self.free.is_empty() {
            for slot in self.free.drain(..) {
                self.lane.submit(slot, false, u64::from(slot) << 12)?;
            }
            self.lane.kick()?;
        }
        self.reap()
    }

    fn reap(&mut self) -> Result<()> {
        let free = &mut self.free;
        let mut failed = None;
        self.lane.look(&mut |slot, outcome| {
            free.push(slot);
            failed = outcome.err();
        })?;
        ensure!(failed.is_none(), "{}", failed.unwrap_or_default());
        Ok(())
    }
}

struct Clients {
    light: One,
    heavy: Vec<Busy>,
}

impl Clients {
    fn run(mut self, ramp: Duration, runtime: Duration) -> Result<Measured> {
        self.load(ramp)?;
        let measured = self.load(runtime)?;
        let end = Instant::now();
        for busy in &mut self.heavy {
            while busy.free.len() < usize::from(busy.depth) {
                busy.reap()?;
                ensure!(end.elapsed() < DRAIN_TIMEOUT, "I/Os did not end");
            }
        }
        let mut ended = 0;
        while ended == 0 {
            ended = self.light.lane.look(&mut |_, _| ())?;
            ensure!(end.elapsed() < DRAIN_TIMEOUT, "an I/O did not end");
        }
        Ok(measured)
    }

    fn load(&mut self, time: Duration) -> Result<Measured> {
        let mut measured = Measured::default();
        let start = Instant::now();
        while start.elapsed() < time {
            self.light.turn(&mut measured)?;
            for busy in &mut self.heavy {
                busy.turn()?;
                self.light.turn(&mut measured)?;
            }
        }
        measured.elapsed = start.elapsed();
        Ok(measured)
    }
}
