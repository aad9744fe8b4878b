//! State of all workers that each of them can read: handles to wake a worker or to send it a job,
//! and the load of each.

use crate::front::{Front, Handle, Remote};
use crate::roll::{Listing, Roll};
use controller::{ControllerStats, RemoteEngineSetup};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// How old a count of commands may be: each of many controllers asks for it.
const FRESH: Duration = Duration::from_millis(20);

/// Commands that each worker had fetched at a time.
struct Count {
    at: Instant,
    commands: Arc<[u64]>,
}

/// Commands that a front-end has fetched so far.
type Fetched = Box<dyn Fn() -> u64 + Send + Sync>;

/// A front-end's place with a worker, as long as it is kept.
pub type Assignment = Listing<usize>;
/// The counter of a front-end that stays with its worker, as long as it is kept.
pub type Fixed = Listing<(usize, Fetched)>;

/// All workers that serve controllers.
pub struct Peers {
    all: Vec<Handle>,
    /// Counters of all controllers.
    stats: Roll<Arc<ControllerStats>>,
    /// Front-ends that stay with the worker of this index: exports, queues of block devices.
    fixed: Roll<(usize, Fetched)>,
    /// The worker of every front-end that was assigned to one.
    assigned: Roll<usize>,
    /// The last one.
    count: Mutex<Option<Count>>,
    start: Instant,
    /// When queues last migrated, in nanoseconds since the start: one worker at a time decides.
    decided: AtomicU64,
}

/// A list is whole even if a thread panicked while it held its lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unpoisoned()
}

impl Peers {
    /// Makes the list of these workers, by index.
    pub fn new(all: Vec<Handle>) -> Self {
        Peers {
            all,
            stats: Roll::default(),
            fixed: Roll::default(),
            assigned: Roll::default(),
            count: Mutex::default(),
            start: Instant::now(),
            decided: AtomicU64::new(0),
        }
    }

    /// Number of the workers.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// All of them, by index.
    pub fn handles(&self) -> &[Handle] {
        &self.all
    }

    /// A worker.
    pub fn handle(&self, worker: usize) -> Option<&Handle> {
        self.all.get(worker)
    }

    /// Opens an engine of a controller on another worker.
    pub fn open_remote_engine(&self, worker: usize, setup: RemoteEngineSetup) {
        let Some(handle) = self.all.get(worker) else {
            return;
        };
        handle.post(move |served| {
            let opened = served.add(|context| {
                let engine = setup.open(context.owner, context.io)?;
                Ok::<_, controller::ConfigError>(Front::Remote(Box::new(Remote::new(engine))))
            });
            match opened {
                Ok(Some(owner)) => served
                    .handle()
                    .set_name(owner, "queues of another worker's controller"),
                Ok(None) => tracing::warn!("queues cannot migrate to worker {worker}: it is full"),
                Err(error) => tracing::warn!(%error, "queues cannot migrate to worker {worker}"),
            }
        });
    }

    /// Enters a controller's counters.
    pub fn enter(&self, stats: Arc<ControllerStats>) -> Listing<Arc<ControllerStats>> {
        self.stats.enter(stats)
    }

    /// Assigns a front-end to a worker.
    pub fn assign(&self, worker: usize) -> Assignment {
        self.assigned.enter(worker)
    }

    /// Assigns a front-end to the worker that has the fewest.
    pub fn assign_any(&self) -> (usize, Assignment) {
        let mut counts = vec![0usize; self.all.len()];
        self.assigned.look(|assigned| {
            for worker in assigned {
                if let Some(count) = counts.get_mut(*worker) {
                    *count += 1;
                }
            }
        });
        let fewest = counts.iter().enumerate().min_by_key(|(_, count)| **count);
        let worker = fewest.map_or(0, |(worker, _)| worker);
        (worker, self.assign(worker))
    }

    /// Registers a front-end that is no controller and stays with its worker. Its requests take a
    /// part of the worker's time that no queue's migration would change.
    pub fn enter_fixed(
        &self,
        worker: usize,
        fetched: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Fixed {
        self.fixed.enter((worker, Box::new(fetched)))
    }

    /// Returns the number of commands that each worker has fetched so far, over all front-ends.
    /// Commands of a migrated queue count for its present worker, so only differences over a short
    /// time have a meaning. The count may be some milliseconds old.
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
        self.stats.look(|all| {
            for queue in all.flat_map(|stats| &stats.queues) {
                let worker = usize::try_from(queue.worker.get()).unwrap_or(usize::MAX);
                if let Some(sum) = commands.get_mut(worker) {
                    *sum = sum.wrapping_add(queue.commands.get());
                }
            }
        });
        self.fixed.look(|all| {
            for (worker, fetched) in all {
                if let Some(sum) = commands.get_mut(*worker) {
                    *sum = sum.wrapping_add(fetched());
                }
            }
        });
        commands
    }

    /// Nanoseconds in which each worker was busy so far.
    pub fn busy(&self) -> Vec<u64> {
        let busy = |handle: &Handle| handle.load().busy().as_nanos() as u64;
        self.all.iter().map(busy).collect()
    }

    /// Returns whether a worker may decide now: only if no worker has decided within `pause`,
    /// because the effect of a decision has to show first.
    pub fn may_decide(&self, now: Instant, pause: Duration) -> bool {
        let now = now.saturating_duration_since(self.start).as_nanos() as u64;
        let decided = self.decided.load(Ordering::Relaxed);
        now.saturating_sub(decided) >= pause.as_nanos() as u64
            && self
                .decided
                .compare_exchange(decided, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Peers {
        Peers::new(vec![Handle::new().unwrap(), Handle::new().unwrap()])
    }

    #[test]
    fn commands_are_counted_once_for_many_who_ask() {
        let peers = two();
        let stats = Arc::new(ControllerStats::new(2, 2));
        let _entered = peers.enter(stats.clone());
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
    fn what_exports_and_block_devices_fetch_counts_for_their_worker() {
        let peers = two();
        let stats = Arc::new(ControllerStats::new(2, 2));
        let entered = peers.enter(stats.clone());
        for queue in &stats.queues {
            queue.worker.set(1);
            queue.commands.add(1);
        }
        let queues = stats.queues.len() as u64;
        let _stay = [(1, 90), (0, 7), (2, 5)].map(|(at, n)| peers.enter_fixed(at, move || n));
        assert_eq!(*peers.commands(peers.start), [7, 90 + queues]);
        drop(entered);
        assert_eq!(*peers.commands(peers.start + FRESH), [7, 90]);
    }

    #[test]
    fn the_worker_with_the_fewest_front_ends_is_next() {
        let peers = two();
        let first = peers.assign(0);
        let (worker, second) = peers.assign_any();
        assert_eq!(worker, 1);
        drop(first);
        assert_eq!(peers.assign_any().0, 0);
        drop(second);
    }

    #[test]
    fn one_decides_at_a_time() {
        let peers = two();
        let pause = Duration::from_millis(100);
        let at = |millis: u64| peers.start + Duration::from_millis(millis);
        assert!(!peers.may_decide(at(50), pause));
        assert!(peers.may_decide(at(150), pause));
        assert!(!peers.may_decide(at(200), pause));
        assert!(peers.may_decide(at(250), pause));
    }
}
