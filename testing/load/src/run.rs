//! The load generator: one thread for each queue, and the loop that the thread runs.
//!
//! For each I/O, the loop does only what the target needs: no allocation, lock or extra system
//! call. For most I/Os it does not even read the clock, which at millions of I/Os per second would
//! take a tenth of their time. Latency is measured for one I/O in [`INTERVALS`]: for fewer at a
//! higher rate, for every one below about 100,000 per second. The intervals are odd, so that the
//! timed I/Os have changing positions in the batches. A job may set the interval instead.

use crate::job::Job;
use crate::lane::{IoResult, Lane, Target};
use crate::pattern::{self, PatternIo, Region, Sequence, Written};
use crate::stats::{GAP, Measured};
use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Sampling intervals: one I/O of this many is timed.
const INTERVALS: [u32; 5] = [1, 3, 7, 15, 31];
/// Time between two timed I/Os below which the sampling interval grows. Above ten times this, the
/// interval shrinks.
const TIMED_APART: Duration = Duration::from_micros(8);
/// Time limit for outstanding I/Os after the load has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum sleep of a thread between two checks whether the job is over.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Extra time for a queue to end its job. A queue normally ends with the first timed I/O that
/// completes after the job's time; a queue that waits without a completion ends after this extra
/// time. The value in tests is so long that they can distinguish the two.
const STRAGGLER_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 50 });
/// Interval between calls to the watcher of a job, if it wants them.
const TICK: Duration = Duration::from_millis(20);

const RAMP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// A value on cache lines of its own: two lines, because processors fetch pairs.
#[repr(align(128))]
#[derive(Default)]
struct CachePadded<T>(T);

/// State shared by the threads.
struct RunState {
    phase: CachePadded<AtomicU8>,
    /// Number of I/Os completed so far by each queue; written only by the queue's thread.
    ended: Vec<CachePadded<AtomicU64>>,
    /// Number of queues that their threads have opened so far.
    open: CachePadded<AtomicU64>,
    /// Number of queues that have ended their load.
    over: CachePadded<AtomicU64>,
}

/// Observer of a job's progress.
pub trait Watch {
    /// Receives the progress. `ended`: number of completed I/Os; `elapsed`: measuring time so far
    /// (zero while ramping up).
    fn tick(&mut self, ended: u64, elapsed: Duration);

    /// Returns the interval of the calls; `None` for no calls, so that no wake-up disturbs the
    /// measurement.
    fn interval(&self) -> Option<Duration> {
        Some(TICK)
    }
}

/// Observer that ignores the progress.
impl Watch for () {
    fn tick(&mut self, _: u64, _: Duration) {}

    fn interval(&self) -> Option<Duration> {
        None
    }
}

/// Runs the job on the target.
pub fn run<T: Target>(target: &T, job: &Job, watch: &mut dyn Watch) -> Result<Measured> {
    let geometry = target.geometry();
    let block = u64::from(geometry.block_size.max(1));
    ensure!(
        job.bs.is_multiple_of(block),
        "--bs {} is not a multiple of the target's block size, {block}",
        job.bs
    );
    let bytes = usize::try_from(job.bs).context("--bs")?;
    ensure!(bytes <= 1 << 30, "--bs is more than 1 GiB");
    let regions: Vec<Region> = (0..job.queues)
        .map(|index| Region::of(job, geometry.size, index))
        .collect();
    ensure!(
        regions.iter().all(|r| r.blocks > 0),
        "the target's {} bytes are less than one I/O for each queue",
        geometry.size
    );
    let shared = RunState {
        phase: CachePadded(AtomicU8::new(if job.ios.is_some() {
            MEASURE
        } else {
            RAMP
        })),
        ended: regions.iter().map(|_| CachePadded::default()).collect(),
        open: CachePadded::default(),
        over: CachePadded::default(),
    };
    let watcher = std::thread::current();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((index, region), ended) in (0u16..).zip(&regions).zip(&shared.ended) {
            let shared = &shared;
            let over = EndGuard(&shared.over.0, watcher.clone());
            let body = move || {
                let _over = over;
                pin(&job.cpus, index)?;
                let lane = target.lane(index, job.depth, bytes);
                // The queues that wait for this one must not wait for ever.
                shared.open.0.fetch_add(1, Ordering::Relaxed);
                let lane = lane.with_context(|| format!("queue {index}"))?;
                let sequence = Sequence::new(job, *region, index);
                Loop::new(job, lane, sequence, *region, &ended.0, shared).run()
            };
            let builder = std::thread::Builder::new().name(format!("queue-{index}"));
            match builder.spawn_scoped(scope, body) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    shared.phase.0.store(STOP, Ordering::Relaxed);
                    return Err(error).context("a queue's thread");
                }
            }
        }
        let usage = watch_over(&shared, job, watch);
        let mut all = Measured::default();
        let mut failed = None;
        for thread in threads {
            match thread.join() {
                Ok(Ok(one)) => all.add(&one),
                Ok(Err(error)) => failed = failed.or(Some(error)),
                Err(_) => failed = failed.or(Some(anyhow!("a queue's thread ended by a bug"))),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if all.read.ios + all.write.ios + all.trim.ios == 0 {
            bail!(NothingEnded(all.elapsed));
        }
        (all.user, all.system) = usage;
        Ok(all)
    })
}

/// Error: no I/O was completed in time. Holds the measuring time.
#[derive(Debug)]
pub struct NothingEnded(pub Duration);

impl std::fmt::Display for NothingEnded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "not one I/O ended within {:?}", self.0)
    }
}

impl std::error::Error for NothingEnded {}

/// Guard of a queue's thread: when dropped, it counts the queue as ended and wakes the watcher.
struct EndGuard<'a>(&'a AtomicU64, Thread);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
        self.1.unpark();
    }
}

/// Pins the calling thread to one of `cpus`, selected by the queue's `index`; does nothing if the
/// list is empty.
pub fn pin(cpus: &[usize], index: u16) -> Result<()> {
    let Some(&cpu) = cpus.get(usize::from(index) % cpus.len().max(1)) else {
        return Ok(());
    };
    ensure!(cpu < CpuSet::MAX_CPU, "there is no CPU {cpu}");
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("pinning to CPU {cpu}"))
}

/// Returns the total time for which a thread has waited for a CPU. `schedstat` is the path of the
/// thread's file `/proc/PID/task/TID/schedstat`; its second field is the time in nanoseconds. Zero
/// if the kernel does not count it.
pub fn waited(schedstat: &str) -> Duration {
    let text = std::fs::read_to_string(schedstat).unwrap_or_default();
    let field = text.split_ascii_whitespace().nth(1);
    Duration::from_nanos(field.and_then(|text| text.parse().ok()).unwrap_or(0))
}

/// Leads the queues through the phases of the job. Returns the user and system CPU time that was
/// used while measuring.
fn watch_over(shared: &RunState, job: &Job, watch: &mut dyn Watch) -> (Duration, Duration) {
    let count = shared.ended.len() as u64;
    let over = || shared.over.0.load(Ordering::Relaxed);
    let ended = || {
        let each = shared.ended.iter().map(|e| e.0.load(Ordering::Relaxed));
        each.sum::<u64>()
    };
    while shared.open.0.load(Ordering::Relaxed) < count && over() < count {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut sleep_for = |span: Duration, measuring: bool| {
        let start = Instant::now();
        let interval = watch.interval();
        while over() == 0 {
            let left = span.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            std::thread::park_timeout(interval.map_or(left, |interval| left.min(interval)));
            let elapsed = if measuring {
                start.elapsed()
            } else {
                Duration::ZERO
            };
            watch.tick(ended(), elapsed);
        }
    };
    // This thread does its own work before and after, so that it uses no CPU while the queues
    // measure.
    let before = if job.ios.is_some() {
        let before = cpu_time();
        sleep_for(Duration::MAX, true);
        before
    } else {
        sleep_for(job.ramp, false);
        let before = cpu_time();
        shared.phase.0.store(MEASURE, Ordering::Relaxed);
        // The queues see for themselves when their time is over: to wake up then would take the CPU
        // from one of them in the last moments of its time.
        sleep_for(job.runtime.saturating_add(STRAGGLER_TIMEOUT), true);
        shared.phase.0.store(STOP, Ordering::Relaxed);
        before
    };
    let after = cpu_time();
    (
        after.0.saturating_sub(before.0),
        after.1.saturating_sub(before.1),
    )
}

/// Returns user and system time of this process: fields 14 and 15 of /proc/self/stat, in clock
/// ticks (proc(5)).
fn cpu_time() -> (Duration, Duration) {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may hold anything.
    let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let mut ticks = || {
        let ticks: u64 = fields.next().and_then(|f| f.parse().ok()).unwrap_or(0);
        Duration::from_nanos(ticks.saturating_mul(1_000_000_000 / per_second))
    };
    (ticks(), ticks())
}

/// State of a queue's loop.
struct Loop<'a, L> {
    job: &'a Job,
    lane: L,
    sequence: Sequence,
    ended: &'a AtomicU64,
    shared: &'a RunState,
    slots: Slots,
    /// Buffer for verification, if the job verifies.
    scratch: Vec<u8>,
}

/// Outstanding I/Os and their results.
struct Slots {
    free: Vec<u16>,
    steps: Vec<PatternIo>,
    /// Submission time of each slot's I/O; `None` if that I/O is not timed.
    stamps: Vec<Option<Instant>>,
    /// Whether the block of each read had been written before the read was submitted, so that its
    /// data is known.
    known: Vec<bool>,
    written: Written,
    bs: u64,
    verify: bool,
    trims: bool,
    seed: u64,
    total: u64,
    measured: Measured,
    /// Index into [`INTERVALS`], which gives how many I/Os pass for each timed one.
    pace: usize,
    last_timed: Instant,
    /// End of measuring, if the job is limited by time.
    deadline: Option<Instant>,
    /// Whether a timed I/O has ended after the deadline.
    expired: bool,
    failed: Option<anyhow::Error>,
    /// Slots of completed reads with data still to be compared.
    to_check: Vec<u16>,
}

impl Slots {
    #[inline]
    fn end(&mut self, slot: u16, outcome: IoResult) {
        let index = usize::from(slot);
        let (Some(step), Some(stamp)) =
            (self.steps.get(index).copied(), self.stamps.get_mut(index))
        else {
            self.failed = Some(anyhow!("the target ended I/O {slot}, which does not exist"));
            return;
        };
        let flow = match (step.write, self.trims) {
            (false, _) => &mut self.measured.read,
            (true, false) => &mut self.measured.write,
            (true, true) => &mut self.measured.trim,
        };
        self.total += 1;
        flow.ios += 1;
        flow.bytes += self.bs;
        if let Some(stamp) = stamp.take() {
            let now = Instant::now();
            flow.record((now - stamp).as_nanos() as u64);
            let apart = now - self.last_timed;
            self.last_timed = now;
            if apart > GAP {
                self.measured.gaps += apart;
            }
            self.expired |= self.deadline.is_some_and(|deadline| now >= deadline);
            if apart < TIMED_APART {
                self.pace = (self.pace + 1).min(INTERVALS.len() - 1);
            } else if apart > TIMED_APART * 10 {
                self.pace = self.pace.saturating_sub(1);
            }
        }
        if let Err(error) = outcome {
            let what = match (step.write, self.trims) {
                (false, _) => "read",
                (true, false) => "write",
                (true, true) => "trim",
            };
            self.failed
                .get_or_insert(anyhow!("{what} at offset {}: {error}", step.offset));
        }
        if self.verify {
            if step.write {
                self.written.set(step.block);
            } else if self.known.get(index).copied().unwrap_or(false) {
                self.to_check.push(slot);
                return;
            }
        }
        self.free.push(slot);
    }
}

impl<'a, L: Lane> Loop<'a, L> {
    fn new(
        job: &'a Job,
        lane: L,
        sequence: Sequence,
        region: Region,
        ended: &'a AtomicU64,
        shared: &'a RunState,
    ) -> Self {
        let depth = usize::from(job.depth);
        Self {
            job,
            lane,
            sequence,
            ended,
            shared,
            slots: Slots {
                free: (0..job.depth).rev().collect(),
                steps: vec![PatternIo::default(); depth],
                stamps: vec![None; depth],
                known: vec![false; depth],
                written: Written::new(if job.verify { region.blocks } else { 0 }),
                bs: job.bs,
                verify: job.verify,
                trims: job.rw.trims(),
                seed: job.seed,
                total: 0,
                measured: Measured::default(),
                pace: 0,
                last_timed: Instant::now(),
                deadline: None,
                expired: false,
                failed: None,
                to_check: Vec::with_capacity(depth),
            },
            scratch: vec![0; if job.verify { job.bs as usize } else { 0 }],
        }
    }

    fn run(mut self) -> Result<Measured> {
        let mut started = Instant::now();
        let mut waited = waited("/proc/thread-self/schedstat");
        let mut seen = RAMP;
        let mut left = self.job.ios.unwrap_or(u64::MAX);
        let mut until_timed = self.first_timed();
        loop {
            let phase = self.shared.phase.0.load(Ordering::Relaxed);
            if phase != seen {
                seen = phase;
                if phase == STOP {
                    break;
                }
                // Figures of the ramp-up are discarded.
                self.slots.measured = Measured::default();
                waited = self::waited("/proc/thread-self/schedstat");
                started = Instant::now();
                self.slots.last_timed = started;
                if self.job.ios.is_none() {
                    self.slots.deadline = started.checked_add(self.job.runtime);
                }
            }
            let mut submitted = 0;
            while left > 0
                && let Some(slot) = self.slots.free.pop()
            {
                let step = self.sequence.step();
                self.start(slot, step, &mut until_timed)?;
                left -= 1;
                submitted += 1;
                if submitted == u64::from(self.job.batch) {
                    self.kick(std::mem::take(&mut submitted))?;
                }
            }
            if submitted > 0 {
                self.kick(submitted)?;
            }
            self.reap()?;
            if self.slots.expired {
                break;
            }
            if left == 0 && self.slots.free.len() == self.slots.steps.len() {
                break;
            }
        }
        self.slots.measured.elapsed = started.elapsed();
        let since = self.slots.last_timed.max(started).elapsed();
        if since > GAP {
            self.slots.measured.gaps += since;
        }
        let now = self::waited("/proc/thread-self/schedstat");
        self.slots.measured.waited = now.saturating_sub(waited);
        let mut measured = std::mem::take(&mut self.slots.measured);
        self.drain()?;
        if self.job.verify && self.job.rw.writes() {
            measured.verified = self.read_back()?;
        }
        Ok(measured)
    }

    /// Returns the number of I/Os before the first timed one.
    fn first_timed(&self) -> u32 {
        match self.job.sample {
            // More than a queue's thread does in a life.
            Some(0) => u32::MAX,
            _ => 0,
        }
    }

    #[inline]
    fn kick(&mut self, submitted: u64) -> Result<()> {
        self.slots.measured.submitted += submitted;
        self.slots.measured.kicks += 1;
        self.lane.kick()
    }

    #[inline]
    fn start(&mut self, slot: u16, step: PatternIo, until_timed: &mut u32) -> Result<()> {
        let index = usize::from(slot);
        if self.job.verify {
            self.prepare(slot, step);
        }
        if let Some(place) = self.slots.steps.get_mut(index) {
            *place = step;
        }
        if *until_timed == 0 {
            let by_rate = INTERVALS.get(self.slots.pace).copied().unwrap_or(1);
            *until_timed = self.job.sample.unwrap_or(by_rate);
            if let Some(stamp) = self.slots.stamps.get_mut(index) {
                *stamp = Some(Instant::now());
            }
        }
        *until_timed = until_timed.wrapping_sub(1);
        if self.slots.trims {
            self.lane.trim(slot, step.offset)
        } else {
            self.lane.submit(slot, step.write, step.offset)
        }
    }

    /// Generates the data of a write, or determines whether the data of a read is known.
    #[cold]
    fn prepare(&mut self, slot: u16, step: PatternIo) {
        if step.write {
            pattern::fill(&mut self.scratch, step.offset, self.job.seed);
            self.lane.put(slot, &self.scratch);
        }
        // A block that is being written again gets the same data once more.
        let known = !self.job.rw.writes() || self.slots.written.get(step.block);
        if let Some(place) = self.slots.known.get_mut(usize::from(slot)) {
            *place = known;
        }
    }

    #[inline]
    fn reap(&mut self) -> Result<()> {
        let slots = &mut self.slots;
        let done = &mut |slot, outcome| slots.end(slot, outcome);
        let count = if self.job.interrupt {
            self.lane.wait(MAX_SLEEP, done)?
        } else {
            self.lane.poll(done)?
        };
        if count > 0 {
            self.ended.store(self.slots.total, Ordering::Relaxed);
            if let Some(error) = self.slots.failed.take() {
                return Err(error);
            }
            if self.job.verify {
                self.check_reads()?;
            }
        }
        Ok(())
    }

    #[cold]
    fn check_reads(&mut self) -> Result<()> {
        while let Some(slot) = self.slots.to_check.pop() {
            let step = self
                .slots
                .steps
                .get(usize::from(slot))
                .copied()
                .unwrap_or_default();
            self.lane.get(slot, &mut self.scratch);
            if let Some(at) = pattern::check(&self.scratch, step.offset, self.slots.seed) {
                bail!(
                    "verify: wrong data at offset {at}, in the read at {} (seed {})",
                    step.offset,
                    self.slots.seed
                );
            }
            self.slots.free.push(slot);
        }
        Ok(())
    }

    /// Waits for the outstanding I/Os, because their buffers are freed afterwards.
    fn drain(&mut self) -> Result<()> {
        let start = Instant::now();
        while self.slots.free.len() < self.slots.steps.len() {
            self.reap()?;
            ensure!(
                start.elapsed() < DRAIN_TIMEOUT,
                "I/Os did not end within {DRAIN_TIMEOUT:?}"
            );
        }
        Ok(())
    }

    /// Reads and verifies all blocks that were written. Returns their number.
    fn read_back(&mut self) -> Result<u64> {
        let (mut next, mut verified, mut until_timed) = (0, 0, self.first_timed());
        loop {
            let mut submitted = false;
            while let Some(block) = self.slots.written.next(next)
                && let Some(slot) = self.slots.free.pop()
            {
                next = block + 1;
                verified += 1;
                submitted = true;
                let step = self.sequence.at(block, false);
                self.start(slot, step, &mut until_timed)?;
            }
            if submitted {
                self.lane.kick()?;
            }
            if self.slots.free.len() == self.slots.steps.len() {
                return Ok(verified);
            }
            self.reap()?;
        }
    }
}

#[cfg(test)]
mod tests;
