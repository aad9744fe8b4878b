//! Admin commands about queues that may live on other workers, or be on their way there.

use super::Spread;
use super::link::Link;
use crate::admin::table;
use crate::branch::Order;
use crate::controller::Controller;
use crate::engine::Sq;
use nvme::{Command, Status};

/// Orders of one branch that may be under way before admin commands wait for it.
const ORDERS: u64 = 256;

/// A completion queue that lives elsewhere.
pub(super) struct RemoteCq {
    pub link: usize,
    /// Submission queues that complete there.
    pub users: u16,
}

/// A submission queue that lives elsewhere.
pub(super) struct RemoteSq {
    pub link: usize,
    pub cqid: u16,
}

impl Spread {
    pub fn cq_exists(&self, qid: u16) -> bool {
        self.cqs.contains_key(&qid)
    }

    pub fn sq_exists(&self, qid: u16) -> bool {
        self.sqs.contains_key(&qid)
    }

    pub fn cq_in_use(&self, qid: u16) -> bool {
        self.cqs.get(&qid).is_some_and(|cq| cq.users > 0)
    }

    /// Deletes a submission queue of a branch. `false` when there is no such queue.
    pub fn delete_sq(&mut self, qid: u16) -> bool {
        let Some(link) = self.sqs.get(&qid).map(|sq| sq.link) else {
            return false;
        };
        self.tell(link, Order::DeleteSq(qid));
        true
    }

    /// Deletes a completion queue of a branch. `false` when there is no such queue.
    pub fn delete_cq(&mut self, qid: u16) -> bool {
        let Some(cq) = self.cqs.remove(&qid) else {
            return false;
        };
        self.tell(cq.link, Order::DeleteCq(qid));
        true
    }

    /// Aborts a command of a branch's queue. `false` when there is no such queue.
    pub fn abort(&mut self, sqid: u16, cid: u16) -> bool {
        let Some(link) = self.sqs.get(&sqid).map(|sq| sq.link) else {
            return false;
        };
        self.tell(link, Order::Abort { sqid, cid });
        true
    }

    /// A submission queue of a branch is gone.
    pub(super) fn sq_gone(&mut self, qid: u16) {
        if let Some(sq) = self.sqs.remove(&qid)
            && let Some(cq) = self.cqs.get_mut(&sq.cqid)
        {
            cq.users = cq.users.saturating_sub(1);
        }
    }

    /// A branch has so many orders before it that no admin command may give more.
    pub(super) fn is_behind(&self) -> bool {
        let behind = |link: &Link| link.is_open() && link.sent > link.handled() + ORDERS;
        self.links.iter().any(behind)
    }
}

impl Controller {
    fn must_hold(&self, command: &Command) -> bool {
        let concerns_queues = table::concerns_queues(command.admin_opcode());
        // Without Bus Master Enable a command's data cannot be reached.
        (self.spread.moving.is_some() && concerns_queues)
            || self.spread.is_behind()
            || !self.engine.is_master()
    }

    /// Runs an admin command, or holds it until no queue that it may be about is on its way.
    pub(in crate::controller) fn admin_or_hold(&mut self, command: &Command) {
        if self.spread.held.is_empty() && !self.must_hold(command) {
            return self.admin_command(command);
        }
        self.spread.held.push_back(*command);
        self.call_off();
        self.tend_busy();
    }

    /// Creates a submission queue where its completion queue is. `false` when the queue's memory is not there.
    pub(crate) fn create_sq(&mut self, qid: u16, cqid: u16, iova: u64, size: u32) -> bool {
        let Some(cq) = self.spread.cqs.get_mut(&cqid) else {
            self.place(qid, None);
            return self.engine.create_sq(qid, cqid, iova, size);
        };
        let Some(sq) = self.engine.make_sq(qid, cqid, iova, size) else {
            return false;
        };
        cq.users += 1;
        let link = cq.link;
        self.spread.sqs.insert(qid, RemoteSq { link, cqid });
        self.place(qid, Some(link));
        let sq: Box<Sq> = Box::new(sq.detached());
        self.spread.tell(link, Order::InstallSq(qid, sq));
        true
    }

    /// Doorbell Buffer Config in all engines. `None` when a buffer's memory is not there; else whether it is done: if not, the
    /// command completes when every branch has followed.
    pub(crate) fn configure_shadow(
        &mut self,
        cid: u16,
        shadow: u64,
        eventidx: u64,
    ) -> Option<bool> {
        if !self.engine.configure_shadow(shadow, eventidx) {
            return None;
        }
        let spread = &mut self.spread;
        spread.tell_all(|| Order::Shadow { shadow, eventidx });
        if !spread.any_queue() {
            return Some(true);
        }
        let wanted = spread.links.iter().map(|link| link.sent).collect();
        spread.configuring.push((cid, wanted));
        Some(false)
    }

    /// Hands the engines what they need of the features.
    pub(crate) fn apply_features(&mut self) {
        self.admin.features.apply(&mut self.engine);
        let (write_cache, coalescing) = (self.engine.write_cache, self.engine.coalescing);
        self.spread.tell_all(|| Order::Features {
            write_cache,
            coalescing,
        });
    }

    /// Completes Doorbell Buffer Config commands that every branch has followed. Returns whether there was one.
    pub(super) fn end_configuring(&mut self) -> bool {
        let mut worked = false;
        let configuring = std::mem::take(&mut self.spread.configuring);
        for (cid, wanted) in configuring {
            let mut links = self.spread.links.iter().zip(&wanted);
            if links.all(|(link, wanted)| !link.is_open() || link.handled() >= *wanted) {
                self.engine.finish(0, cid, Status::SUCCESS, 0);
                worked = true;
            } else {
                self.spread.configuring.push((cid, wanted));
            }
        }
        worked
    }

    /// Runs the commands that were held, as far as they need not be any more. Returns whether there was one.
    pub(super) fn release_held(&mut self) -> bool {
        let mut worked = false;
        while let Some(command) = self.spread.held.front().copied()
            && !self.must_hold(&command)
        {
            self.spread.held.pop_front();
            self.admin_command(&command);
            worked = true;
        }
        worked
    }
}
