//! Flushes on the controller's own account, on every worker.

use super::link::Link;
use crate::branch::Order;
use crate::controller::Controller;
use nvme::Status;

impl Controller {
    /// Flushes every namespace, in every engine: each waits for its own commands in flight, and flushes what they wrote.
    pub(crate) fn flush_everywhere(&mut self) {
        self.spread.flushes += 1;
        let number = self.spread.flushes;
        self.spread.tell_all(|| Order::Flush(number));
        self.engine.flush_all();
    }

    /// This engine's flushes are over.
    pub(in crate::controller) fn flushed_here(&mut self, failed: Option<Status>) {
        self.spread.flushed_here = self.spread.flushes;
        self.flush_answered(failed);
    }

    pub(super) fn flush_answered(&mut self, failed: Option<Status>) {
        let spread = &mut self.spread;
        if let Some(status) = failed {
            spread.flush_failed.get_or_insert(status);
        }
        let flushes = spread.flushes;
        let over = |link: &Link| !link.is_open() || link.flushed >= flushes;
        if spread.flushed_here == flushes && spread.links.iter().all(over) {
            let failed = spread.flush_failed.take();
            self.flushed();
            self.cache_flushed(failed);
        }
    }
}
