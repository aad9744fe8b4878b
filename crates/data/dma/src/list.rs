//! Host memory of a transfer, as a list of segments.

use std::rc::Rc;

use crate::map::Run;
use crate::{Access, Buffer, DmaMap, Memory, Pin, Segment, racy};

/// Owner of the memory of a list's segments.
#[derive(Clone)]
enum Hold {
    Nothing,
    Map(Pin),
    /// Memory that the list only keeps mapped until it is cleared.
    Memory(#[allow(dead_code)] Memory),
    /// Buffer that the segments of the list lie in.
    Buffer(Rc<Buffer>),
}

/// Segments of host memory for a transfer, in order. The list keeps its memory mapped by a [`Pin`]
/// (guest memory), a [`Memory`], or a [`Buffer`] of its own, so it may be held while the kernel or
/// another device works on it. Clearing keeps the capacity: a recycled list allocates nothing.
///
/// A list has the size of a pointer, because it is moved along with its request.
///
/// The guest may write to the memory at any time, so it is accessed only by copying.
#[derive(Default)]
pub struct SegmentList(Option<Box<Inner>>);

/// Contents of a segment list, allocated at the first segment.
pub(crate) struct Inner {
    segments: Vec<Segment>,
    bytes: u64,
    /// Whether all memory of the list may be written.
    writable: bool,
    /// Identity of the mapping that the last segment is in. Segments are merged only within one
    /// mapping.
    tail: usize,
    hold: Hold,
}

impl Inner {
    fn with_capacity(n: usize) -> Inner {
        Inner {
            segments: Vec::with_capacity(n),
            bytes: 0,
            writable: true,
            tail: 0,
            hold: Hold::Nothing,
        }
    }

    #[inline]
    fn clear(&mut self) {
        self.segments.clear();
        self.bytes = 0;
        self.writable = true;
        self.tail = 0;
        self.release();
    }

    /// Drops the owner of the segments' memory.
    #[inline]
    fn release(&mut self) {
        // Cases are checked in this order because nearly every list holds nothing or a pin.
        match std::mem::replace(&mut self.hold, Hold::Nothing) {
            Hold::Nothing => {}
            Hold::Map(pin) => drop(pin),
            other => drop(other),
        }
    }

    /// Appends `bytes` bytes of memory that the attached map has translated.
    #[inline]
    pub(crate) fn push(&mut self, run: Run, bytes: usize, access: Access) {
        let mapping = std::ptr::from_ref(run.slot).addr();
        self.writable &= access == Access::Write;
        self.bytes += bytes as u64;
        if let Some(segment) = self.segments.last_mut()
            && self.tail == mapping
            && segment.end() == run.ptr
        {
            segment.grow(bytes);
            return;
        }
        self.tail = mapping;
        self.segments.push(Segment::new(run.ptr, bytes));
    }
}

impl SegmentList {
    /// Creates an empty list.
    pub const fn new() -> SegmentList {
        SegmentList(None)
    }

    /// Creates an empty list with room for `n` segments.
    pub fn with_capacity(n: usize) -> SegmentList {
        SegmentList(Some(Box::new(Inner::with_capacity(n))))
    }

    #[inline]
    fn inner(&mut self) -> &mut Inner {
        self.0
            .get_or_insert_with(|| Box::new(Inner::with_capacity(1)))
    }

    /// Creates a list with host memory of its own, for bouncing data.
    pub fn owned(buffer: Buffer) -> SegmentList {
        let mut list = SegmentList::new();
        list.own(buffer);
        list
    }

    /// Replaces the list's contents by the memory of `buffer`, which the list then owns.
    pub fn own(&mut self, buffer: Buffer) {
        let inner = self.inner();
        inner.clear();
        let (ptr, len) = buffer.raw();
        if len > 0 {
            inner.segments.push(Segment::new(ptr, len));
            inner.bytes = len as u64;
        }
        inner.hold = Hold::Buffer(Rc::new(buffer));
    }

    /// Returns a list of `len` bytes of a memory from `offset` on; `None` when they are out of
    /// range.
    pub(crate) fn of_memory(memory: &Memory, offset: usize, len: usize) -> Option<SegmentList> {
        let segment = memory.segment(offset, len)?;
        let mut inner = Inner::with_capacity(1);
        inner.writable = memory.is_writable();
        if len > 0 {
            inner.segments.push(segment);
            inner.bytes = len as u64;
        }
        inner.hold = Hold::Memory(memory.clone());
        Some(SegmentList(Some(Box::new(inner))))
    }

    /// Drops the segments and releases their memory, after a command has completed; keeps the
    /// capacity.
    #[inline]
    pub fn clear(&mut self) {
        if let Some(inner) = &mut self.0 {
            inner.clear();
        }
    }

    /// Starts a new transfer: clears the list, and pins the guest memory of `map`.
    #[inline]
    pub fn begin(&mut self, map: &DmaMap) {
        let inner = self.inner();
        inner.clear();
        inner.hold = Hold::Map(map.pin());
    }

    /// Starts a new transfer on `map`, as [`SegmentList::begin`] does, with `len` contiguous bytes
    /// at `iova`: the most frequent case. Returns `false` when they are not contiguous, not
    /// accessible, or empty; the list is then empty and keeps nothing.
    #[inline(always)]
    pub fn begin_piece(&mut self, map: &DmaMap, iova: u64, len: u64, access: Access) -> bool {
        let inner = self.inner();
        inner.clear();
        match map.translate(iova, access) {
            // At least one byte, at most the run: no segment is empty.
            Ok(run) if len.wrapping_sub(1) < run.len => {
                // The previous owner is `Nothing`, so there is no value to be dropped.
                std::mem::forget(std::mem::replace(&mut inner.hold, Hold::Map(map.pin())));
                inner.bytes = len;
                inner.writable = access == Access::Write;
                inner.tail = std::ptr::from_ref(run.slot).addr();
                // Not longer than the run, which lies in this process's address space.
                inner.segments.push(Segment::new(run.ptr, len as usize));
                true
            }
            _ => false,
        }
    }

    /// Pins the memory of `map` for the list, so that segments can be appended; `None` when the
    /// list keeps other memory.
    #[inline]
    pub(crate) fn attach(&mut self, map: &DmaMap) -> Option<&mut Inner> {
        let inner = self.inner();
        match &inner.hold {
            Hold::Map(pin) if pin.map() == map.id() => {}
            Hold::Nothing => inner.hold = Hold::Map(map.pin()),
            _ => return None,
        }
        Some(inner)
    }

    /// Returns the total length of the segments in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.bytes)
    }

    /// Returns whether there are no segments.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.segments().is_empty()
    }

    /// Returns the number of segments.
    #[inline]
    pub fn count(&self) -> usize {
        self.segments().len()
    }

    /// Returns the segments. Their pointers are valid while the list is neither cleared nor
    /// dropped.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        match &self.0 {
            Some(inner) => &inner.segments,
            None => &[],
        }
    }

    /// Returns the segments in the kernel's format, [`SegmentList::count`] of them. Valid until the
    /// list changes.
    #[inline]
    pub fn as_iovecs(&self) -> *const libc::iovec {
        self.segments().as_ptr().cast()
    }

    /// Returns whether all memory may be written: it was built for [`Access::Write`], or is host
    /// memory.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.0.as_ref().is_none_or(|inner| inner.writable)
    }

    /// Returns whether every segment's address and length has none of the bits of `mask` (block
    /// size - 1), as direct I/O requires.
    pub fn is_aligned(&self, mask: usize) -> bool {
        self.segments().iter().fold(0, |bits, segment| {
            bits | segment.as_ptr().addr() | segment.len()
        }) & mask
            == 0
    }

    /// Returns the content of a list with host memory of its own; `None` for guest memory, or while
    /// a slice shares the buffer. Takes `&mut self` because the list can write its memory through
    /// `&self`. Must not be called while the kernel works on the memory.
    pub fn buffer(&mut self) -> Option<&mut [u8]> {
        match &mut self.0.as_mut()?.hold {
            Hold::Buffer(buffer) => Rc::get_mut(buffer).map(|buffer| &mut **buffer),
            _ => None,
        }
    }

    /// Removes the buffer from a list with host memory of its own and clears the list; `None` as
    /// for [`SegmentList::buffer`].
    pub fn take_buffer(&mut self) -> Option<Buffer> {
        let inner = self.0.as_mut()?;
        if !matches!(inner.hold, Hold::Buffer(_)) {
            return None;
        }
        match std::mem::replace(&mut inner.hold, Hold::Nothing) {
            Hold::Buffer(buffer) => match Rc::try_unwrap(buffer) {
                Ok(buffer) => {
                    inner.clear();
                    Some(buffer)
                }
                Err(shared) => {
                    inner.hold = Hold::Buffer(shared);
                    None
                }
            },
            _ => None,
        }
    }

    /// Returns the buffer as [`SegmentList::take_buffer`] does, and drops the list.
    pub fn into_buffer(mut self) -> Option<Buffer> {
        self.take_buffer()
    }

    /// Copies `src` into the list's memory at `offset`. Returns the number of bytes copied, limited
    /// by the list (0 when it is not writable).
    pub fn copy_from(&self, offset: u64, src: &[u8]) -> usize {
        if !self.is_writable() {
            return 0;
        }
        let mut rest = src;
        for piece in self.pieces(offset, src.len() as u64) {
            let (now, after) = rest.split_at(piece.len());
            rest = after;
            // SAFETY: `hold` keeps the segments mapped, and they are writable; no reference to a
            // buffer is out, as that needs `&mut self` and no other sharer.
            unsafe { racy::to_guest(piece.as_ptr(), now) };
        }
        src.len() - rest.len()
    }

    /// Copies the list's memory at `offset` into `dst`. Returns the number of bytes copied, limited
    /// by the list.
    pub fn copy_to(&self, offset: u64, dst: &mut [u8]) -> usize {
        let wanted = dst.len();
        let mut rest = dst;
        for piece in self.pieces(offset, wanted as u64) {
            let (now, after) = rest.split_at_mut(piece.len());
            rest = after;
            // SAFETY: `hold` keeps the segments mapped.
            unsafe { racy::from_guest(piece.as_ptr(), now) };
        }
        wanted - rest.len()
    }

    /// Fills all memory with `byte`. Returns the number of bytes (0 when the list is not writable).
    pub fn fill(&self, byte: u8) -> u64 {
        if !self.is_writable() {
            return 0;
        }
        for segment in self.segments() {
            // SAFETY: as in `copy_from`.
            unsafe { racy::fill(segment.as_ptr(), byte, segment.len()) };
        }
        self.len_bytes()
    }

    /// Copies `source` into this list, from the start of both, up to the shorter length. Returns
    /// the number of bytes (0 when this list is not writable). The two may be the same guest
    /// memory. If they overlap in more than one segment the result is a mixture, as with any two
    /// commands on the same memory.
    pub fn copy_list(&self, source: &SegmentList) -> u64 {
        if !self.is_writable() {
            return 0;
        }
        if let ([to], [from]) = (self.segments(), source.segments()) {
            let len = to.len().min(from.len());
            // SAFETY: both lists keep their segments mapped, and this one's is writable;
            // neither is shorter than `len`.
            unsafe { racy::within_guest(to.as_ptr(), from.as_ptr(), len) };
            return len as u64;
        }
        let mut offset = 0;
        for piece in source.pieces(0, self.len_bytes()) {
            let mut src = piece.as_ptr();
            for to in self.pieces(offset, piece.len() as u64) {
                // SAFETY: both lists keep their segments mapped, and this one's are writable;
                // `pieces` gives no more than the length of `piece` in total.
                unsafe { racy::within_guest(to.as_ptr(), src, to.len()) };
                src = src.wrapping_add(to.len());
                offset += to.len() as u64;
            }
        }
        offset
    }

    /// Returns whether the memory at `offset` holds exactly `other` (NVMe Compare); `false` when
    /// the list is shorter.
    pub fn equals(&self, offset: u64, other: &[u8]) -> bool {
        let mut rest = other;
        for piece in self.pieces(offset, other.len() as u64) {
            let (now, after) = rest.split_at(piece.len());
            rest = after;
            // SAFETY: `hold` keeps the segments mapped.
            if !unsafe { racy::equal(piece.as_ptr(), now) } {
                return false;
            }
        }
        rest.is_empty()
    }

    /// Makes `out` the part of this list of `len` bytes at `offset` (limited by the list), with the
    /// same memory. Returns its length. The previous content of `out` is dropped.
    pub fn slice(&self, offset: u64, len: u64, out: &mut SegmentList) -> u64 {
        let Some(source) = &self.0 else {
            out.clear();
            return 0;
        };
        let to = out.inner();
        to.clear();
        to.segments.extend(self.pieces(offset, len));
        to.bytes = to.segments.iter().map(|segment| segment.len() as u64).sum();
        to.writable = source.writable;
        to.hold = source.hold.clone();
        to.bytes
    }

    /// Returns the pieces of `len` bytes at `offset`, limited by the list. No piece is empty;
    /// together they have at most `len` bytes.
    fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Segment> + '_ {
        let (mut skip, mut left) = (offset, len);
        self.segments()
            .iter()
            .map_while(move |segment| {
                if left == 0 {
                    return None;
                }
                let size = segment.len() as u64;
                let start = skip.min(size);
                skip -= start;
                let take = (size - start).min(left);
                left -= take;
                // Both are at most the segment's length.
                Some(Segment::new(
                    segment.as_ptr().wrapping_add(start as usize),
                    take as usize,
                ))
            })
            .filter(|piece| !piece.is_empty())
    }
}

impl std::fmt::Debug for SegmentList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SegmentList")
            .field("segments", &self.count())
            .field("bytes", &self.len_bytes())
            .finish_non_exhaustive()
    }
}
