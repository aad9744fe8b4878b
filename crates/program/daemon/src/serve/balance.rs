//! Balancing of a controller's queues among workers.
//!
//! Queues are created on their controller's worker, and stay there as long as it has time for all
//! of them: waking a second worker for an idle disk would cost more than it gains. When one worker
//! has much more work than another, enough queues migrate to make both about equally busy.

use crate::serve::peers::Peers;
use config::choices::Spread;
use controller::{Controller, ControllerStats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time over which the load of each worker is averaged before queues are moved.
const PERIOD: Duration = Duration::from_millis(250);
/// Time after a decision in which no other is made, so that its effect shows first.
const SETTLE_TIME: Duration = Duration::from_millis(600);
/// Busy share of a worker's time below which none of its queues is moved away.
const MIN_BUSY_SHARE: f64 = 0.6;
/// Difference between the busy shares of two workers below which they count as equally loaded.
const MIN_DIFFERENCE: f64 = 0.3;
/// Share of a worker's time that a queue must use for a move to be worthwhile.
const MIN_QUEUE_SHARE: f64 = 0.02;
/// Interval between two moves of [`Spread::Stir`].
const STIR_INTERVAL: Duration = Duration::from_micros(300);

/// Completion queue and its submission queues, which can only move to another worker together.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Queue {
    cqid: u16,
    worker: usize,
    /// Share of its worker's processor time that the queue uses, 0 to 1.
    load: f64,
}

/// Plans moves of queues from busy to idle workers: (completion queue ID, worker index) pairs.
/// `busy`: each worker's share of processor time, 0 to 1.
fn plan(mut busy: Vec<f64>, mut queues: Vec<Queue>) -> Vec<(u16, usize)> {
    let mut moves = Vec::new();
    loop {
        let of = |worker: usize| busy.get(worker).copied().unwrap_or(0.0);
        let ours = queues.iter().map(|queue| queue.worker);
        let Some(from) = ours.max_by(|a, b| of(*a).total_cmp(&of(*b))) else {
            return moves;
        };
        let Some(to) = (0..busy.len()).min_by(|a, b| of(*a).total_cmp(&of(*b))) else {
            return moves;
        };
        let gap = of(from) - of(to);
        if of(from) < MIN_BUSY_SHARE || gap < MIN_DIFFERENCE {
            return moves;
        }
        // The best queue is half of the difference; one that is nearly all of it would only swap
        // the roles of the workers.
        let fits = |queue: &&mut Queue| {
            queue.worker == from && queue.load >= MIN_QUEUE_SHARE && queue.load <= gap * 0.75
        };
        let off = |queue: &Queue| (queue.load - gap / 2.0).abs();
        let best = queues.iter_mut().filter(fits);
        let Some(queue) = best.min_by(|a, b| off(a).total_cmp(&off(b))) else {
            return moves;
        };
        queue.worker = to;
        let (cqid, load) = (queue.cqid, queue.load);
        if let Some(busy) = busy.get_mut(from) {
            *busy -= load;
        }
        if let Some(busy) = busy.get_mut(to) {
            *busy += load;
        }
        moves.push((cqid, to));
        // Each queue moves at most once.
        queues.retain(|queue| queue.cqid != cqid);
    }
}

/// Counters of workers and queues at one time. Two snapshots give the loads between them.
struct Snapshot {
    at: Instant,
    busy: Vec<u64>,
    commands: Arc<[u64]>,
    /// Number of commands fetched so far from each queue of the controller.
    queues: Vec<u64>,
}

/// Balancer of one controller's queues between workers, which decides when queues migrate.
pub struct Balance {
    spread: Spread,
    worker: usize,
    peers: Arc<Peers>,
    stats: Arc<ControllerStats>,
    last: Option<Snapshot>,
    next: Instant,
    /// Moves (completion queue ID and worker index) that were decided and not executed yet.
    moves: Vec<(u16, usize)>,
    random: u64,
}

impl Balance {
    pub fn new(spread: Spread, worker: usize, peers: Arc<Peers>, controller: &Controller) -> Self {
        Balance {
            spread,
            worker,
            peers,
            stats: controller.stats(),
            last: None,
            next: Instant::now(),
            moves: Vec::new(),
            random: 1,
        }
    }

    /// Decides whether queues should migrate, if a decision is due, and continues migrations. The
    /// worker calls this repeatedly while it is awake.
    pub fn rebalance(&mut self, controller: &mut Controller, now: Instant) {
        if self.spread == Spread::Off || self.peers.count() < 2 {
            return;
        }
        if !self.moves.is_empty() && !controller.is_migrating() {
            self.move_one(controller);
        }
        if now < self.next {
            return;
        }
        if self.spread == Spread::Stir {
            self.next = now + STIR_INTERVAL;
            return self.stir(controller);
        }
        self.next = now + PERIOD;
        self.compare(controller, now);
    }

    fn move_one(&mut self, controller: &mut Controller) {
        let Some((cqid, to)) = self.moves.pop() else {
            return;
        };
        if self.reach(controller, to) && controller.migrate_queue(cqid, to as u16) {
            tracing::debug!(cqid, worker = to, "queue migrates");
        }
    }

    /// Returns whether queues can migrate to a worker now. The first call starts connecting to it.
    fn reach(&self, controller: &mut Controller, worker: usize) -> bool {
        if worker == self.worker {
            return true;
        }
        match controller.has_remote_engine(worker as u16) {
            Some(true) => true,
            None => false,
            Some(false) => {
                let handle = self.peers.handle(worker);
                let setup = handle.and_then(|h| controller.remote_engine(worker as u16, h.waker()));
                if let Some(setup) = setup {
                    self.peers.open_remote_engine(worker, setup);
                }
                false
            }
        }
    }

    fn snapshot(&self, now: Instant) -> Snapshot {
        Snapshot {
            at: now,
            busy: self.peers.busy(),
            commands: self.peers.commands(now),
            queues: self.stats.queues.iter().map(|q| q.commands.get()).collect(),
        }
    }

    fn compare(&mut self, controller: &mut Controller, now: Instant) {
        let new = self.snapshot(now);
        let Some(old) = self.last.replace(new) else {
            return;
        };
        let Some(new) = &self.last else {
            return;
        };
        let elapsed = now.saturating_duration_since(old.at);
        // This worker slept meanwhile, so an average over that time has no meaning.
        if elapsed > PERIOD * 2 || !self.moves.is_empty() || !controller.may_migrate() {
            return;
        }
        let elapsed = elapsed.as_nanos() as f64;
        let since = |new: &[u64], old: &[u64], at: usize| {
            let (new, old) = (new.get(at), old.get(at));
            new.zip(old)
                .map_or(0, |(new, old)| new.saturating_sub(*old)) as f64
        };
        let busy: Vec<f64> = (0..self.peers.count())
            .map(|worker| (since(&new.busy, &old.busy, worker) / elapsed).min(1.0))
            .collect();
        let queues = controller.completion_queues().into_iter();
        let queues = queues
            .map(|(cqid, worker)| {
                let worker = usize::from(worker);
                let sqs = controller.submission_queues(cqid).into_iter();
                let commands: f64 = sqs
                    .map(|qid| since(&new.queues, &old.queues, qid.into()))
                    .sum();
                let all = since(&new.commands, &old.commands, worker).max(1.0);
                let share = (commands / all).min(1.0);
                Queue {
                    cqid,
                    worker,
                    load: busy.get(worker).copied().unwrap_or(0.0) * share,
                }
            })
            .collect();
        let moves = plan(busy.clone(), queues);
        if moves.is_empty() || !self.peers.may_decide(now, SETTLE_TIME) {
            return;
        }
        tracing::debug!(?busy, ?moves, "uneven");
        // Engines that are not open yet need a while; a later decision may use them.
        let reached = moves.iter().filter(|(_, to)| self.reach(controller, *to));
        self.moves = reached.copied().collect();
        self.move_one(controller);
    }

    fn stir(&mut self, controller: &mut Controller) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let queues = controller.completion_queues();
        let pick = (self.random >> 33) as usize;
        let to = (self.random >> 20) as usize % self.peers.count();
        if let Some(&(cqid, _)) = queues.get(pick % queues.len().max(1))
            && controller.may_migrate()
            && self.reach(controller, to)
        {
            controller.migrate_queue(cqid, to as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(loads: &[(usize, f64)]) -> Vec<Queue> {
        let queue = |(i, &(worker, load)): (usize, &(usize, f64))| Queue {
            cqid: i as u16 + 1,
            worker,
            load,
        };
        loads.iter().enumerate().map(queue).collect()
    }

    #[test]
    fn half_of_queues_move_to_idle_worker() {
        let moves = plan(vec![1.0, 0.0], queues(&[(0, 0.25); 4]));
        assert_eq!(moves.len(), 2, "{moves:?}");
        assert!(moves.iter().all(|(_, to)| *to == 1));
    }

    #[test]
    fn single_queue_stays() {
        assert!(plan(vec![1.0, 0.0], queues(&[(0, 1.0)])).is_empty());
        assert!(plan(vec![1.0, 0.1], queues(&[(0, 0.9), (0, 0.01)])).is_empty());
    }

    #[test]
    fn small_difference_or_load_is_ignored() {
        assert!(plan(vec![0.5, 0.0], queues(&[(0, 0.25); 2])).is_empty());
        assert!(plan(vec![1.0, 0.8], queues(&[(0, 0.25); 4])).is_empty());
        assert!(plan(vec![1.0], queues(&[(0, 0.25); 4])).is_empty());
        assert!(plan(vec![1.0, 0.0], Vec::new()).is_empty());
    }

    #[test]
    fn queues_return_from_busy_worker() {
        let moves = plan(vec![0.1, 1.0], queues(&[(1, 0.2), (0, 0.1)]));
        assert_eq!(moves, [(1, 0)]);
    }

    #[test]
    fn small_queues_spread_over_all_workers() {
        let moves = plan(
            vec![1.0, 0.0, 0.0, 0.0],
            queues(&[(0, 1.0 / 64.0 + 0.01); 64]),
        );
        let of = |worker| moves.iter().filter(|(_, to)| *to == worker).count();
        let counts = [of(1), of(2), of(3)];
        assert!(counts.iter().all(|n| (5..=20).contains(n)), "{counts:?}");
    }
}
