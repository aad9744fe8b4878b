//! Pieces of host memory.

/// A contiguous range of host memory with the layout of `struct iovec`, so that an array of
/// segments can be passed to the kernel. A segment borrows nothing: the [`crate::SegmentList`] or
/// [`crate::Memory`] that it was taken from keeps the memory mapped.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    ptr: *mut u8,
    len: usize,
}

const _: () = {
    assert!(size_of::<Segment>() == size_of::<libc::iovec>());
    assert!(align_of::<Segment>() == align_of::<libc::iovec>());
    assert!(std::mem::offset_of!(Segment, ptr) == std::mem::offset_of!(libc::iovec, iov_base));
    assert!(std::mem::offset_of!(Segment, len) == std::mem::offset_of!(libc::iovec, iov_len));
};

impl Segment {
    #[inline]
    pub(crate) fn new(ptr: *mut u8, len: usize) -> Segment {
        Segment { ptr, len }
    }

    /// Returns the address of the first byte. The guest may write there at any time, so no
    /// reference may be created.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Returns the length of the segment in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length of the segment is zero, which never happens inside a list.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the pointer to the byte after the segment.
    #[inline]
    pub(crate) fn end(&self) -> *mut u8 {
        self.ptr.wrapping_add(self.len)
    }

    #[inline]
    pub(crate) fn grow(&mut self, by: usize) {
        self.len += by;
    }
}
