//! Counters of the workers' io_uring rings, for `vnvme stats`.

use control::api::RingCounters;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::IoStats;

/// Name of a thread, and the counters of its io_uring.
type RingEntry = (String, Arc<IoStats>);

/// Registry in which each worker enters the counters of its io_uring.
#[derive(Clone, Default)]
pub struct RingRegistry {
    rings: Arc<Mutex<Vec<RingEntry>>>,
}

impl RingRegistry {
    /// Registers the counters of the calling thread's io_uring under the name of the thread.
    pub fn enter(&self, stats: Arc<IoStats>) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        // If a thread panicked while it held the lock, the list is still consistent.
        let mut rings = self.rings.lock().unpoisoned();
        rings.push((name, stats));
    }

    /// Returns the current counters of all io_urings that have been used.
    pub fn counters(&self) -> Vec<RingCounters> {
        let rings = self.rings.lock().unpoisoned();
        let all = rings.iter().map(|(name, stats)| {
            let counters = stats.counters();
            RingCounters {
                thread: name.clone(),
                requests: counters.requests,
                operations: counters.operations,
                batches: counters.batches,
                system_calls: counters.system_calls,
                fixed: counters.fixed,
                bounced: counters.bounced,
            }
        });
        all.filter(|ring| ring.requests > 0).collect()
    }
}
