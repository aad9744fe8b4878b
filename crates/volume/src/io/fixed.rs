//! Guest memory in the kernel's table of fixed buffers: which bytes are there, and at which place.
//!
//! The kernel pins a fixed buffer's pages once, so that an operation on it need not look them up.
//! The table here knows them by address. It holds the memory of each, mapped, for as long as the
//! kernel's table names it: no other memory can come to these addresses meanwhile, and be taken for
//! them.

use dma::Memory;

/// Places in the kernel's table: as many as it takes (IORING_MAX_REG_BUFFERS). Tests do with less.
pub(super) const PLACES: u16 = if cfg!(test) { 256 } else { 1 << 14 };
/// Longest buffer that is registered, in bytes. The kernel would take 1 GiB, but pinning that takes
/// it 10 ms and more, in which the worker serves no queue; this takes about 1 ms where the pages
/// are there.
pub(super) const LONGEST: usize = if cfg!(test) { 4 << 20 } else { 64 << 20 };

/// A part of a memory that the kernel has pinned.
#[derive(Debug)]
struct Fixed {
    start: usize,
    len: usize,
    place: u16,
    /// Keeps the addresses from being used again.
    memory: Memory,
}

/// Contents of the kernel's table of fixed buffers.
#[derive(Debug)]
pub(super) struct FixedTable {
    /// By address.
    entries: Vec<Fixed>,
    /// Places that were used before.
    free: Vec<u16>,
    /// First place that was never used.
    unused: u16,
}

impl FixedTable {
    /// An empty one.
    pub(super) fn new() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            unused: 0,
        }
    }

    /// A free place.
    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop().or_else(|| {
            let place = self.unused;
            self.unused = place.checked_add(1).filter(|next| *next <= PLACES)?;
            Some(place)
        })
    }

    /// Gives a place back that the kernel's table does not use any more.
    pub(super) fn give(&mut self, place: u16) {
        self.free.push(place);
    }

    /// The kernel has pinned `len` bytes of `memory` from address `start` on, at `place`.
    pub(super) fn enter(&mut self, start: usize, len: usize, place: u16, memory: Memory) {
        let at = self.entries.partition_point(|known| known.start < start);
        let fixed = Fixed {
            start,
            len,
            place,
            memory,
        };
        self.entries.insert(at, fixed);
    }

    /// Forgets the buffer at `place`. The result keeps its memory until the kernel has forgotten
    /// it, too.
    pub(super) fn remove(&mut self, place: u16) -> Option<Memory> {
        let at = self.entries.iter().position(|known| known.place == place)?;
        Some(self.entries.remove(at).memory)
    }

    /// The place of the buffer in which all of these bytes lie.
    #[inline]
    pub(super) fn find(&self, start: usize, len: usize) -> Option<u16> {
        // The table is empty where `--pin-memory` is not given.
        let before = self.entries.partition_point(|known| known.start <= start);
        let known = self.entries.get(before.checked_sub(1)?)?;
        let offset = start - known.start;
        (offset < known.len && len <= known.len - offset).then_some(known.place)
    }

    /// Buffers in the table.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_in_one_buffer_is_found() {
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
