//! Where a worker is.

use super::Activity;
use super::kernel::KernelView;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Where a worker is. It alone writes this, by plain stores; others look.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Pulse {
    activity: AtomicU32,
    beats: AtomicU64,
    thread: OnceLock<KernelView>,
}

impl Pulse {
    /// What it is doing now.
    pub fn activity(&self) -> Activity {
        Activity::of(self.activity.load(Ordering::Relaxed))
    }

    /// Where its thread is in the kernel, for people; `None` before it has begun.
    pub fn in_kernel(&self) -> Option<String> {
        self.thread.get().map(KernelView::describe)
    }

    /// Processor time of its thread, to some hundredths of a second; none before it has begun, and
    /// where the kernel does not say.
    pub fn cpu_time(&self) -> Option<Duration> {
        self.thread.get().and_then(KernelView::cpu_time)
    }

    /// The calling thread is the worker's.
    pub(crate) fn attach(&self) {
        self.thread.get_or_init(KernelView::of_calling_thread);
    }

    /// From here on it does this. Relaxed: a look that comes too early sees what was before.
    #[inline(always)]
    pub(crate) fn enter(&self, activity: Activity) {
        self.activity.store(activity.code(), Ordering::Relaxed);
    }

    /// It gets on.
    #[inline]
    pub(crate) fn beat(&self) {
        let beats = self.beats().wrapping_add(1);
        self.beats.store(beats, Ordering::Relaxed);
    }

    /// How often it got on.
    #[inline]
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }
}
