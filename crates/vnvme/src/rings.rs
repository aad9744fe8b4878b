//! Counters of the workers' io_uring rings, for `vnvme stats`.

use control::api::RingCounters;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::IoStats;

/// Name of a thread, and the counters of its ring.
type RingEntry = (String, Arc<IoStats>);

/// Registry in which workers register their rings.
#[derive(Clone, Default)]
pub struct RingRegistry {
    rings: Arc<Mutex<Vec<RingEntry>>>,
}

impl RingRegistry {
    /// Registers the ring of the calling thread under the thread's name.
    pub fn enter(&self, stats: Arc<IoStats>) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        // If a thread panicked while it held the lock, the list is still consistent.
        let mut rings = self.rings.lock().unpoisoned();
        rings.push((name, stats));
    }

    /// Returns the current counters of all rings that were used.
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
