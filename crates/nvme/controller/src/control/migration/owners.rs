//! Owners of queues: which engine has each queue, and the orders that create and delete queues
//! there. The control half's own part of admin commands about queues.

use super::link::Link;
use super::{Migration, QueueOwner};
use crate::control::Controller;
use crate::engine::{Engine, Order, SavedCq, SavedSq};
use nvme::Status;

/// Maximum number of pending orders of one remote engine. Admin commands wait while there are more.
const ORDERS: u64 = 256;

/// Completion queue that belongs to a remote engine, the part of the controller on another worker.
pub(super) struct RemoteCq {
    pub link: usize,
    /// Number of submission queues that use this completion queue.
    pub users: u16,
}

/// Submission queue that belongs to a remote engine, the part of the controller on another worker.
pub(super) struct RemoteSq {
    pub link: usize,
    pub cqid: u16,
}

impl Migration {
    /// Returns the command identifiers of Doorbell Buffer Config commands that wait for remote
    /// engines.
    pub fn configuring(&self) -> impl Iterator<Item = u16> {
        self.configuring.iter().map(|(cid, _)| *cid)
    }

    /// Removes a submission queue from the records, after its remote engine has deleted it.
    pub(super) fn sq_gone(&mut self, qid: u16) {
        if let Some(sq) = self.sqs.remove(&qid)
            && let Some(cq) = self.cqs.get_mut(&sq.cqid)
        {
            cq.users = cq.users.saturating_sub(1);
        }
    }

    /// Returns whether any remote engine has so many pending orders that admin commands have to
    /// wait.
    pub(in crate::control) fn is_behind(&self) -> bool {
        let behind = |link: &Link| link.is_open() && link.sent > link.handled() + ORDERS;
        self.links.iter().any(behind)
    }
}

impl Controller {
    /// Returns the engine that has the completion queue; `None` when no such queue exists.
    pub(super) fn place_of_cq(&self, qid: u16) -> Option<QueueOwner> {
        match self.migration.cqs.get(&qid) {
            Some(cq) => Some(QueueOwner::Remote(cq.link)),
            None => self.engine.queues.cq_exists(qid).then_some(QueueOwner::Own),
        }
    }

    /// Returns the engine that has the submission queue; `None` when no such queue exists.
    fn place_of_sq(&self, qid: u16) -> Option<QueueOwner> {
        match self.migration.sqs.get(&qid) {
            Some(sq) => Some(QueueOwner::Remote(sq.link)),
            None => self.engine.queues.sq_exists(qid).then_some(QueueOwner::Own),
        }
    }

    pub(crate) fn cq_exists(&self, qid: u16) -> bool {
        self.place_of_cq(qid).is_some()
    }

    pub(crate) fn sq_exists(&self, qid: u16) -> bool {
        self.place_of_sq(qid).is_some()
    }

    /// Returns whether any submission queue uses this completion queue.
    pub(crate) fn cq_in_use(&self, qid: u16) -> bool {
        let remote = self.migration.cqs.get(&qid);
        self.engine.queues.cq_in_use(qid) || remote.is_some_and(|cq| cq.users > 0)
    }

    /// Creates a completion queue. Returns `false` when the queue's memory is not accessible.
    pub(crate) fn create_cq(
        &mut self,
        qid: u16,
        iova: u64,
        size: u32,
        vector: Option<u16>,
    ) -> bool {
        let Engine {
            queues,
            dma,
            journal,
            ..
        } = &self.engine;
        let Some(cq) = queues.make_cq(dma, journal, qid, (iova, size), vector) else {
            return false;
        };
        self.order(QueueOwner::Own, Order::InstallCq(qid, Box::new(cq)));
        self.queues.add_cq(SavedCq {
            qid,
            iova,
            size,
            vector,
        });
        true
    }

    /// Creates a submission queue on the worker of its completion queue. Returns `false` when the
    /// queue's memory is not accessible, or when that completion queue does not exist.
    pub(crate) fn create_sq(&mut self, qid: u16, cqid: u16, iova: u64, size: u32) -> bool {
        let (Some(place), Some(sq)) = (
            self.place_of_cq(cqid),
            self.engine
                .queues
                .make_sq(&self.engine.dma, qid, cqid, (iova, size)),
        ) else {
            return false;
        };
        // A remote engine allocates its command records when it is created.
        if qid > 0 && place == QueueOwner::Own && !self.prepare_records(0) {
            return false;
        }
        if let Some(cq) = self.migration.cqs.get_mut(&cqid) {
            cq.users += 1;
            let link = cq.link;
            self.migration.sqs.insert(qid, RemoteSq { link, cqid });
        }
        self.note_worker(qid, place);
        self.order(place, Order::InstallSq(qid, Box::new(sq)));
        self.queues.add_sq(SavedSq {
            qid,
            cqid,
            iova,
            size,
        });
        true
    }

    /// Deletes a completion queue in the engine that has it.
    pub(crate) fn delete_cq(&mut self, qid: u16) {
        if let Some(place) = self.place_of_cq(qid) {
            self.migration.cqs.remove(&qid);
            self.queues.remove_cq(qid);
            self.order(place, Order::DeleteCq(qid));
        }
    }

    /// Begins to delete a submission queue. [`Event::SqDrained`](crate::engine::Event) reports the
    /// end.
    pub(crate) fn delete_sq(&mut self, qid: u16) {
        if let Some(place) = self.place_of_sq(qid) {
            self.order(place, Order::DeleteSq(qid));
        }
    }

    /// Requests the abort of a command; an event reports the outcome. Returns `false` when the
    /// submission queue does not exist.
    pub(crate) fn abort(&mut self, sqid: u16, cid: u16) -> bool {
        let place = self.place_of_sq(sqid);
        if let Some(place) = place {
            self.order(place, Order::Abort { sqid, cid });
        }
        place.is_some()
    }

    /// Applies Doorbell Buffer Config in all engines. Returns `None` when a buffer's memory is not
    /// accessible, and `Some(true)` when all engines have applied it. After `Some(false)`, the
    /// command completes when every remote engine has.
    pub(crate) fn configure_shadow(
        &mut self,
        cid: u16,
        shadow: u64,
        eventidx: u64,
    ) -> Option<bool> {
        if !self
            .engine
            .queues
            .finds_shadow(&self.engine.dma, shadow, eventidx)
        {
            return None;
        }
        self.order_all(|| Order::Shadow { shadow, eventidx });
        let migration = &mut self.migration;
        if !migration.any_queue() {
            return Some(true);
        }
        let wanted = migration.orders();
        migration.configuring.push((cid, wanted));
        migration.wait();
        Some(false)
    }

    /// Completes the Doorbell Buffer Config commands that every remote engine has applied. Returns
    /// whether there were any.
    pub(super) fn end_configuring(&mut self) -> bool {
        let mut worked = false;
        let configuring = std::mem::take(&mut self.migration.configuring);
        for (cid, wanted) in configuring {
            if self.migration.has_applied(&wanted) {
                self.finish_admin(cid, Status::SUCCESS, 0);
                worked = true;
            } else {
                self.migration.configuring.push((cid, wanted));
            }
        }
        worked
    }
}
