//! A worker's published activity and progress.

use super::Activity;
use super::kernel::KernelView;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Activity and progress of a worker. Only the worker writes them, by plain stores; other threads
/// read.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Pulse {
    activity: AtomicU32,
    beats: AtomicU64,
    thread: OnceLock<KernelView>,
}

impl Pulse {
    /// Returns what the worker is doing now.
    pub fn activity(&self) -> Activity {
        Activity::of(self.activity.load(Ordering::Relaxed))
    }

    /// Describes the state of the worker's thread in the kernel; `None` before it has begun.
    pub fn in_kernel(&self) -> Option<String> {
        self.thread.get().map(KernelView::describe)
    }

    /// Returns the processor time of the worker's thread, to some hundredths of a second; `None`
    /// before it has begun, and where the kernel does not report it.
    pub fn cpu_time(&self) -> Option<Duration> {
        self.thread.get().and_then(KernelView::cpu_time)
    }

    /// Attaches the pulse to the calling thread, which must be the worker's thread.
    pub(crate) fn attach(&self) {
        self.thread.get_or_init(KernelView::of_calling_thread);
    }

    /// Publishes what the worker is doing now. The store is relaxed, so other threads may see it
    /// late.
    #[inline(always)]
    pub(crate) fn enter(&self, activity: Activity) {
        self.activity.store(activity.code(), Ordering::Relaxed);
    }

    /// Counts a step of progress, which the watchdog compares.
    #[inline]
    pub(crate) fn beat(&self) {
        let beats = self.beats().wrapping_add(1);
        self.beats.store(beats, Ordering::Relaxed);
    }

    /// Returns the number of steps of progress so far.
    #[inline]
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }
}
