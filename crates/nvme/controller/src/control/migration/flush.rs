//! Flushes that the controller itself requests, on every worker.

use super::QueueOwner;
use super::link::Link;
use crate::control::Controller;
use crate::engine::Order;
use nvme::Status;

impl Controller {
    /// Returns the number of the next flush of every namespace.
    pub(in crate::control) fn next_flush(&self) -> u64 {
        self.migration.flushes + 1
    }

    /// Flushes every namespace in every engine. Each engine waits for its own outstanding commands,
    /// and flushes the data they wrote.
    pub(crate) fn flush_everywhere(&mut self) {
        self.migration.flushes += 1;
        let number = self.migration.flushes;
        self.order_all(|| Order::Flush(number));
    }

    /// Records that an engine has completed the controller's flushes up to this number.
    pub(in crate::control) fn flush_completed(
        &mut self,
        place: QueueOwner,
        number: u64,
        failed: Option<Status>,
    ) {
        let migration = &mut self.migration;
        let flushed = match place {
            QueueOwner::Own => &mut migration.flushed_own,
            QueueOwner::Remote(link) => match migration.links.get_mut(link) {
                Some(link) => &mut link.flushed,
                None => return,
            },
        };
        // A reset has already marked this flush as completed, before the report arrived.
        if number <= *flushed {
            return;
        }
        *flushed = number;
        if let Some(status) = failed {
            migration.flush_failed.get_or_insert(status);
        }
        let flushes = migration.flushes;
        let over = |link: &Link| !link.is_open() || link.flushed >= flushes;
        if migration.flushed_own == flushes && migration.links.iter().all(over) {
            let failed = migration.flush_failed.take();
            self.flushed();
            self.cache_flushed(failed);
            self.erasure_flushed(failed);
            self.hand_over_flushed(flushes, failed);
        }
    }
}
