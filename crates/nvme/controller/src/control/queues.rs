//! Locations of the host's queues in all engines. The next process needs them to find the queues
//! again.

use crate::engine::{SavedCq, SavedSq};
use std::collections::BTreeMap;

/// Locations of all queues of a controller, including the admin queue.
#[derive(Default)]
pub(crate) struct Queues {
    cqs: BTreeMap<u16, SavedCq>,
    sqs: BTreeMap<u16, SavedSq>,
}

impl Queues {
    /// Returns the completion queues.
    pub fn cqs(&self) -> impl Iterator<Item = &SavedCq> {
        self.cqs.values()
    }

    /// Returns the submission queues, including those being deleted.
    pub fn sqs(&self) -> impl Iterator<Item = &SavedSq> {
        self.sqs.values()
    }

    pub fn add_cq(&mut self, cq: SavedCq) {
        self.cqs.insert(cq.qid, cq);
    }

    pub fn add_sq(&mut self, sq: SavedSq) {
        self.sqs.insert(sq.qid, sq);
    }

    pub fn remove_cq(&mut self, qid: u16) {
        self.cqs.remove(&qid);
    }

    pub fn remove_sq(&mut self, qid: u16) {
        self.sqs.remove(&qid);
    }

    /// Removes all queues, in a controller-level reset.
    pub fn clear(&mut self) {
        *self = Queues::default();
    }
}
