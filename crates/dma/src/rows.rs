//! Records of one cache line each, in memory of our own.

use std::sync::atomic::AtomicU64;

use crate::{Memory, SharedPages, racy};

/// Bytes of a row: a cache line of most processors.
pub const ROW: usize = 64;

/// One cache line as eight words.
pub type Row = [AtomicU64; 8];

/// An array of cache lines in a range of [`SharedPages`], which it keeps mapped: found once, so
/// that a look at one of them costs a comparison and an addition.
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
    /// The `count` rows from byte `offset` on, a multiple of [`ROW`]. `None` when they are not all
    /// there.
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

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Row `i`; none when it is outside.
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
