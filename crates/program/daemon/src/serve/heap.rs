//! Release of the memory of removed disks, which the allocator otherwise keeps.

use std::sync::atomic::{AtomicU32, Ordering};

/// Number of removed disks after which free memory is returned to the system, which delays workers.
const RELEASE_AFTER: u32 = 32;

/// Number of disks removed since free memory was last returned to the system.
#[derive(Default)]
pub struct Heap {
    gone: AtomicU32,
    /// Number of removed disks when memory was last returned.
    seen: AtomicU32,
}

impl Heap {
    /// Counts a removed disk, which has freed its memory.
    pub fn freed(&self) {
        self.gone.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases memory when many disks have been removed, and none since the last call. One thread
    /// calls it from time to time.
    pub fn look(&self) {
        self.look_with(|| {
            dma::heap::release();
        });
    }

    fn look_with(&self, release: impl FnOnce()) {
        let gone = self.gone.load(Ordering::Relaxed);
        if gone < RELEASE_AFTER || self.seen.swap(gone, Ordering::Relaxed) != gone {
            return;
        }
        self.gone.fetch_sub(gone, Ordering::Relaxed);
        self.seen.store(0, Ordering::Relaxed);
        release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_after_many_frees() {
        let heap = Heap::default();
        let look = || {
            let mut released = false;
            heap.look_with(|| released = true);
            released
        };
        assert!(!look() && !look());
        (1..RELEASE_AFTER).for_each(|_| heap.freed());
        assert!(!look() && !look(), "not many");
        heap.freed();
        assert!(!look(), "more may go");
        heap.freed();
        assert!(!look(), "one did");
        assert!(look());
        assert!(!look() && !look(), "once");
    }
}
