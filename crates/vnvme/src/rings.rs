//! Counters of the workers' rings, for `vnvme stats`.

use output::{OutputError, outln};
use serde::{Deserialize, Serialize};
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

/// What passed through one thread's io_uring, as of its last system call.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RingCounters {
    /// The thread that owns it.
    pub thread: String,
    /// Requests to files and block devices.
    pub requests: u64,
    /// Operations that they took.
    pub operations: u64,
    /// Times that operations were handed to the kernel.
    pub batches: u64,
    /// System calls: one for each batch, and those that fetch completions while there is nothing to
    /// submit.
    pub system_calls: u64,
    /// Operations on memory that the kernel has pinned.
    pub fixed: u64,
    /// Requests copied through a bounce buffer.
    pub bounced: u64,
}

impl RingCounters {
    /// Prints a line for people.
    pub fn print(&self) -> Result<(), OutputError> {
        outln!(
            "{} io_uring: requests {}   batches {} ({:.1} operations each)   system calls {} ({:.2} for each batch)   \
             on pinned memory {}   bounced {}",
            self.thread,
            self.requests,
            self.batches,
            self.operations as f64 / self.batches.max(1) as f64,
            self.system_calls,
            self.system_calls as f64 / self.batches.max(1) as f64,
            self.fixed,
            self.bounced,
        );
        Ok(())
    }
}
