//! Requests that a worker waits for asleep.

use std::cell::Cell;
use std::rc::Rc;

/// Tells the worker how many of a queue's requests threads of this host work on for far longer
/// than a wake-up takes. A worker that polls for them takes its processor from them, where it
/// shares one with them: it sleeps instead, at once.
#[derive(Debug)]
pub struct Waits {
    all: Rc<Cell<usize>>,
    own: usize,
}

impl Waits {
    pub(super) fn new(all: Rc<Cell<usize>>) -> Self {
        Self { all, own: 0 }
    }

    /// So many requests of the queue are such.
    #[inline]
    pub fn set(&mut self, requests: usize) {
        let others = self.all.get() - self.own;
        self.own = requests;
        self.all.set(others + requests);
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.set(0);
    }
}
