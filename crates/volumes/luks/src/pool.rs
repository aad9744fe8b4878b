//! Private buffers of one queue, reused and bounded.

use dma::{Buffer, SegmentList};

/// Smallest buffer in bytes.
const SMALLEST: usize = 4096;
/// Sizes of buffers: powers of two from the smallest to the largest.
const CLASSES: usize = 7;
/// Largest buffer in bytes, and so the largest part of a request that is encrypted at once.
pub(crate) const LARGEST: usize = SMALLEST << (CLASSES - 1);
/// Bytes of all buffers of a queue.
pub(crate) const BUDGET: usize = 16 << 20;

/// Buffers for the requests of one queue. Free buffers are used again and never filled anew: they
/// hold nothing but data of the same volume.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: [Vec<SegmentList>; CLASSES],
    /// Bytes of all buffers, free or in use.
    allocated: usize,
}

/// Returns the class of the smallest buffer that has `len` bytes.
fn class(len: usize) -> usize {
    let size = len.max(SMALLEST).next_power_of_two();
    (size / SMALLEST).trailing_zeros() as usize
}

const fn size(class: usize) -> usize {
    SMALLEST << class
}

impl Pool {
    /// Returns a buffer of at least `len` bytes, at most [`LARGEST`]; `None` while the buffers in
    /// use leave no room for it.
    pub(crate) fn take(&mut self, len: usize) -> Option<SegmentList> {
        let class = class(len);
        if let Some(buffer) = self.free.get_mut(class)?.pop() {
            return Some(buffer);
        }
        for (other, free) in self.free.iter_mut().enumerate() {
            while self.allocated + size(class) > BUDGET && free.pop().is_some() {
                self.allocated -= size(other);
            }
        }
        if self.allocated + size(class) > BUDGET {
            return None;
        }
        self.allocated += size(class);
        Some(SegmentList::owned(Buffer::new(size(class))))
    }

    /// Returns a buffer of [`Pool::take`] to the free ones.
    pub(crate) fn put(&mut self, buffer: SegmentList) {
        let class = class(buffer.len_bytes() as usize);
        if let Some(free) = self.free.get_mut(class) {
            free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_within_budget() {
        let mut pool = Pool::default();
        let small = pool.take(512).unwrap();
        assert_eq!(small.len_bytes(), 4096);
        pool.put(small);
        assert!(pool.take(4096).is_some() && pool.allocated == 4096);
        let count = (BUDGET - 4096) / LARGEST;
        let all: Vec<_> = (0..count).map(|_| pool.take(LARGEST).unwrap()).collect();
        assert!(pool.take(LARGEST).is_none(), "the budget is spent");
        all.into_iter().for_each(|buffer| pool.put(buffer));
        // Free buffers of another size make room.
        assert!(pool.take(LARGEST / 2).is_some() && pool.allocated <= BUDGET);
        for len in [1, 4096, 4097, 8192, LARGEST - 1, LARGEST] {
            assert!(size(class(len)) >= len && (class(len) == 0 || size(class(len) - 1) < len));
        }
    }
}
