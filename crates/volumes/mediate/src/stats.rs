//! Counters and times of a virtual queue pair: written by its worker with plain stores, read by any
//! thread.

use probes::Histogram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters and times of one virtual queue pair. Times are in cycles of the processor's counter
/// (see [`probes::cycles_per_second`] for its rate).
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Cycles to translate a command, checks included: from the copied submission entry to the
    /// entry in the physical queue. The doorbell, which is rung once for a batch, is excluded.
    pub translate: Histogram,
    /// Cycles to complete a command: from the moment its entry is found in the physical completion
    /// queue until the caller has posted it to the guest. A command of a batch is charged its
    /// share. Polls of an empty queue are excluded, and so are interruptions of the thread during
    /// them.
    pub complete: Histogram,
    /// Histogram of the cycles spent on sending an interrupt to the guest.
    pub interrupt: Histogram,
    commands: AtomicU64,
    refused: AtomicU64,
    split: AtomicU64,
    bounced: AtomicU64,
    bounced_bytes: AtomicU64,
    off: AtomicBool,
}

/// Adds by a plain load and store, because there is only one writer.
#[inline]
fn add(to: &AtomicU64, value: u64) {
    let sum = to.load(Ordering::Relaxed).wrapping_add(value);
    to.store(sum, Ordering::Relaxed);
}

impl QueueStats {
    /// Creates counters that are zero; `measure` is whether cycles are measured.
    pub fn new(measure: bool) -> Self {
        Self {
            off: AtomicBool::new(!measure),
            ..Self::default()
        }
    }

    /// Switches the measurement of cycles on or off, from any thread. Counters continue.
    pub fn set_measuring(&self, on: bool) {
        self.off.store(!on, Ordering::Relaxed);
    }

    /// Returns the value of the cycle counter, if cycles are measured.
    #[inline]
    pub fn start(&self) -> Option<u64> {
        self.is_measuring().then(probes::cycles)
    }

    /// Returns whether processor cycles are measured.
    #[inline]
    pub fn is_measuring(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    /// Returns the number of cycles since the counter's value was `start`.
    #[inline]
    pub fn since(start: u64) -> u64 {
        probes::cycles().wrapping_sub(start)
    }

    /// Returns the number of commands sent to the device.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Returns the number of commands refused before they reached the device.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the number of commands that were split into several.
    pub fn split(&self) -> u64 {
        self.split.load(Ordering::Relaxed)
    }

    /// Returns the number of commands with copied data, because the device cannot access the
    /// guest's memory directly.
    pub fn bounced(&self) -> u64 {
        self.bounced.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that were copied through bounce buffers.
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
