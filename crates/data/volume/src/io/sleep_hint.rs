//! Hint that a worker should sleep rather than poll.

use std::cell::Cell;
use std::rc::Rc;

/// Number of a queue's requests that threads of this machine execute, and that take far longer than
/// a wake-up. If the worker polled for them on a shared processor, it would take the processor from
/// these threads. The worker sleeps at once instead.
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
