//! Migration of a single queue from one worker to another.

use super::owners::{RemoteCq, RemoteSq};
use crate::control::Controller;
use crate::control::lifecycle::{LifecycleState, Shutdown};
use crate::engine::{MigratingQueues, Order};
use std::time::{Duration, Instant};

/// Maximum duration of a migration. Nothing is fetched from a migrating queue; if its commands stay
/// outstanding for longer, the queue therefore stays with its worker.
const MIGRATION_TIMEOUT: Duration = Duration::from_millis(50);

/// Engine that a queue belongs to, and that fetches its commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control) enum QueueOwner {
    /// The engine of the controller's own worker.
    Own,
    /// The remote engine with this index, on another worker.
    Remote(usize),
}

pub(super) struct QueueMigration {
    pub cqid: u16,
    pub from: QueueOwner,
    pub to: QueueOwner,
    pub since: Instant,
    /// Whether the queue's migration was cancelled and the answer of its engine is still awaited.
    pub cancelled: bool,
}

impl Controller {
    /// Returns the I/O completion queues, each with the index of its worker. Queues migrate in
    /// units of a completion queue with its submission queues; the admin queue never does.
    pub fn completion_queues(&self) -> Vec<(u16, u16)> {
        let mut all: Vec<(u16, u16)> = Vec::new();
        if let Some((own, _)) = &self.migration.own_worker {
            all.extend(self.engine.queues.io_cqs().map(|cqid| (cqid, *own)));
        }
        for (&cqid, cq) in &self.migration.cqs {
            if let Some(link) = self.migration.links.get(cq.link) {
                all.push((cqid, link.worker));
            }
        }
        all
    }

    /// Returns the submission queues that use completion queue `cqid`.
    pub fn submission_queues(&self, cqid: u16) -> Vec<u16> {
        let there = self.migration.sqs.iter();
        let there = there.filter_map(|(&qid, sq)| (sq.cqid == cqid).then_some(qid));
        self.engine
            .queues
            .users_of(cqid)
            .into_iter()
            .chain(there)
            .collect()
    }

    /// Returns whether queues may migrate to other workers: the controller is ready, interrupts are
    /// messages, and doorbell writes need not all pass through this worker.
    pub fn may_migrate(&self) -> bool {
        self.state == LifecycleState::Ready
            && self.shutdown == Shutdown::No
            && !self.engine.irqs.pin_based()
            && (self.engine.queues.shadowed() || self.config.mapped_doorbells)
    }

    /// Returns whether a queue is migrating.
    pub fn is_migrating(&self) -> bool {
        self.migration.migrating.is_some()
    }

    /// Begins to migrate a completion queue, with its submission queues, to another worker. The
    /// queue migrates as soon as its outstanding commands have completed; if that takes too long,
    /// it stays. Returns `false` when no migration can begin now.
    pub fn migrate_queue(&mut self, cqid: u16, worker: u16) -> bool {
        let own = self.migration.own_worker.as_ref().map(|(own, _)| *own);
        let to = if own == Some(worker) {
            QueueOwner::Own
        } else {
            if !self.may_migrate() || self.has_remote_engine(worker) != Some(true) {
                return false;
            }
            match self.migration.link_of(worker) {
                Some(link) => QueueOwner::Remote(link),
                None => return false,
            }
        };
        self.begin_migration(cqid, to)
    }

    pub(super) fn begin_migration(&mut self, cqid: u16, to: QueueOwner) -> bool {
        if cqid == 0
            || self.is_migration_busy()
            || !self.engine.queues.is_master()
            || self.state != LifecycleState::Ready
            || self.shutdown != Shutdown::No
        {
            return false;
        }
        let Some(from) = self.place_of_cq(cqid).filter(|from| *from != to) else {
            return false;
        };
        self.order(from, Order::Migrate(cqid));
        self.migration.migrating = Some(QueueMigration {
            cqid,
            from,
            to,
            since: self.now,
            cancelled: false,
        });
        true
    }

    /// Advances a migration away from the controller's own engine, and cancels a migration that
    /// takes too long. Returns whether there was anything to do.
    pub(super) fn advance_migration(&mut self) -> bool {
        let mut worked = false;
        if self.migration.migrating.is_some()
            && let Some(queues) = self.engine.release_migrating()
        {
            self.queue_released(queues);
            worked = true;
        }
        if let Some(migrating) = &self.migration.migrating
            && self.now.saturating_duration_since(migrating.since) >= MIGRATION_TIMEOUT
        {
            self.cancel_migration();
        }
        worked
    }

    /// Returns the time at which [`Controller::advance_if_migrating`] has to be called even if no
    /// event occurs.
    pub(in crate::control) fn migration_deadline(&self) -> Option<Instant> {
        let migrating = self
            .migration
            .migrating
            .as_ref()
            .filter(|migrating| !migrating.cancelled)?;
        Some(migrating.since + MIGRATION_TIMEOUT)
    }

    /// Cancels the current migration: the queue stays, unless its engine has already released it.
    pub(in crate::control) fn cancel_migration(&mut self) {
        let Some(migrating) = &mut self.migration.migrating else {
            return;
        };
        if std::mem::replace(&mut migrating.cancelled, true) {
            return;
        }
        let from = migrating.from;
        self.order(from, Order::CancelMigration);
    }

    pub(in crate::control) fn migration_cancelled(&mut self) {
        self.migration.migrating = None;
    }

    /// Passes a queue that one engine has released to the engine that it migrates to.
    pub(in crate::control) fn queue_released(&mut self, queues: Box<MigratingQueues>) {
        let cqid = queues.cqid;
        let migrating = self.migration.migrating.take();
        let Some(migrating) = migrating.filter(|migrating| migrating.cqid == cqid) else {
            return self
                .engine
                .broken("an engine releases a queue that does not migrate");
        };
        self.migration.cqs.remove(&cqid);
        self.migration.sqs.retain(|_, sq| sq.cqid != cqid);
        let qids: Vec<u16> = queues.sqs.iter().map(|(qid, _)| *qid).collect();
        let mut to = migrating.to;
        if let QueueOwner::Remote(link) = to {
            // Interrupts may meanwhile use the pin, which forbids migration.
            if self.may_migrate() {
                let users = qids.len() as u16;
                self.migration.cqs.insert(cqid, RemoteCq { link, users });
                let there = qids.iter().map(|&qid| (qid, RemoteSq { link, cqid }));
                self.migration.sqs.extend(there);
            } else {
                to = QueueOwner::Own;
            }
        }
        self.order(to, Order::InstallMigrated(queues));
        self.engine.stats.migrations.add(1);
        for qid in qids {
            self.note_worker(qid, to);
        }
    }

    /// Stores the index of the worker that serves a submission queue in the queue's counters.
    pub(super) fn note_worker(&self, qid: u16, place: QueueOwner) {
        let worker = match place {
            QueueOwner::Remote(link) => self.migration.links.get(link).map(|link| link.worker),
            QueueOwner::Own => self.migration.own_worker.as_ref().map(|(own, _)| *own),
        };
        if let (Some(queue), Some(worker)) =
            (self.engine.stats.queues.get(usize::from(qid)), worker)
        {
            queue.worker.set(worker.into());
        }
    }
}
