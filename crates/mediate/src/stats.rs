//! What a virtual queue pair did, and how long it took: written by its worker with
//! plain stores, read by anyone.

use probes::Histogram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters and times of one virtual queue pair. Times are in cycles of the processor's counter
/// ([`probes::cycles_per_second`] tells how long one is).
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Cycles to translate a command: from the copied submission entry to the entry in the physical
    /// queue, checks included; the doorbell, which is rung once for a batch, is not.
    pub translate: Histogram,
    /// Cycles to complete one: from the moment that its entry is seen in the physical completion
    /// queue to the return of the caller, who posts it to the guest. Of a batch, its share. Looks
    /// at an empty queue are not counted, nor is what happens to a thread while it looks.
    pub complete: Histogram,
    /// Cycles to send an interrupt to the guest. Recorded by the sender.
    pub interrupt: Histogram,
    commands: AtomicU64,
    refused: AtomicU64,
    split: AtomicU64,
    bounced: AtomicU64,
    bounced_bytes: AtomicU64,
    off: AtomicBool,
}

/// A plain load and store: there is one writer.
#[inline]
fn add(to: &AtomicU64, value: u64) {
    let sum = to.load(Ordering::Relaxed).wrapping_add(value);
    to.store(sum, Ordering::Relaxed);
}

impl QueueStats {
    /// Nothing was done yet.
    pub fn new(measure: bool) -> Self {
        Self {
            off: AtomicBool::new(!measure),
            ..Self::default()
        }
    }

    /// Switches the measurement of cycles on or off, from any thread. Counters go on.
    pub fn set_measuring(&self, on: bool) {
        self.off.store(!on, Ordering::Relaxed);
    }

    /// The counter of cycles, if it is measured.
    #[inline]
    pub fn start(&self) -> Option<u64> {
        self.is_measuring().then(probes::cycles)
    }

    /// Whether cycles are measured.
    #[inline]
    pub fn is_measuring(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    /// Cycles since `start`.
    #[inline]
    pub fn since(start: u64) -> u64 {
        probes::cycles().wrapping_sub(start)
    }

    /// Commands that went to the device.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Commands that were refused before they reached it.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Commands that were split.
    pub fn split(&self) -> u64 {
        self.split.load(Ordering::Relaxed)
    }

    /// Commands whose data was copied, because the device cannot reach the guest's
    /// memory as the command names it.
    pub fn bounced(&self) -> u64 {
        self.bounced.load(Ordering::Relaxed)
    }

    /// Bytes of these.
    pub fn bounced_bytes(&self) -> u64 {
        self.bounced_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn command(&self) {
        add(&self.commands, 1);
    }

    pub(crate) fn refuse(&self) {
        add(&self.refused, 1);
    }

    pub(crate) fn one_split(&self) {
        add(&self.split, 1);
    }

    pub(crate) fn bounce(&self, bytes: u64) {
        add(&self.bounced, 1);
        add(&self.bounced_bytes, bytes);
    }
}
