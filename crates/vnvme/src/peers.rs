//! What the workers of the process know of each other: how to wake one, what to hand it, how busy it is.

use crate::eventfd::EventFd;
use anyhow::{Context, Result};
use controller::{Bell, BranchSeed, ControllerStats};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One worker, as the others see it.
struct Peer {
    bell: Arc<Bell>,
    /// Readable when the bell was rung while it slept.
    wake: OwnedFd,
    /// Branches of other workers' controllers that it is to open.
    seeds: Mutex<Vec<BranchSeed>>,
    load: Load,
}

/// How busy a worker is. It alone writes this.
#[derive(Default)]
#[repr(align(128))]
struct Load {
    busy_ns: AtomicU64,
}

/// How old a count of commands may be: each of many controllers asks for it.
const FRESH: Duration = Duration::from_millis(20);

/// Commands that each worker had fetched at a time.
struct Count {
    at: Instant,
    commands: Arc<[u64]>,
}

/// All workers that serve controllers.
pub struct Peers {
    all: Vec<Peer>,
    /// Counters of all controllers.
    stats: Mutex<Vec<Arc<ControllerStats>>>,
    /// The last one.
    count: Mutex<Option<Count>>,
    start: Instant,
    /// When queues were last moved, in nanoseconds since the start: one worker at a time decides.
    decided: AtomicU64,
}

/// A list is whole whoever panicked while he held its lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peers {
    /// Of so many workers.
    pub fn new(workers: usize) -> Result<Self> {
        let peer = |_| {
            let wake =
                eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("eventfd")?;
            let sink = EventFd::new(wake.try_clone().context("eventfd")?).context("eventfd")?;
            Ok(Peer {
                bell: Arc::new(Bell::new(Arc::new(sink))),
                wake,
                seeds: Mutex::default(),
                load: Load::default(),
            })
        };
        Ok(Peers {
            all: (0..workers).map(peer).collect::<Result<_>>()?,
            stats: Mutex::default(),
            count: Mutex::default(),
            start: Instant::now(),
            decided: AtomicU64::new(0),
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// A worker's bell.
    pub fn bell(&self, worker: usize) -> Option<&Arc<Bell>> {
        self.all.get(worker).map(|peer| &peer.bell)
    }

    /// What ends a worker's sleep.
    pub fn wake_fd(&self, worker: usize) -> Option<BorrowedFd<'_>> {
        self.all.get(worker).map(|peer| peer.wake.as_fd())
    }

    /// The worker is awake: what woke it is taken note of.
    pub fn woken(&self, worker: usize) {
        if let Some(peer) = self.all.get(worker) {
            // Nothing there: somebody else woke it.
            let _ = rustix::io::read(&peer.wake, &mut [0; 8]);
        }
    }

    /// Hands a branch to the worker that is to open it.
    pub fn plant(&self, worker: usize, seed: BranchSeed) {
        if let Some(peer) = self.all.get(worker) {
            lock(&peer.seeds).push(seed);
            peer.bell.ring();
        }
    }

    /// The branches that a worker is to open.
    pub fn seeds(&self, worker: usize) -> Vec<BranchSeed> {
        let peer = self.all.get(worker);
        peer.map_or(Vec::new(), |peer| std::mem::take(&mut lock(&peer.seeds)))
    }

    /// Enters a controller's counters.
    pub fn enter(&self, stats: Arc<ControllerStats>) {
        lock(&self.stats).push(stats);
    }

    /// Commands that each worker has fetched so far, of all controllers, as far as queues are where they were: so only
    /// differences over a short time mean something. As of some milliseconds ago, if others have asked.
    pub fn commands(&self, now: Instant) -> Arc<[u64]> {
        let mut count = lock(&self.count);
        if let Some(count) = &*count
            && now.saturating_duration_since(count.at) < FRESH
        {
            return count.commands.clone();
        }
        let commands: Arc<[u64]> = self.count_commands().into();
        *count = Some(Count {
            at: now,
            commands: commands.clone(),
        });
        commands
    }

    fn count_commands(&self) -> Vec<u64> {
        let mut commands = vec![0u64; self.all.len()];
        for stats in lock(&self.stats).iter() {
            for queue in &stats.queues {
                let worker = usize::try_from(queue.worker.get()).unwrap_or(usize::MAX);
                if let Some(sum) = commands.get_mut(worker) {
                    *sum = sum.wrapping_add(queue.commands.get());
                }
            }
        }
        commands
    }

    /// Nanoseconds in which each worker was busy so far.
    pub fn busy(&self) -> Vec<u64> {
        let busy = |peer: &Peer| peer.load.busy_ns.load(Ordering::Relaxed);
        self.all.iter().map(busy).collect()
    }

    /// Whether to decide now: not if any worker did within `pause`. What it decided has to show first.
    pub fn may_decide(&self, now: Instant, pause: Duration) -> bool {
        let now = now.saturating_duration_since(self.start).as_nanos() as u64;
        let decided = self.decided.load(Ordering::Relaxed);
        now.saturating_sub(decided) >= pause.as_nanos() as u64
            && self
                .decided
                .compare_exchange(decided, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Says how busy a worker was so far.
    fn tell(&self, worker: usize, busy: Duration) {
        if let Some(peer) = self.all.get(worker) {
            let busy = busy.as_nanos() as u64;
            peer.load.busy_ns.store(busy, Ordering::Relaxed);
        }
    }
}

/// Measures how busy a worker is, by the clock that it reads now and then: time in which it polled in vain is not busy, and
/// that is known from rounds in a row that did nothing.
pub struct Meter {
    last: Instant,
    /// Rounds without work since then.
    idle: u32,
    rounds: u32,
    /// Nanoseconds of such a round.
    cost: f64,
    busy: Duration,
}

impl Meter {
    pub fn new(now: Instant) -> Self {
        Meter {
            last: now,
            idle: 0,
            rounds: 0,
            cost: f64::INFINITY,
            busy: Duration::ZERO,
        }
    }

    /// A round is over.
    #[inline]
    pub fn round(&mut self, worked: bool) {
        self.rounds += 1;
        self.idle += u32::from(!worked);
    }

    /// The clock was read, after these rounds.
    pub fn tick(&mut self, now: Instant, worker: usize, peers: &Peers) {
        let elapsed = now.saturating_duration_since(self.last);
        let nanos = elapsed.as_nanos() as f64;
        if self.rounds > 0 && self.idle == self.rounds {
            let sample = nanos / f64::from(self.idle);
            // What interrupts such rounds makes them longer, never shorter.
            self.cost = if sample < self.cost {
                sample
            } else {
                self.cost + (sample - self.cost) / 64.0
            };
        } else if self.rounds > 0 {
            let cost = if self.cost.is_finite() {
                self.cost
            } else {
                0.0
            };
            let busy = (nanos - f64::from(self.idle) * cost).max(0.0);
            self.busy += Duration::from_nanos(busy as u64);
            peers.tell(worker, self.busy);
        }
        self.skip(now);
    }

    /// It slept until now.
    pub fn skip(&mut self, now: Instant) {
        self.last = now;
        self.idle = 0;
        self.rounds = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_in_vain_are_not_busy() {
        let peers = Peers::new(2).unwrap();
        let start = Instant::now();
        let at = |micros: u64| start + Duration::from_micros(micros);
        let mut meter = Meter::new(start);
        // Ten rounds in vain a microsecond.
        (0..10).for_each(|_| meter.round(false));
        meter.tick(at(1), 1, &peers);
        assert_eq!(peers.busy(), [0, 0]);
        // Half of ten rounds took the rest of two microseconds.
        (0..10).for_each(|i| meter.round(i % 2 == 0));
        meter.tick(at(3), 1, &peers);
        assert_eq!(peers.busy(), [0, 1500]);
        meter.skip(at(1000));
        (0..10).for_each(|_| meter.round(true));
        meter.tick(at(1002), 1, &peers);
        assert_eq!(peers.busy(), [0, 3500]);
    }

    #[test]
    fn commands_are_counted_once_for_many_who_ask() {
        let peers = Peers::new(2).unwrap();
        let stats = Arc::new(ControllerStats::new(2, 2));
        peers.enter(stats.clone());
        let at = |millis: u64| peers.start + Duration::from_millis(millis);
        for (queue, worker) in stats.queues.iter().zip([0, 1, 1]) {
            queue.worker.set(worker);
            queue.commands.add(5);
        }
        assert_eq!(*peers.commands(at(0)), [5, 10]);
        stats.queues.iter().for_each(|queue| queue.commands.add(1));
        assert_eq!(*peers.commands(at(19)), [5, 10]);
        assert_eq!(*peers.commands(at(20)), [6, 12]);
    }

    #[test]
    fn one_decides_at_a_time() {
        let peers = Peers::new(2).unwrap();
        let pause = Duration::from_millis(100);
        let at = |millis: u64| peers.start + Duration::from_millis(millis);
        assert!(!peers.may_decide(at(50), pause));
        assert!(peers.may_decide(at(150), pause));
        assert!(!peers.may_decide(at(200), pause));
        assert!(peers.may_decide(at(250), pause));
    }
}
