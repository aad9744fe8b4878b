//! Borrowed host memory of a transfer that completes immediately.

use crate::{Access, DmaError, DmaMap, Segment, SegmentList, racy};

/// Memory of a transfer that completes within a call, borrowed from a [`SegmentList`] or a
/// [`GuestSlice`], which keeps it mapped.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    segments: &'a [Segment],
    bytes: u64,
    writable: bool,
}

impl View<'_> {
    /// Returns the total length of the segments in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether all memory of the view may be written.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns the segments. Their pointers are valid as long as the view exists.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        self.segments
    }

    /// Calls `each` with every segment, in order, and its counterpart in the contiguous memory at
    /// `start`.
    #[inline(always)]
    pub(crate) fn beside(&self, start: *mut u8, mut each: impl FnMut(*mut u8, &Segment)) {
        let mut at = start;
        for segment in self.segments {
            each(at, segment);
            at = at.wrapping_add(segment.len());
        }
    }

    /// Fills the memory of the view with `byte`, if it may be written.
    pub fn fill(&self, byte: u8) {
        if !self.writable {
            return;
        }
        for segment in self.segments {
            // SAFETY: the owner that the view borrows keeps the segments mapped, and they are
            // writable.
            unsafe { racy::fill(segment.as_ptr(), byte, segment.len()) };
        }
    }
}

impl SegmentList {
    /// Returns the list's memory, for a transfer that completes within a call.
    #[inline]
    pub fn view(&self) -> View<'_> {
        View {
            segments: self.segments(),
            bytes: self.len_bytes(),
            writable: self.is_writable(),
        }
    }
}

/// A contiguous range of guest memory, borrowed from its map: for the most frequent transfer, one
/// page.
#[derive(Clone, Copy, Debug)]
pub struct GuestSlice<'a> {
    segment: Segment,
    writable: bool,
    map: std::marker::PhantomData<&'a DmaMap>,
}

impl GuestSlice<'_> {
    /// Returns the memory of this piece of guest memory, for a transfer that completes within a
    /// call.
    #[inline(always)]
    pub fn view(&self) -> View<'_> {
        View {
            segments: std::slice::from_ref(&self.segment),
            bytes: self.segment.len() as u64,
            writable: self.writable,
        }
    }
}

impl DmaMap {
    /// Returns the host memory of `len` bytes at `iova`; `None` when it does not lie in one window.
    ///
    /// # Errors
    /// [`DmaError`] when the range cannot be accessed.
    #[inline(always)]
    pub fn piece(
        &self,
        iova: u64,
        len: u64,
        access: Access,
    ) -> Result<Option<GuestSlice<'_>>, DmaError> {
        let run = self.translate(iova, access)?;
        if run.len < len {
            return Ok(None);
        }
        Ok(Some(GuestSlice {
            // Not longer than the run, which lies in this process's address space.
            segment: Segment::new(run.ptr, len as usize),
            writable: access == Access::Write,
            map: std::marker::PhantomData,
        }))
    }
}
