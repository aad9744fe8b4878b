//! Bounce buffers: memory that every device can access, kept for reuse.

use dma::Buffer;

/// Size of the smallest bounce buffer. Sizes are powers of two; requests longer than the largest
/// buffer are processed in pieces.
const SMALLEST: usize = 4 << 10;
/// Size of a buffer once the pool's limit is reached; at least the size of any block.
const MIN_BUFFER_LEN: usize = 64 << 10;
const MAX_BUFFER_LEN: usize = 1 << 20;
const CLASSES: usize = (MAX_BUFFER_LEN / SMALLEST).ilog2() as usize + 1;

/// Pool of free bounce buffers, with the number of bytes in use.
#[derive(Debug)]
pub(super) struct BouncePool {
    free: [Vec<Buffer>; CLASSES],
    /// Number of bytes in buffers that requests are using.
    out: usize,
    /// Number of bytes in free buffers that the pool keeps.
    kept: usize,
    limit: usize,
}

impl BouncePool {
    /// Creates a pool that keeps about `limit` bytes in use and in reserve.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            free: Default::default(),
            out: 0,
            kept: 0,
            limit,
        }
    }

    /// Returns a buffer for `len` bytes, or for a part of them.
    pub(super) fn take(&mut self, len: u64) -> Buffer {
        let wanted = usize::try_from(len)
            .unwrap_or(MAX_BUFFER_LEN)
            .clamp(SMALLEST, MAX_BUFFER_LEN);
        let mut size = wanted.checked_next_power_of_two().unwrap_or(MAX_BUFFER_LEN);
        if self.out.saturating_add(size) > self.limit {
            size = size.min(MIN_BUFFER_LEN);
        }
        let kept = self.free.get_mut(class(size)).and_then(Vec::pop);
        let buffer = match kept {
            Some(buffer) => {
                self.kept = self.kept.saturating_sub(size);
                buffer
            }
            None => Buffer::new(size),
        };
        self.out = self.out.saturating_add(size);
        buffer
    }

    /// Returns a buffer to the pool.
    pub(super) fn put(&mut self, buffer: Buffer) {
        let size = buffer.len();
        self.out = self.out.saturating_sub(size);
        if self.out.saturating_add(self.kept).saturating_add(size) > self.limit {
            return;
        }
        if let Some(free) = self.free.get_mut(class(size)) {
            free.push(buffer);
            self.kept = self.kept.saturating_add(size);
        }
    }
}

/// Returns the index of the list that keeps free buffers of `size` bytes.
fn class(size: usize) -> usize {
    (size / SMALLEST).checked_ilog2().unwrap_or(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounce_buffers_fit_and_are_reused() {
        let mut pool = BouncePool::new(64 << 20);
        for (wanted, size) in [
            (1, SMALLEST),
            (4096, 4096),
            (4097, 8192),
            (MAX_BUFFER_LEN as u64, MAX_BUFFER_LEN),
            (u64::MAX, MAX_BUFFER_LEN),
        ] {
            let buffer = pool.take(wanted);
            assert_eq!(buffer.len(), size);
            let address = buffer.as_ptr();
            pool.put(buffer);
            let again = pool.take(wanted);
            assert_eq!(again.as_ptr(), address);
            pool.put(again);
        }
        assert_eq!(pool.out, 0);
    }

    #[test]
    fn bounce_pieces_shrink_at_limit() {
        let limit = 3 * MAX_BUFFER_LEN;
        let mut pool = BouncePool::new(limit);
        let buffers: Vec<Buffer> = (0..10).map(|_| pool.take(MAX_BUFFER_LEN as u64)).collect();
        let sizes: Vec<usize> = buffers.iter().map(|buffer| buffer.len()).collect();
        assert_eq!(sizes[..3], [MAX_BUFFER_LEN; 3]);
        assert_eq!(sizes[3..], [MIN_BUFFER_LEN; 7]);
        buffers.into_iter().for_each(|buffer| pool.put(buffer));
        assert_eq!(pool.out, 0);
        assert!(pool.kept <= limit, "{}", pool.kept);
        let kept: usize = pool.free.iter().flatten().map(|buffer| buffer.len()).sum();
        assert_eq!(pool.kept, kept);
    }
}
