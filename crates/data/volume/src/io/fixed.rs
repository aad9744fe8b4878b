//! Guest memory in the kernel's table of fixed buffers: which addresses are pinned, and at which
//! index.
//!
//! The kernel pins the pages of a fixed buffer once, so that operations need not look them up. This
//! table finds a buffer by address. It keeps the memory of each buffer mapped as long as the
//! kernel's table refers to it, so that no other memory can be mapped at these addresses and
//! mistaken for it.

use dma::Memory;

/// Number of entries in the kernel's table, which is the kernel's limit (IORING_MAX_REG_BUFFERS).
/// Tests use fewer.
pub(super) const PLACES: u16 = if cfg!(test) { 256 } else { 1 << 14 };
/// Maximum length in bytes of a registered buffer. The kernel would accept 1 GiB, but pinning that
/// takes at least 10 ms, during which the worker serves no queue. This length takes about 1 ms when
/// the pages are already allocated.
pub(super) const MAX_BUFFER_LEN: usize = if cfg!(test) { 4 << 20 } else { 64 << 20 };

/// Memory range that the kernel has pinned as a fixed buffer.
#[derive(Debug)]
struct PinnedPart {
    start: usize,
    len: usize,
    place: u16,
    /// Mapping of the memory, kept so that its addresses are not reused.
    memory: Memory,
}

/// Contents of the kernel's table of fixed buffers, which requests refer to by index.
#[derive(Debug)]
pub(super) struct FixedTable {
    /// Pinned memory ranges, sorted by address.
    entries: Vec<PinnedPart>,
    /// Table indices that were used before and are free again.
    free: Vec<u16>,
    /// Smallest table index that was never used.
    unused: u16,
}

impl FixedTable {
    /// Creates an empty table.
    pub(super) fn new() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            unused: 0,
        }
    }

    /// Reserves a free index of the table; `None` when the table is full.
    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop().or_else(|| {
            let place = self.unused;
            self.unused = place.checked_add(1).filter(|next| *next <= PLACES)?;
            Some(place)
        })
    }

    /// Releases a table index that the kernel no longer uses.
    pub(super) fn give(&mut self, place: u16) {
        self.free.push(place);
    }

    /// Records that the kernel has pinned `len` bytes of `memory` from address `start` on, at
    /// `place`.
    pub(super) fn enter(&mut self, start: usize, len: usize, place: u16, memory: Memory) {
        let at = self.entries.partition_point(|known| known.start < start);
        let fixed = PinnedPart {
            start,
            len,
            place,
            memory,
        };
        self.entries.insert(at, fixed);
    }

    /// Removes the buffer at `place`. The returned memory must be kept until the kernel's entry is
    /// removed, too.
    pub(super) fn remove(&mut self, place: u16) -> Option<Memory> {
        let at = self.entries.iter().position(|known| known.place == place)?;
        Some(self.entries.remove(at).memory)
    }

    /// Returns the table index of the pinned buffer that contains all `len` bytes from address
    /// `start` on.
    #[inline]
    pub(super) fn find(&self, start: usize, len: usize) -> Option<u16> {
        // The table is empty where `--pin-memory` is not given.
        let before = self.entries.partition_point(|known| known.start <= start);
        let known = self.entries.get(before.checked_sub(1)?)?;
        let offset = start - known.start;
        (offset < known.len && len <= known.len - offset).then_some(known.place)
    }

    /// Returns the number of buffers that the kernel has pinned.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranges_in_one_buffer_are_found() {
        let memory = Memory::anonymous(4096).unwrap();
        let mut table = FixedTable::new();
        let (a, b) = (table.take().unwrap(), table.take().unwrap());
        assert_ne!(a, b);
        // Side by side, entered in the wrong order.
        table.enter(0x3000, 0x1000, b, memory.clone());
        table.enter(0x1000, 0x2000, a, memory.clone());
        assert_eq!(table.find(0x1000, 0x2000), Some(a));
        assert_eq!(table.find(0x2fff, 1), Some(a));
        assert_eq!(table.find(0x3000, 0x1000), Some(b));
        assert_eq!(table.find(0x2fff, 2), None, "over the edge of two");
        assert_eq!(table.find(0xfff, 2), None);
        assert_eq!(table.find(0x3fff, 2), None);
        assert_eq!(table.find(0x4000, 1), None);
        assert_eq!(table.find(0x1000, usize::MAX), None);
        drop(table.remove(a));
        assert_eq!(table.find(0x1000, 1), None);
        assert_eq!(table.find(0x3000, 1), Some(b));
        assert_eq!(table.count(), 1);
    }
}
