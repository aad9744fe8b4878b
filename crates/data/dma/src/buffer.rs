//! Host memory of this process, aligned for direct I/O.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment in bytes of every [`Buffer`], sufficient for direct I/O to any disk.
const ALIGN: usize = 4096;

/// Page-aligned, zeroed host memory, for bouncing data and for controller data structures.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
}

impl Buffer {
    /// Allocates `len` zero bytes, aligned to 4096. The length must have been bounded by
    /// the caller; like every allocation of the standard library this one aborts the
    /// process when there is no memory.
    pub fn new(len: usize) -> Buffer {
        let Some(layout) = layout(len) else {
            return Buffer {
                ptr: NonNull::dangling(),
                len: 0,
            };
        };
        // SAFETY: `layout` has a non-zero size.
        let raw = unsafe { alloc_zeroed(layout) };
        match NonNull::new(raw) {
            Some(ptr) => Buffer { ptr, len },
            None => handle_alloc_error(layout),
        }
    }

    /// Allocates a buffer that holds a copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::new(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Returns the raw memory and its length; not a reference, so that a segment list can write
    /// through it.
    pub(crate) fn raw(&self) -> (*mut u8, usize) {
        (self.ptr.as_ptr(), self.len)
    }
}

/// Returns the layout of a buffer of `len` bytes; `None` for a length of zero, and for one that is
/// impossible to allocate.
fn layout(len: usize) -> Option<Layout> {
    if len == 0 {
        return None;
    }
    Layout::from_size_align(len, ALIGN).ok()
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(layout) = layout(self.len) {
            // SAFETY: allocated in `new` with the same layout.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes and owned by `self`; segment lists
        // that write through raw pointers give out no shared reference to it.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

// SAFETY: a buffer owns its memory alone.
unsafe impl Send for Buffer {}
// SAFETY: through `&Buffer` it is only read.
unsafe impl Sync for Buffer {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_zeroed_and_aligned() {
        let mut buffer = Buffer::new(5000);
        assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
        assert!(buffer.iter().all(|&b| b == 0));
        buffer[4999] = 7;
        assert_eq!(buffer[4999], 7);
        assert!(Buffer::new(0).is_empty());
        assert_eq!(&*Buffer::from_slice(b"abc"), b"abc");
    }
}
