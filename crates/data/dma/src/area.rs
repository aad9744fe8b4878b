//! A structure in guest memory with fields of different sizes, such as the rings of a virtqueue.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::table::PageAddresses;
use crate::{Access, DmaError, DmaMap, prefetch, racy};

/// A structure in guest memory, resolved once and accessed field by field at byte offsets. An area
/// keeps its memory mapped, so it never dangles. After a change of the map ([`DmaMap::generation`])
/// its owner must resolve it again.
///
/// Fields are little-endian in memory (virtio 1.2, 2.7), passed in native order, and naturally
/// aligned. An access outside the structure or to a misaligned field has no effect, and a load
/// returns zero. The same holds for stores into an area resolved for [`Access::Read`].
pub struct Area {
    table: PageAddresses,
    len: usize,
    writable: bool,
    generation: u64,
}

// SAFETY: the table's pointers are into mappings that the area holds; they are accessed by module
// `racy` only.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Resolves `len` bytes at `iova`. `align` is the largest field's size (1, 2, 4 or 8), to which
    /// the structure must be aligned in host memory; one that is scattered must be aligned to 4096.
    /// An area for [`Access::Write`] can be loaded from too.
    ///
    /// # Errors
    /// [`DmaError`] when the memory cannot be accessed; [`DmaError::Overflow`] for impossible
    /// sizes.
    pub fn resolve(
        map: &DmaMap,
        iova: u64,
        len: usize,
        align: usize,
        access: Access,
    ) -> Result<Area, DmaError> {
        if !align.is_power_of_two() || align > 8 {
            return Err(DmaError::Misaligned { iova });
        }
        Ok(Area {
            table: PageAddresses::resolve(map, iova, len as u64, align, access)?,
            len,
            writable: access == Access::Write,
            generation: map.generation(),
        })
    }

    /// Returns the generation of the DMA map when the area's address was resolved.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether the file of the memory has shrunk: loads are then meaningless, and stores
    /// are lost.
    pub fn is_poisoned(&self) -> bool {
        self.table.memories().iter().any(crate::Memory::is_poisoned)
    }

    /// Loads the 16-bit field at byte `offset` of the area.
    #[inline]
    pub fn load16(&self, offset: usize) -> u16 {
        self.cell16(offset)
            .map_or(0, |cell| u16::from_le(cell.load(Ordering::Relaxed)))
    }

    /// Loads a 16-bit field with acquire ordering: writes that preceded its store are visible
    /// afterwards.
    #[inline]
    pub fn load16_acquire(&self, offset: usize) -> u16 {
        self.cell16(offset)
            .map_or(0, |cell| u16::from_le(cell.load(Ordering::Acquire)))
    }

    /// Loads two adjacent 64-bit fields at a multiple of 16 bytes of the structure: each is one
    /// load, the pair is not atomic.
    #[inline]
    pub fn load_pair64(&self, offset: usize) -> [u64; 2] {
        // The start of the structure, or of its page, is aligned to 8 at least: a
        // pair does not cross a page.
        let ptr = match self.at(offset, 16, 8) {
            Some(ptr) if offset.is_multiple_of(16) => ptr,
            _ => return [0; 2],
        };
        // SAFETY: `at` checked range and alignment, the table keeps the mapping.
        let low = unsafe { racy::cell64(ptr) };
        // SAFETY: as above; the range was checked for both.
        let high = unsafe { racy::cell64(ptr.wrapping_add(8)) };
        [low, high].map(|cell| u64::from_le(cell.load(Ordering::Relaxed)))
    }

    /// Stores a 16-bit field at byte `offset` of the area.
    #[inline]
    pub fn store16(&self, offset: usize, value: u16) {
        if let Some(cell) = self.cell16(offset).filter(|_| self.writable) {
            cell.store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Stores a 16-bit field with release ordering: a reader that sees it sees all earlier stores.
    #[inline]
    pub fn store16_release(&self, offset: usize, value: u16) {
        if let Some(cell) = self.cell16(offset).filter(|_| self.writable) {
            cell.store(value.to_le(), Ordering::Release);
        }
    }

    /// Stores a 32-bit field at byte `offset` of the area.
    #[inline]
    pub fn store32(&self, offset: usize, value: u32) {
        if let Some(ptr) = self.at(offset, 4, 4).filter(|_| self.writable) {
            // SAFETY: `at` checked range and alignment, the table keeps the mapping, which is
            // writable.
            let cell = unsafe { racy::cell32(ptr) };
            cell.store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Stores two adjacent 32-bit fields at byte `offset` of the area: each is one store, the pair
    /// is not atomic.
    #[inline(always)]
    pub fn store_pair32(&self, offset: usize, [first, second]: [u32; 2]) {
        if self.table.run(offset) < 8 {
            // The fields lie in two pages.
            self.store32(offset, first);
            return self.store32(offset.saturating_add(4), second);
        }
        if let Some(ptr) = self.at(offset, 8, 4).filter(|_| self.writable) {
            // SAFETY: `at` checked range and alignment, the table keeps the mapping, which is
            // writable; both fields lie in one page.
            let low = unsafe { racy::cell32(ptr) };
            // SAFETY: as above.
            let high = unsafe { racy::cell32(ptr.wrapping_add(4)) };
            low.store(first.to_le(), Ordering::Relaxed);
            high.store(second.to_le(), Ordering::Relaxed);
        }
    }

    /// Prefetches the cache line of the field at byte `offset`. Affects only speed.
    #[inline(always)]
    pub fn prefetch(&self, offset: usize) {
        if let Some(ptr) = self.at(offset, 1, 1) {
            prefetch::line(ptr);
        }
    }

    /// Prefetches the cache line of the field at byte `offset` for a store. Affects only speed.
    #[inline(always)]
    pub fn prefetch_for_write(&self, offset: usize) {
        if let Some(ptr) = self.at(offset, 1, 1).filter(|_| self.writable) {
            prefetch::line_for_write(ptr);
        }
    }

    /// Returns `count` 16-bit fields from byte `offset` on, to load many of them without a search
    /// for each; `None` unless they lie in one piece of host memory, aligned.
    pub fn fields16(&self, offset: usize, count: usize) -> Option<Fields16<'_>> {
        let start = self.fields(offset, count, 2, 2)?;
        // SAFETY: `fields` checked range and alignment, the table keeps the mapping; the fields are
        // only loaded.
        Some(Fields16(unsafe { racy::cells(start, count) }))
    }

    /// Returns `count` pairs of 64-bit fields from byte `offset` on, like [`Area::fields16`].
    pub fn pairs64(&self, offset: usize, count: usize) -> Option<Pairs64<'_>> {
        let start = self.fields(offset, count, 16, 8)?;
        // SAFETY: as in `fields16`.
        Some(Pairs64(unsafe { racy::cells(start, count) }))
    }

    /// Returns `count` pairs of 32-bit fields from byte `offset` on to store into, like
    /// [`Area::fields16`]; `None` in an area for [`Access::Read`], too.
    pub fn pairs32_mut(&self, offset: usize, count: usize) -> Option<Pairs32<'_>> {
        let start = self.fields(offset, count, 8, 4)?;
        // SAFETY: as in `fields16`; the mapping is writable.
        self.writable
            .then(|| Pairs32(unsafe { racy::cells(start, count) }))
    }

    /// Returns the 16-bit field at byte `offset` to store into many times, like
    /// [`Area::fields16`]; `None` in an area for [`Access::Read`], too.
    pub fn field16_mut(&self, offset: usize) -> Option<Field16<'_>> {
        self.cell16(offset).filter(|_| self.writable).map(Field16)
    }

    /// Returns the host address of `count` adjacent fields of `size` bytes, if they are contiguous,
    /// inside the structure and aligned.
    fn fields(&self, offset: usize, count: usize, size: usize, align: usize) -> Option<*mut u8> {
        let bytes = count.checked_mul(size)?;
        let start = self.at(offset, bytes, align)?;
        (self.table.run(offset) >= bytes).then_some(start)
    }

    #[inline]
    fn cell16(&self, offset: usize) -> Option<&AtomicU16> {
        let ptr = self.at(offset, 2, 2)?;
        // SAFETY: `at` checked range and alignment, the table keeps the mapping; stores are made
        // only where it is writable.
        Some(unsafe { racy::cell16(ptr) })
    }

    /// Returns the host address of a field of `size` bytes, if it lies inside the structure and is
    /// aligned. A field aligned to its size does not cross a page, so it is contiguous even in a
    /// scattered structure.
    #[inline]
    fn at(&self, offset: usize, size: usize, align: usize) -> Option<*mut u8> {
        let end = offset.checked_add(size)?;
        if end > self.len {
            return None;
        }
        self.table
            .at(offset)
            .filter(|ptr| ptr.addr() & (align - 1) == 0)
    }
}

/// Adjacent 16-bit fields of an [`Area`].
#[derive(Clone, Copy)]
pub struct Fields16<'a>(&'a [AtomicU16]);

impl Fields16<'_> {
    /// Loads a field; `None` outside the fields.
    #[inline(always)]
    pub fn load(&self, index: usize) -> Option<u16> {
        let cell = self.0.get(index)?;
        Some(u16::from_le(cell.load(Ordering::Relaxed)))
    }
}

/// Adjacent pairs of 64-bit fields of an [`Area`].
#[derive(Clone, Copy)]
pub struct Pairs64<'a>(&'a [[AtomicU64; 2]]);

impl Pairs64<'_> {
    /// Loads a pair; `None` outside the pairs. Each field is one load, the pair is not atomic.
    #[inline(always)]
    pub fn load(&self, index: usize) -> Option<[u64; 2]> {
        let [low, high] = self.0.get(index)?;
        Some([low, high].map(|cell| u64::from_le(cell.load(Ordering::Relaxed))))
    }

    /// Prefetches the cache line of a pair. Affects only speed.
    #[inline(always)]
    pub fn prefetch(&self, index: usize) {
        if let Some(pair) = self.0.get(index) {
            prefetch::line(pair.as_ptr().cast());
        }
    }
}

/// Adjacent pairs of 32-bit fields of an [`Area`] for [`Access::Write`].
#[derive(Clone, Copy)]
pub struct Pairs32<'a>(&'a [[AtomicU32; 2]]);

impl Pairs32<'_> {
    /// Stores a pair, or nothing outside the pairs. Each field is one store, the pair is not
    /// atomic.
    #[inline(always)]
    pub fn store(&self, index: usize, values: [u32; 2]) {
        if let Some(pair) = self.0.get(index) {
            for (cell, value) in pair.iter().zip(values) {
                cell.store(value.to_le(), Ordering::Relaxed);
            }
        }
    }

    /// Prefetches the cache line of a pair for a store. Affects only speed.
    #[inline(always)]
    pub fn prefetch(&self, index: usize) {
        if let Some(pair) = self.0.get(index) {
            prefetch::line_for_write(pair.as_ptr().cast());
        }
    }
}

/// A 16-bit field of an [`Area`] for [`Access::Write`].
#[derive(Clone, Copy)]
pub struct Field16<'a>(&'a AtomicU16);

impl Field16<'_> {
    /// Stores the field with release ordering, like [`Area::store16_release`].
    #[inline(always)]
    pub fn store_release(&self, value: u16) {
        self.0.store(value.to_le(), Ordering::Release);
    }
}

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Area")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
