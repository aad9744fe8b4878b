//! Memory of a shadow doorbell or EventIdx buffer, as atomic cells.

use std::sync::atomic::AtomicU32;

use crate::table::PageAddresses;
use crate::{Access, DmaError, DmaMap, racy};

/// A buffer of 32-bit cells in guest memory, accessed by index (NVMe Base 2.1, 5.2.5: Doorbell
/// Buffer Config). The buffer is kept mapped. After a change of the map ([`DmaMap::generation`])
/// its owner must resolve it again.
pub struct Cells {
    table: PageAddresses,
    iova: u64,
    count: usize,
    generation: u64,
}

// SAFETY: the table's pointers are into mappings that the cells hold; they are accessed by module
// `racy` only.
unsafe impl Send for Cells {}
// SAFETY: as above.
unsafe impl Sync for Cells {}

impl Cells {
    /// Resolves `count` cells at `iova`. A buffer that is scattered must be aligned
    /// to 4096. The memory must be mapped writable even for [`Access::Read`], because the
    /// cells are given out as atomics.
    ///
    /// # Errors
    /// [`DmaError`] when the memory cannot be accessed or is misaligned.
    pub fn resolve(
        map: &DmaMap,
        iova: u64,
        count: usize,
        access: Access,
    ) -> Result<Cells, DmaError> {
        let bytes = (count as u64).checked_mul(4).ok_or(DmaError::Overflow)?;
        let table = PageAddresses::resolve(map, iova, bytes, 8, access)?;
        if !table.memories().iter().all(crate::Memory::is_writable) {
            return Err(DmaError::Protection { iova });
        }
        Ok(Cells {
            table,
            iova,
            count,
            generation: map.generation(),
        })
    }

    /// Returns cell `i`; `None` when it is outside the buffer.
    #[inline]
    pub fn get(&self, i: usize) -> Option<&AtomicU32> {
        if i >= self.count {
            return None;
        }
        let ptr = self.table.at(i * 4)?;
        // SAFETY: in range, in one piece and aligned (pages are aligned to 8 bytes in host memory),
        // in a writable mapping that the table keeps.
        Some(unsafe { racy::cell32(ptr) })
    }

    /// Returns the number of cells.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the guest address (IOVA) at which the cells were resolved.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the generation of the DMA map when the cells were resolved.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether the memory's file has shrunk, so that the content is lost.
    pub fn is_poisoned(&self) -> bool {
        self.table.memories().iter().any(crate::Memory::is_poisoned)
    }
}

impl std::fmt::Debug for Cells {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cells")
            .field("iova", &self.iova)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}
