//! Journal of changed L2 entries, in a memory file that outlives the process.
//!
//! A keeper holds the file (`MemoryPlace`). Each slot has the byte offset of an L2 entry in the
//! image, and its new value. The offset is stored last and makes the slot valid, and a slot is
//! cleared by a store of 0 there. A process that is killed between any two stores leaves only whole
//! slots, and a slot that its successor applies once more has no further effect.
//!
//! The journal is for the process's own death: after a loss of power it is gone, and the image is
//! in order without it.

use crate::format::L2Entry;
use dma::{MapError, SharedPages};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Version of the journal that this crate writes, the only one that it reads.
pub const JOURNAL_VERSION: u32 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"vnvmeqc2");
/// Size of the header in bytes: magic number, version, the two numbers of the image's file, and the
/// number of slots.
const HEADER: usize = 64;
/// Size of a slot in bytes.
const SLOT: usize = 16;
/// Number of slots of an image's journal, which has four pages with its header.
pub(crate) const SLOTS: usize = (16384 - HEADER) / SLOT;

/// Device and inode number of an image's file.
pub(crate) type FileId = (u64, u64);

#[derive(Debug)]
pub(crate) struct Journal {
    pages: SharedPages,
    slots: usize,
}

impl Journal {
    /// Creates an empty journal with this number of slots, for the image in this file.
    pub(crate) fn create(id: FileId, slots: usize) -> Result<Self, MapError> {
        let len = HEADER + slots * SLOT;
        let pages = SharedPages::named("vnvme-qcow2", len)?;
        // No later store can fail for lack of memory.
        pages.allocate(0, len)?;
        let journal = Self { pages, slots };
        let words = [u64::from(JOURNAL_VERSION), id.0, id.1, slots as u64];
        for (place, value) in (8..).step_by(8).zip(words) {
            journal.set(place, value);
        }
        journal.set(0, MAGIC);
        Ok(journal)
    }

    /// Opens the journal of an earlier process. `None`: the file is no journal of this version.
    pub(crate) fn open(file: OwnedFd) -> Option<Self> {
        let pages = SharedPages::open(file, HEADER).ok()?;
        let room = pages.len().saturating_sub(HEADER) / SLOT;
        let mut journal = Self { pages, slots: 0 };
        journal.slots = usize::try_from(journal.get(32)).map_or(room, |slots| slots.min(room));
        let is_journal = journal.get(0) == MAGIC && journal.get(8) == u64::from(JOURNAL_VERSION);
        is_journal.then_some(journal)
    }

    /// Returns whether the journal is of the image in this file.
    pub(crate) fn is_of(&self, id: FileId) -> bool {
        (self.get(16), self.get(24)) == id
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.pages.fd()
    }

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    fn word(&self, place: usize) -> Option<&AtomicU64> {
        self.pages.memory().atomic_u64(place)
    }

    fn get(&self, place: usize) -> u64 {
        let word = self.word(place);
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn set(&self, place: usize, value: u64) {
        if let Some(word) = self.word(place) {
            word.store(value, Ordering::Release);
        }
    }

    /// Records that the L2 entry at byte offset `at` of the image has a new value. The slot must be
    /// free.
    pub(crate) fn record(&self, slot: usize, at: u64, entry: L2Entry) {
        let place = HEADER + slot * SLOT;
        self.set(place + 8, entry.0);
        self.set(place, at);
    }

    /// Frees a slot, because the image has its entry.
    pub(crate) fn clear(&self, slot: usize) {
        self.set(HEADER + slot * SLOT, 0);
    }

    /// Returns the recorded entries, each with its byte offset in the image.
    pub(crate) fn recorded(&self) -> Vec<(u64, L2Entry)> {
        let places = (0..self.slots).map(|slot| HEADER + slot * SLOT);
        let slots = places.map(|place| (self.get(place), L2Entry(self.get(place + 8))));
        slots.filter(|(at, _)| *at != 0).collect()
    }

    /// Frees all slots.
    pub(crate) fn clear_all(&self) {
        (0..self.slots).for_each(|slot| self.clear(slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_returns_recorded_entries_to_next_process() {
        let journal = Journal::create((7, 9), 4).unwrap();
        journal.record(0, 0x40008, L2Entry::data(0x50000));
        journal.record(3, 0x40010, L2Entry::data(0x60000));
        journal.clear(0);
        let file = journal.fd().try_clone_to_owned().unwrap();
        let next = Journal::open(file).unwrap();
        assert!(next.is_of((7, 9)) && !next.is_of((7, 8)));
        assert_eq!(next.recorded(), [(0x40010, L2Entry::data(0x60000))]);
        next.clear_all();
        assert_eq!(journal.recorded(), []);
    }

    #[test]
    fn foreign_memory_is_no_journal() {
        let open = |pages: &SharedPages| Journal::open(pages.fd().try_clone_to_owned().unwrap());
        let pages = SharedPages::named("other", 16384).unwrap();
        assert!(open(&pages).is_none(), "zeroes");
        let journal = Journal::create((1, 2), SLOTS).unwrap();
        assert_eq!(open(&journal.pages).unwrap().slots(), SLOTS);
        journal.set(8, u64::from(JOURNAL_VERSION) + 1);
        assert!(open(&journal.pages).is_none(), "a later version");
    }
}
