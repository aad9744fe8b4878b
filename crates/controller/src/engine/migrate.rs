//! Migration of queues from one engine to another: a completion queue with the submission queues
//! that complete there.
//!
//! Fetching from the queues stops. When all fetched commands have completed and are posted, the
//! engine releases the queues. Their whole state goes with them: heads, tails, the phase, and the
//! doorbell values seen, EventIdx included. The other engine looks up the guest's memory in its
//! own map. The next engine therefore continues exactly where this one has stopped.

use super::queue::{Cq, Sq};
use super::{Engine, Event};

/// A completion queue and its submission queues, in transit between two engines.
pub(crate) struct MigratingQueues {
    pub cqid: u16,
    pub cq: Cq,
    pub sqs: Vec<(u16, Sq)>,
    /// [`Engine::masterings`] where they come from, when they were released.
    pub masterings: u64,
}

impl Engine {
    /// Migrates a completion queue, with its submission queues: [`Engine::release_migrating`]
    /// releases them as soon as nothing of them is in flight. One at a time; it stays when there is
    /// no such queue, or another one migrates.
    pub(super) fn begin_migration(&mut self, cqid: u16) {
        if self.migrating.is_some() || !self.cq_exists(cqid) {
            self.events.push_back(Event::MigrationCancelled);
            return;
        }
        self.migrating = Some(cqid);
        let sqs = &self.sqs;
        self.polled
            .remove(|q| matches!(sqs.get(usize::from(q)), Some(Some(sq)) if sq.cqid == cqid));
    }

    /// Cancels the migration of a queue that was not released yet.
    pub(super) fn cancel_migration(&mut self) {
        let Some(cqid) = self.migrating.take() else {
            return;
        };
        for qid in self.users_of(cqid) {
            if matches!(self.sqs.get(usize::from(qid)), Some(Some(sq)) if !sq.deleting) {
                self.start_fetching(qid);
            }
        }
        self.events.push_back(Event::MigrationCancelled);
    }

    /// Returns the submission queues that complete in `cqid`.
    pub fn users_of(&self, cqid: u16) -> Vec<u16> {
        let user =
            |(qid, sq): (usize, &Option<Sq>)| (sq.as_ref()?.cqid == cqid).then_some(qid as u16);
        self.sqs.iter().enumerate().filter_map(user).collect()
    }

    /// Releases the queue that migrates, if nothing of it is in flight.
    pub fn release_migrating(&mut self) -> Option<Box<MigratingQueues>> {
        // Without Bus Master Enable nothing is posted to the host, and no queue migrates.
        let cqid = self.migrating.filter(|_| self.master)?;
        let users = self.users_of(cqid);
        // Completions that wait for room are outstanding, too; and a queue that is being deleted is
        // there as long as any is.
        let busy = |sq: &Sq| sq.outstanding > 0;
        if users
            .iter()
            .any(|&q| matches!(self.sqs.get(usize::from(q)), Some(Some(sq)) if busy(sq)))
        {
            return None;
        }
        // The next engine does not send a delayed interrupt of this one.
        self.signal_now(cqid);
        self.migrating = None;
        self.blocked.retain(|&q| q != cqid);
        let Some(mut cq) = self.cqs.get_mut(usize::from(cqid)).and_then(Option::take) else {
            self.broken("a queue migrates that is gone");
            return None;
        };
        cq.memory.release();
        cq.blocked = false;
        cq.users = 0;
        let mut sqs = Vec::with_capacity(users.len());
        for qid in users {
            if let Some(mut sq) = self.sqs.get_mut(usize::from(qid)).and_then(Option::take) {
                sq.memory.release();
                sqs.push((qid, sq));
            }
        }
        let masterings = self.masterings;
        Some(Box::new(MigratingQueues {
            cqid,
            cq,
            sqs,
            masterings,
        }))
    }

    /// Takes queues in that another engine of the controller has released.
    pub(super) fn install_migrated(&mut self, queues: MigratingQueues) {
        let MigratingQueues {
            cqid,
            cq,
            sqs,
            masterings,
        } = queues;
        self.install_cq(cqid, cq);
        for (qid, sq) in sqs {
            self.install_sq(qid, sq);
        }
        // The bit was clear and was set while the queue was between two engines: neither has
        // signalled it.
        if self.master && masterings != self.masterings {
            self.signal_unread(cqid);
        }
    }
}
