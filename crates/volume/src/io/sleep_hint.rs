//! Requests for which a worker had better sleep than poll.

use std::cell::Cell;
use std::rc::Rc;

/// Number of a queue's requests that threads of this host process for far longer than a wake-up
/// takes. A worker that polls for them takes its processor from them, where it shares one with
/// them: it sleeps instead, at once.
#[derive(Debug)]
pub struct SleepHint {
    total: Rc<Cell<usize>>,
    own: usize,
}

impl SleepHint {
    pub(super) fn new(total: Rc<Cell<usize>>) -> Self {
        Self { total, own: 0 }
    }

    /// Sets the number of such requests of the queue.
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
