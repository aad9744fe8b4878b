//! Requests for whose completion a worker had better sleep than poll.

use std::cell::Cell;
use std::rc::Rc;

/// Tells the worker how many of a queue's requests threads of this host work on for far longer
/// than a wake-up takes. A worker that polls for them takes its processor from them, where it
/// shares one with them: it sleeps instead, at once.
#[derive(Debug)]
pub struct SleepHint {
    total: Rc<Cell<usize>>,
    own: usize,
}

impl SleepHint {
    pub(super) fn new(total: Rc<Cell<usize>>) -> Self {
        Self { total, own: 0 }
    }

    /// So many requests of the queue are such.
    #[inline]
    pub fn set(&mut self, requests: usize) {
        let others = self.total.get() - self.own;
        self.own = requests;
        self.total.set(others + requests);
    }
}

impl Drop for SleepHint {
    fn drop(&mut self) {
        self.set(0);
    }
}
