//! The memory of a structure whose fields have different sizes: a virtqueue's rings.

use std::sync::atomic::{AtomicU16, Ordering};

use crate::table::Table;
use crate::{Access, DmaError, DmaMap, racy};

/// A structure in guest memory, resolved once, that is accessed field by field at byte offsets. It
/// holds the memory itself, so it never dangles; after a change of the map ([`DmaMap::generation`])
/// its owner resolves it again.
///
/// Fields are little-endian (virtio 1.2, 2.7), given and taken in native order, and naturally
/// aligned. A field outside the structure, one that is misaligned, or a store into a structure that
/// was resolved for [`Access::Read`], does nothing (loads give zero).
pub struct Area {
    table: Table,
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
    /// See [`DmaError`]; [`DmaError::Overflow`] for impossible sizes.
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
            table: Table::resolve(map, iova, len as u64, align, access)?,
            len,
            writable: access == Access::Write,
            generation: map.generation(),
        })
    }

    /// The map's generation when it was resolved.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether the file of its memory shrank: what is loaded is then meaningless, and
    /// nobody sees what is stored.
    pub fn is_poisoned(&self) -> bool {
        self.table.memories().iter().any(crate::Memory::is_poisoned)
    }

    /// Loads a 16-bit field.
    #[inline]
    pub fn load16(&self, offset: usize) -> u16 {
        self.cell16(offset)
            .map_or(0, |cell| u16::from_le(cell.load(Ordering::Relaxed)))
    }

    /// Loads a 16-bit field; what the other side wrote before it stored it is visible afterwards.
    #[inline]
    pub fn load16_acquire(&self, offset: usize) -> u16 {
        self.cell16(offset)
            .map_or(0, |cell| u16::from_le(cell.load(Ordering::Acquire)))
    }

    /// Loads two 64-bit fields that lie side by side, at a multiple of 16 bytes of the structure:
    /// each is one load, the pair is not.
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

    /// Stores a 16-bit field.
    #[inline]
    pub fn store16(&self, offset: usize, value: u16) {
        if let Some(cell) = self.cell16(offset).filter(|_| self.writable) {
            cell.store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Stores a 16-bit field; who sees it sees what was stored before.
    #[inline]
    pub fn store16_release(&self, offset: usize, value: u16) {
        if let Some(cell) = self.cell16(offset).filter(|_| self.writable) {
            cell.store(value.to_le(), Ordering::Release);
        }
    }

    /// Stores a 32-bit field.
    #[inline]
    pub fn store32(&self, offset: usize, value: u32) {
        if let Some(ptr) = self.at(offset, 4, 4).filter(|_| self.writable) {
            // SAFETY: `at` checked range and alignment, the table keeps the mapping, which is
            // writable.
            let cell = unsafe { racy::cell32(ptr) };
            cell.store(value.to_le(), Ordering::Relaxed);
        }
    }

    #[inline]
    fn cell16(&self, offset: usize) -> Option<&AtomicU16> {
        let ptr = self.at(offset, 2, 2)?;
        // SAFETY: `at` checked range and alignment, the table keeps the mapping; stores are made
        // only where it is writable.
        Some(unsafe { racy::cell16(ptr) })
    }

    /// The host address of `size` bytes, if they lie inside and are aligned. What is aligned to its
    /// size does not cross a page, so it lies in one piece even where the structure is scattered.
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

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Area")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
