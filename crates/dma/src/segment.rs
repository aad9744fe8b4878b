//! Pieces of host memory.

/// A contiguous piece of host memory, with the layout of `struct iovec`, so that an array of them
/// can be passed to the kernel. It borrows nothing: the [`crate::SegmentList`] (or
/// [`crate::Memory`]) that it came from keeps the memory.
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

    /// Returns the first byte's address. The guest may write there at any time: no reference may be
    /// created.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero (never so inside a list).
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pointer after the last byte.
    #[inline]
    pub(crate) fn end(&self) -> *mut u8 {
        self.ptr.wrapping_add(self.len)
    }

    #[inline]
    pub(crate) fn grow(&mut self, by: usize) {
        self.len += by;
    }
}
