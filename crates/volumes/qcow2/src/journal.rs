//! Journal of changed L2 entries of an image, in a file that is mapped and never flushed.
//!
//! The file lies in a folder of this host ([`JournalFolder`]) and is named after the image's file.
//! The page cache keeps stored slots until the host goes down, so they outlive every process: the
//! one that serves, its keeper, and both at once. After a loss of power they are worthless, and the
//! image is in order without them.
//!
//! Each slot has the byte offset of an L2 entry in the image, its new value, and a checksum. The
//! offset is stored last and makes the slot valid, and a slot is cleared by a store of 0 there. A
//! process that is killed between any two stores leaves only whole slots, and a slot that its
//! successor applies once more has no further effect.
//!
//! The journal continues the image only if no other program has written the image since. It has a
//! random number, which the image's header has among its autoclear features
//! ([`crate::format::Header::journal`]): every writer clears the features that it does not know.

use crate::format::L2Entry;
use dma::{MapError, SharedPages};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use volume::JournalFolder;

/// Version of the journal that this crate writes, the only one that it reads.
pub const JOURNAL_VERSION: u32 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"vnvmeqc2");
/// Size of the header in bytes.
const HEADER: usize = 128;
/// Size of a slot in bytes.
const SLOT: usize = 24;
/// Number of slots of an image's journal, which has eight pages with its header.
pub(crate) const SLOTS: usize = (32768 - HEADER) / SLOT;

/// Places of the header's words.
const PLACE_MAGIC: usize = 0;
const PLACE_FIELDS: usize = 8;
const PLACE_SUM: usize = 72;

/// Device and inode number of an image's file.
pub(crate) type FileId = (u64, u64);

/// Reason why a journal is not continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("it is of version {0}, and this program reads {JOURNAL_VERSION}")]
    Version(u64),
    #[error("it is damaged")]
    Damaged,
    #[error("it is of another file")]
    OtherFile,
    #[error("the host was booted since it was written")]
    Boot,
}

/// Entries that an earlier process has recorded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Recorded {
    /// Number of the journal, which the image's header has, too.
    pub(crate) number: u32,
    /// Entries with their byte offsets in the image.
    pub(crate) entries: Vec<(u64, L2Entry)>,
}

#[derive(Debug)]
pub(crate) struct Journal {
    pages: SharedPages,
    path: PathBuf,
    slots: usize,
    /// Words of the header behind the magic number: version, number, boot, file, slots.
    fields: [u64; 7],
}

impl Journal {
    /// Returns the path of the journal of the image in this file.
    pub(crate) fn path(folder: &JournalFolder, id: FileId) -> PathBuf {
        folder.path.join(format!("qcow2-{:x}-{:x}", id.0, id.1))
    }

    /// Opens the journal of the image in this file, which is created with this number of slots if
    /// there is none. Its content stays until [`Journal::begin`].
    ///
    /// # Errors
    /// The file cannot be created or mapped, or the folder cannot be used.
    pub(crate) fn open(folder: &JournalFolder, id: FileId, slots: usize) -> io::Result<Self> {
        let failed = |error: MapError| io::Error::other(error);
        let boot = folder
            .boot
            .as_ref()
            .map_err(|why| io::Error::other(why.clone()))?;
        let path = Self::path(folder, id);
        let file = fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(NO_LINKS)
            .open(&path)?;
        let len = (HEADER + slots * SLOT).next_multiple_of(4096);
        // No later store can fail for lack of memory.
        if file.metadata()?.len() < len as u64 {
            fallocate(&file, FallocateFlags::empty(), 0, len as u64)?;
        }
        let pages = SharedPages::of_file(file.into()).map_err(failed)?;
        let [boot, more] = [0, 8].map(|at| {
            let bytes = boot.get(at..).and_then(|rest| rest.first_chunk());
            u64::from_le_bytes(bytes.copied().unwrap_or_default())
        });
        let number = u64::from(random());
        let version = u64::from(JOURNAL_VERSION);
        Ok(Self {
            pages,
            path,
            slots,
            fields: [version, number, boot, more, id.0, id.1, slots as u64],
        })
    }

    /// Returns the number that the image's header has while this process writes the image.
    pub(crate) fn number(&self) -> u32 {
        self.fields[1] as u32
    }

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Returns whether stores are lost, because another program has shortened the file.
    pub(crate) fn is_lost(&self) -> bool {
        self.pages.memory().is_poisoned()
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

    /// Returns the entries that an earlier process has recorded. `None`: the file is new.
    ///
    /// # Errors
    /// The journal cannot be continued.
    pub(crate) fn recorded(&self) -> Result<Option<Recorded>, JournalError> {
        match self.get(PLACE_MAGIC) {
            0 => return Ok(None),
            MAGIC => {}
            _ => return Err(JournalError::Damaged),
        }
        let mut fields = self.fields;
        for (field, place) in fields.iter_mut().zip((PLACE_FIELDS..).step_by(8)) {
            *field = self.get(place);
        }
        let [version, number, boot, more, device, inode, slots] = fields;
        if self.get(PLACE_SUM) != sum(&fields) {
            return Err(JournalError::Damaged);
        }
        if version != u64::from(JOURNAL_VERSION) {
            return Err(JournalError::Version(version));
        }
        let [_, _, own_boot, own_more, own_device, own_inode, _] = self.fields;
        if (boot, more) != (own_boot, own_more) {
            return Err(JournalError::Boot);
        }
        if (device, inode) != (own_device, own_inode) {
            return Err(JournalError::OtherFile);
        }
        let room = self.pages.len().saturating_sub(HEADER) / SLOT;
        let slots = usize::try_from(slots).ok().filter(|slots| *slots <= room);
        let slots = slots.ok_or(JournalError::Damaged)?;
        let mut entries = Vec::new();
        for place in (0..slots).map(|slot| HEADER + slot * SLOT) {
            let [at, entry, check] = [0, 8, 16].map(|word| self.get(place + word));
            if at == 0 {
                continue;
            }
            if check != sum(&[number, at, entry]) {
                return Err(JournalError::Damaged);
            }
            entries.push((at, L2Entry(entry)));
        }
        Ok(Some(Recorded {
            number: number as u32,
            entries,
        }))
    }

    /// Begins an empty journal of this process. The image has all that an earlier process has
    /// recorded, or nothing of it is wanted.
    pub(crate) fn begin(&self) {
        let room = self.pages.len().saturating_sub(HEADER) / SLOT;
        // Slots first: a process that is killed here leaves an empty journal of the former number.
        (0..room).for_each(|slot| self.clear(slot));
        self.set(PLACE_MAGIC, 0);
        for (field, place) in self.fields.iter().zip((PLACE_FIELDS..).step_by(8)) {
            self.set(place, *field);
        }
        self.set(PLACE_SUM, sum(&self.fields));
        self.set(PLACE_MAGIC, MAGIC);
    }

    /// Records that the L2 entry at byte offset `at` of the image has a new value. The slot must be
    /// free.
    pub(crate) fn record(&self, slot: usize, at: u64, entry: L2Entry) {
        let place = HEADER + slot * SLOT;
        self.set(place + 8, entry.0);
        self.set(place + 16, sum(&[self.fields[1], at, entry.0]));
        self.set(place, at);
    }

    /// Frees a slot, because the image has its entry.
    pub(crate) fn clear(&self, slot: usize) {
        self.set(HEADER + slot * SLOT, 0);
    }

    /// Removes the file of a journal whose entries the image has. To be called while the image is
    /// locked: afterwards the file may be another process's.
    pub(crate) fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            let path = self.path.display();
            tracing::debug!("{path}: an empty journal was not removed: {error}");
        }
    }
}

/// Flags of `open(2)` with which a link is not followed, and nothing is waited for.
const NO_LINKS: i32 = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits() as i32;

/// Returns a random number other than 0.
fn random() -> u32 {
    // The hasher's keys are random, and differ from call to call.
    let hash = RandomState::new().build_hasher().finish();
    ((hash >> 32) as u32 ^ hash as u32).max(1)
}

/// Returns a checksum of these words (FNV-1a, with words for bytes, and a final mix).
fn sum(words: &[u64]) -> u64 {
    let hash = words.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
        let hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^ hash >> 29
    });
    (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: L2Entry = L2Entry::data(0x60000);

    fn folder(boot: u8) -> (tempfile::TempDir, JournalFolder) {
        let directory = tempfile::tempdir().unwrap();
        let folder = JournalFolder {
            path: directory.path().to_owned(),
            boot: Ok([boot; 16]),
        };
        (directory, folder)
    }

    #[test]
    fn journal_returns_recorded_entries_to_next_process() {
        let (_directory, folder) = folder(1);
        let journal = Journal::open(&folder, (7, 9), 4).unwrap();
        assert_eq!(journal.recorded(), Ok(None));
        journal.begin();
        journal.record(0, 0x40008, L2Entry::data(0x50000));
        journal.record(3, 0x40010, ENTRY);
        journal.clear(0);
        let number = journal.number();
        drop(journal);
        let next = Journal::open(&folder, (7, 9), SLOTS).unwrap();
        let entries = vec![(0x40010, ENTRY)];
        let recorded = Recorded { number, entries };
        assert_eq!(next.recorded(), Ok(Some(recorded)));
        assert_ne!(next.number(), number);
        next.begin();
        let none = Recorded {
            number: next.number(),
            entries: Vec::new(),
        };
        assert_eq!(next.recorded(), Ok(Some(none)));
        next.remove();
        assert!(!next.path.exists());
    }

    #[test]
    fn journal_of_other_boot_file_or_version_is_refused() {
        let (_directory, folder) = folder(1);
        let journal = Journal::open(&folder, (7, 9), SLOTS).unwrap();
        journal.begin();
        journal.record(5, 0x40010, ENTRY);
        let open = |boot, id| {
            let folder = JournalFolder {
                boot: Ok([boot; 16]),
                ..folder.clone()
            };
            let own = Journal::open(&folder, (7, 9), SLOTS).unwrap();
            let mut fields = own.fields;
            (fields[4], fields[5]) = id;
            Journal { fields, ..own }.recorded()
        };
        assert!(open(1, (7, 9)).is_ok());
        assert_eq!(open(2, (7, 9)), Err(JournalError::Boot));
        assert_eq!(open(1, (7, 8)), Err(JournalError::OtherFile));
        let version = u64::from(JOURNAL_VERSION) + 1;
        let mut fields = journal.fields;
        fields[0] = version;
        Journal { fields, ..journal }.begin();
        assert_eq!(open(1, (7, 9)), Err(JournalError::Version(version)));
    }

    #[test]
    fn damaged_journal_is_refused() {
        let (_directory, folder) = folder(1);
        let journal = Journal::open(&folder, (7, 9), SLOTS).unwrap();
        journal.begin();
        journal.record(2, 0x40010, ENTRY);
        let slot = HEADER + 2 * SLOT;
        for place in [
            PLACE_MAGIC,
            8,
            16,
            24,
            56,
            PLACE_SUM,
            slot,
            slot + 8,
            slot + 16,
        ] {
            let before = journal.get(place);
            journal.set(place, before ^ 0x100);
            assert_eq!(journal.recorded(), Err(JournalError::Damaged), "{place}");
            journal.set(place, before);
        }
        assert!(journal.recorded().unwrap().is_some());
        // Another program shortens the file: stores are lost from then on.
        let file = fs::File::options().write(true).open(&journal.path).unwrap();
        file.set_len(0).unwrap();
        journal.record(9, 0x40018, ENTRY);
        assert!(journal.is_lost());
    }
}
