//! Migration of a completion queue, with the submission queues that use it, from one engine to
//! another.
//!
//! The engine stops fetching from the queues. When the completions of all fetched commands are
//! posted, it releases the queues with their whole state: heads, tails, phase, and the last seen
//! doorbell values, including EventIdx. The next engine looks up the queues' guest memory in its
//! own map, and continues exactly where the first one has stopped.

use super::invariant::broken;
use super::queue::{Cq, Sq};
use super::queues::Queues;
use super::{Event, Events};
use crate::irq::Irqs;

/// Completion queue and its submission queues, on the way from one worker's engine to another's.
pub(crate) struct MigratingQueues {
    pub cqid: u16,
    pub cq: Cq,
    pub sqs: Vec<(u16, Sq)>,
    /// Number of times that Bus Master Enable was set, as the releasing engine knew it
    /// ([`Queues::masterings`]).
    pub masterings: u64,
}

impl Queues {
    /// Begins to migrate a completion queue with its submission queues.
    /// [`Queues::release_migrating`] releases them as soon as none of their commands is
    /// outstanding. The migration is cancelled if the queue does not exist, or another one is
    /// migrating.
    pub(super) fn begin_migration(&mut self, cqid: u16, events: &mut Events) {
        if self.migrating.is_some() || !self.cq_exists(cqid) {
            events.push_back(Event::MigrationCancelled);
            return;
        }
        self.migrating = Some(cqid);
        let sqs = &self.sqs;
        self.polled
            .remove(|q| matches!(sqs.get(usize::from(q)), Some(Some(sq)) if sq.cqid == cqid));
    }

    /// Cancels the migration, unless the queue was already released.
    pub(super) fn cancel_migration(&mut self, events: &mut Events) {
        let Some(cqid) = self.migrating.take() else {
            return;
        };
        for qid in self.users_of(cqid) {
            if matches!(self.sqs.get(usize::from(qid)), Some(Some(sq)) if !sq.deleting) {
                self.start_fetching(qid);
            }
        }
        events.push_back(Event::MigrationCancelled);
    }

    /// Returns the IDs of the submission queues that use completion queue `cqid`.
    pub fn users_of(&self, cqid: u16) -> Vec<u16> {
        let user =
            |(qid, sq): (usize, &Option<Sq>)| (sq.as_ref()?.cqid == cqid).then_some(qid as u16);
        self.sqs.iter().enumerate().filter_map(user).collect()
    }

    /// Releases the migrating queue if none of its commands is outstanding.
    pub(super) fn release_migrating(
        &mut self,
        irqs: &mut Irqs,
        events: &mut Events,
    ) -> Option<Box<MigratingQueues>> {
        // Without Bus Master Enable no completion is posted and no queue migrates.
        let cqid = self.migrating.filter(|_| self.bus_master.is_enabled)?;
        let users = self.users_of(cqid);
        // A completion that waits for room counts as outstanding. A queue that is being deleted
        // exists as long as it has such a command.
        let busy = |sq: &Sq| sq.outstanding > 0;
        if users
            .iter()
            .any(|&q| matches!(self.sqs.get(usize::from(q)), Some(Some(sq)) if busy(sq)))
        {
            return None;
        }
        // A delayed interrupt is sent now, because the next engine does not know of it.
        self.signal_now(cqid, irqs, events);
        self.migrating = None;
        self.blocked.retain(|&q| q != cqid);
        let Some(mut cq) = self.cqs.get_mut(usize::from(cqid)).and_then(Option::take) else {
            broken(events, "a queue migrates that is gone");
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
        let masterings = self.bus_master.count;
        Some(Box::new(MigratingQueues {
            cqid,
            cq,
            sqs,
            masterings,
        }))
    }
}
