//! Memory of disks that have gone: the allocator keeps it in pieces, unless it is asked not to.

use std::sync::atomic::{AtomicU32, Ordering};

/// So many disks are worth it: releasing memory keeps workers waiting that allocate meanwhile.
const MANY: u32 = 32;

/// Disks that have gone since memory was released.
#[derive(Default)]
pub struct Heap {
    gone: AtomicU32,
    /// Those that had gone when it was looked last.
    seen: AtomicU32,
}

impl Heap {
    /// A disk has gone.
    pub fn freed(&self) {
        self.gone.fetch_add(1, Ordering::Relaxed);
    }

    /// To be called from time to time by one thread: releases memory when many disks have gone,
    /// and none has since the last call.
    pub fn look(&self) {
        self.look_with(|| {
            dma::heap::release();
        });
    }

    fn look_with(&self, release: impl FnOnce()) {
        let gone = self.gone.load(Ordering::Relaxed);
        if gone < MANY || self.seen.swap(gone, Ordering::Relaxed) != gone {
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
    fn memory_is_released_once_when_many_have_gone_and_no_more_go() {
        let heap = Heap::default();
        let look = || {
            let mut released = false;
            heap.look_with(|| released = true);
            released
        };
        assert!(!look() && !look());
        (1..MANY).for_each(|_| heap.freed());
        assert!(!look() && !look(), "not many");
        heap.freed();
        assert!(!look(), "more may go");
        heap.freed();
        assert!(!look(), "one did");
        assert!(look());
        assert!(!look() && !look(), "once");
    }
}
