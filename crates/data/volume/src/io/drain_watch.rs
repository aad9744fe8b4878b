//! Time limit for volumes that may hang when their worker ends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time limit for the outstanding requests of one queue, which runs from the end of its worker.
#[derive(Debug)]
pub struct DrainWatch {
    begun: Rc<Cell<bool>>,
    limit: Duration,
    given_up: Rc<RefCell<Vec<String>>>,
    /// Time since which the ending worker has received no completion from the file.
    quiet_since: Option<Instant>,
}

impl DrainWatch {
    pub(super) fn new(
        begun: Rc<Cell<bool>>,
        limit: Duration,
        given_up: Rc<RefCell<Vec<String>>>,
    ) -> Self {
        Self {
            begun,
            limit,
            given_up,
            quiet_since: None,
        }
    }

    /// Returns whether the worker of the queue is ending.
    #[inline]
    pub fn has_begun(&self) -> bool {
        self.begun.get()
    }

    /// Returns whether the time limit has passed. `answered`: whether the file has answered since
    /// the last call, which restarts the time. To be called only while the worker is ending.
    pub fn is_over(&mut self, answered: bool) -> bool {
        let now = Instant::now();
        if answered {
            self.quiet_since = None;
        }
        let since = *self.quiet_since.get_or_insert(now);
        now.saturating_duration_since(since) >= self.limit
    }

    /// Records the name of a volume for which the ending worker no longer waits.
    pub fn give_up(&self, volume: &str) {
        let mut given_up = self.given_up.borrow_mut();
        if !given_up.iter().any(|known| known == volume) {
            given_up.push(volume.to_owned());
        }
    }
}
