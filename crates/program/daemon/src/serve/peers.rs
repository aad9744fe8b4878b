//! State of all workers that every worker can read: handles to wake a worker or send it a job, and
//! the load of each.

use crate::front::{Front, Handle, Remote};
use crate::registry::guarded_list::{GuardedList, ListEntry};
use controller::{ControllerStats, RemoteEngineSetup};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Time for which the counted commands of all workers are reused, since each controller asks for
/// them.
const COUNT_LIFETIME: Duration = Duration::from_millis(20);

/// Sample of the total number of commands that each worker has fetched, and its time.
struct Count {
    at: Instant,
    commands: Arc<[u64]>,
}

/// Function that returns the number of commands that a front-end has fetched so far.
type Fetched = Box<dyn Fn() -> u64 + Send + Sync>;

/// Registration of a front-end with a worker, which ends when it is dropped.
pub type Assignment = ListEntry<usize>;
/// Registration of the command counter of a front-end that never migrates, which ends when it is
/// dropped.
pub type FixedCounter = ListEntry<(usize, Fetched)>;

/// All workers of the process, and the front-ends that they serve.
pub struct Peers {
    all: Vec<Handle>,
    /// Counters of all controllers, from which the load of workers is computed.
    stats: GuardedList<Arc<ControllerStats>>,
    /// Counters of front-ends that never migrate (exports, queues of block devices), with their
    /// workers' indexes.
    fixed: GuardedList<(usize, Fetched)>,
    /// Worker index of each front-end that is assigned to a worker.
    assigned: GuardedList<usize>,
    /// Numbers of commands that the workers had fetched at the last count, reused while recent.
    count: Mutex<Option<Count>>,
    start: Instant,
    /// Time of the last decision to migrate queues, in nanoseconds since the start. One worker at a
    /// time may decide.
    decided: AtomicU64,
}

/// Locks a list; if a thread panicked while it held the lock, the list is still consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unpoisoned()
}

impl Peers {
    /// Creates the state of the workers; `all` has their handles in the order of their indices.
    pub fn new(all: Vec<Handle>) -> Self {
        Peers {
            all,
            stats: GuardedList::default(),
            fixed: GuardedList::default(),
            assigned: GuardedList::default(),
            count: Mutex::default(),
            start: Instant::now(),
            decided: AtomicU64::new(0),
        }
    }

    /// Returns the number of workers.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Returns the handles of all workers, by index.
    pub fn handles(&self) -> &[Handle] {
        &self.all
    }

    /// Returns the handle of a worker.
    pub fn handle(&self, worker: usize) -> Option<&Handle> {
        self.all.get(worker)
    }

    /// Sends an engine of a controller to another worker, which opens it.
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

    /// Registers the counters of a controller until the returned value is dropped.
    pub fn enter(&self, stats: Arc<ControllerStats>) -> ListEntry<Arc<ControllerStats>> {
        self.stats.enter(stats)
    }

    /// Assigns a front-end to a worker until the returned value is dropped.
    pub fn assign(&self, worker: usize) -> Assignment {
        self.assigned.enter(worker)
    }

    /// Assigns a front-end to the worker with the fewest front-ends, and returns the worker's
    /// index.
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

    /// Registers a front-end that is not a controller and never migrates. Its requests use time of
    /// the worker that migrating queues could not reduce.
    pub fn enter_fixed(
        &self,
        worker: usize,
        fetched: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> FixedCounter {
        self.fixed.enter((worker, Box::new(fetched)))
    }

    /// Returns the number of commands that each worker has fetched so far, over all front-ends.
    /// Commands of a migrated queue count for its present worker, so only differences over a short
    /// time are meaningful. The count may be some milliseconds old.
    pub fn commands(&self, now: Instant) -> Arc<[u64]> {
        let mut count = lock(&self.count);
        if let Some(count) = &*count
            && now.saturating_duration_since(count.at) < COUNT_LIFETIME
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

    /// Returns for each worker the time in nanoseconds that it has been busy so far.
    pub fn busy(&self) -> Vec<u64> {
        let busy = |handle: &Handle| handle.load().busy().as_nanos() as u64;
        self.all.iter().map(busy).collect()
    }

    /// Returns whether a worker may now decide to migrate queues: no worker may have done so within
    /// `pause`, because the effect of a decision must show first.
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
    fn worker_counts_commands_once_for_all_callers() {
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
    fn export_and_ublk_commands_count_for_worker() {
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
        assert_eq!(*peers.commands(peers.start + COUNT_LIFETIME), [7, 90]);
    }

    #[test]
    fn worker_with_fewest_front_ends_is_next() {
        let peers = two();
        let first = peers.assign(0);
        let (worker, second) = peers.assign_any();
        assert_eq!(worker, 1);
        drop(first);
        assert_eq!(peers.assign_any().0, 0);
        drop(second);
    }

    #[test]
    fn balance_decisions_are_serialized() {
        let peers = two();
        let pause = Duration::from_millis(100);
        let at = |millis: u64| peers.start + Duration::from_millis(millis);
        assert!(!peers.may_decide(at(50), pause));
        assert!(peers.may_decide(at(150), pause));
        assert!(!peers.may_decide(at(200), pause));
        assert!(peers.may_decide(at(250), pause));
    }
}
