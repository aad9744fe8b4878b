//! Records of one cache line each, in shared pages of this process.

use std::sync::atomic::AtomicU64;

use crate::{Memory, SharedPages, racy};

/// Size in bytes of a row, which is one cache line on most processors.
pub const ROW: usize = 64;

/// Row of shared memory: a cache line of eight atomic words.
pub type Row = [AtomicU64; 8];

/// An array of cache lines in a range of [`SharedPages`], which are kept mapped. Resolved once, so
/// that an access to a row costs a comparison and an addition.
#[derive(Clone, Debug)]
pub struct Rows {
    first: *mut u8,
    count: usize,
    _keep: Memory,
}

// SAFETY: the pointer is into a mapping that the rows keep; it is accessed by module `racy` only.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// Returns the `count` rows from byte `offset` on, a multiple of [`ROW`]. `None` when they
    /// exceed the pages.
    pub fn new(pages: &SharedPages, offset: usize, count: usize) -> Option<Rows> {
        let memory = pages.memory();
        let len = count.checked_mul(ROW)?;
        let first = memory.at(offset, len)?;
        let usable = memory.is_writable() && offset.is_multiple_of(ROW);
        usable.then(|| Rows {
            first,
            count,
            _keep: memory.clone(),
        })
    }

    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns row `i`; `None` when it is out of range.
    #[inline(always)]
    pub fn get(&self, i: usize) -> Option<&Row> {
        if i >= self.count {
            return None;
        }
        // SAFETY: in range, aligned (a mapping begins at a page, and the offset was checked), in a
        // writable mapping that `self` keeps.
        Some(unsafe { racy::row(self.first.wrapping_add(i * ROW)) })
    }
}
