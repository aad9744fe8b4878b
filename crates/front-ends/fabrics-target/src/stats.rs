//! Counters of a subsystem.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counter of events that several threads add to, and that any thread reads.
#[derive(Debug, Default)]
pub struct EventCounter(AtomicU64);

impl EventCounter {
    /// Adds one event.
    pub(crate) fn count(&self) {
        self.add(1);
    }

    /// Adds `n` events, or a sum over events.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Returns the number of events so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! define_stats {
    ($($(#[$doc:meta])* $counter:ident,)*) => {
        /// Counters of a subsystem over all its hosts, which any thread may read.
        #[derive(Debug, Default)]
        pub struct TargetStats {
            $($(#[$doc])* pub $counter: EventCounter,)*
        }

        impl TargetStats {
            /// Names of the counters, in the order of [`TargetStats::values`].
            pub const NAMES: &'static [&'static str] = &[$(stringify!($counter)),*];

            /// Returns the name and the value of each counter.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($counter), self.$counter.get())),*].into_iter()
            }
        }
    };
}

define_stats! {
    /// Number of associations that were created.
    associations,
    /// Number of connections that became a queue.
    connections,
    /// Number of connections that were refused.
    refused,
}
