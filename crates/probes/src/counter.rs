//! A number that one thread counts up and any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer: a plain load and store, no read-modify-write. After 2^64 it begins
/// again at 0.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owner calls this: no other store can get lost.
    #[inline]
    pub fn add(&self, n: u64) {
        let now = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(now, Ordering::Relaxed);
    }

    /// Sets it, where it is no count but a state. Only the owner calls this.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
