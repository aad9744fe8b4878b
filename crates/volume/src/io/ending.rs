//! Time limit for a volume that may hang when its worker ends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Watch of one queue over the time that the worker's end waits for it.
#[derive(Debug)]
pub struct Ending {
    begun: Rc<Cell<bool>>,
    limit: Duration,
    given_up: Rc<RefCell<Vec<String>>>,
    /// Since then the end has begun and nothing was answered.
    quiet_since: Option<Instant>,
}

impl Ending {
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

    /// The worker ends.
    #[inline]
    pub fn has_begun(&self) -> bool {
        self.begun.get()
    }

    /// Returns whether the file's time is over. `answered`: it has answered since the last call,
    /// and its time starts anew. Called while the end has begun.
    pub fn is_over(&mut self, answered: bool) -> bool {
        let now = Instant::now();
        if answered {
            self.quiet_since = None;
        }
        let since = *self.quiet_since.get_or_insert(now);
        now.saturating_duration_since(since) >= self.limit
    }

    /// This volume is given up.
    pub fn give_up(&self, volume: &str) {
        let mut given_up = self.given_up.borrow_mut();
        if !given_up.iter().any(|known| known == volume) {
            given_up.push(volume.to_owned());
        }
    }
}
