//! Counters of the workers' rings, for `vnvme stats`.

use control::api::RingCounters;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::IoStats;

/// A thread's name and its ring.
type RingEntry = (String, Arc<IoStats>);

/// Where workers enter their rings.
#[derive(Clone, Default)]
pub struct RingRegistry {
    rings: Arc<Mutex<Vec<RingEntry>>>,
}

impl RingRegistry {
    /// Enters the ring of the calling thread under the thread's name.
    pub fn enter(&self, stats: Arc<IoStats>) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        // A thread that panicked while it held the lock left a whole list: there is no half an
        // entry.
        let mut rings = self.rings.lock().unpoisoned();
        rings.push((name, stats));
    }

    /// The counters as they are now, of rings that were used.
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
