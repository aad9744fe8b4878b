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
//!
//! A process has its journal's file locked (`flock(2)`) while it uses it. The file has the image's
//! path behind its slots, by which [`crate::obsolete`] finds journals that no image needs.

use crate::format::L2Entry;
use dma::{MapError, SharedPages};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::collections::hash_map::RandomState;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use volume::JournalFolder;

/// Version of the journal that this crate writes, the only one that it reads.
pub const JOURNAL_VERSION: u32 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"vnvmeqc2");
/// Size of the header in bytes.
const HEADER: usize = 128;
/// Size of a slot in bytes.
const SLOT: usize = 24;
/// Number of slots of an image's journal, which fill eight pages with its header. A ninth page has
/// the image's path.
pub(crate) const SLOTS: usize = (32768 - HEADER) / SLOT;

/// Places of the header's words.
const PLACE_MAGIC: usize = 0;
const PLACE_FIELDS: usize = 8;
const PLACE_SUM: usize = 72;
/// Time since the host's boot, in seconds, at which the image was first missed; 0 if it was not.
const PLACE_MISSED: usize = 80;

/// Room for the image's path behind the slots, in bytes: checksum, length, and the path itself.
const PATH_ROOM: usize = 4096;
/// Maximum length of an image's path in a journal, in bytes.
const MAX_PATH: usize = PATH_ROOM - 16;

/// Time limit of the wait for a process that has the journal's file locked: one that is about to
/// end, or that looks whether the journal is needed.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts to lock the journal's file.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

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
    _lock: LockedFile,
    path: PathBuf,
    /// Path of the image's file; empty if it is not known.
    image: PathBuf,
    slots: usize,
    /// Words of the header behind the magic number: version, number, boot, file, slots.
    fields: [u64; 7],
    /// Number of stores after which the process is killed.
    #[cfg(test)]
    stores: AtomicU64,
}

/// File that is locked until this is dropped. Its mapping may last longer.
#[derive(Debug)]
struct LockedFile(File);

impl Drop for LockedFile {
    fn drop(&mut self) {
        if let Err(error) = flock(&self.0, FlockOperation::Unlock) {
            tracing::debug!("a journal's file stays locked: {error}");
        }
    }
}

impl Journal {
    /// Returns the path of the journal of the image in this file.
    pub(crate) fn path(folder: &JournalFolder, id: FileId) -> PathBuf {
        folder.path.join(format!("qcow2-{:x}-{:x}", id.0, id.1))
    }

    /// Opens and locks the journal of the image in this file, which is created with this number of
    /// slots if there is none. Its content stays until [`Journal::begin`]. `image`: path of the
    /// image's file, empty if it is not known.
    ///
    /// # Errors
    /// The file cannot be created or mapped, another process has it locked for long, or the folder
    /// cannot be used.
    pub(crate) fn open(
        folder: &JournalFolder,
        id: FileId,
        image: PathBuf,
        slots: usize,
    ) -> io::Result<Self> {
        folder.boot.clone().map_err(io::Error::other)?;
        let path = Self::path(folder, id);
        let locked = create_locked(&path)?;
        let file = &locked.0;
        let len = (HEADER + slots * SLOT + PATH_ROOM).next_multiple_of(4096);
        // No later store can fail for lack of memory.
        if file.metadata()?.len() < len as u64 {
            fallocate(file, FallocateFlags::empty(), 0, len as u64)?;
        }
        Self::map(locked, path, folder, id, image, slots)
    }

    /// Opens the journal in a file that no process has locked, to look at its content. `None`:
    /// another process has it locked, or has removed it.
    ///
    /// # Errors
    /// The file cannot be opened or mapped, or the folder cannot be used.
    pub(crate) fn look(folder: &JournalFolder, id: FileId) -> io::Result<Option<Self>> {
        let path = Self::path(folder, id);
        let file = options().open(&path)?;
        match lock_at(file, &path)? {
            Lock::Held(locked) => Self::map(locked, path, folder, id, PathBuf::new(), 0).map(Some),
            Lock::Used | Lock::Removed => Ok(None),
        }
    }

    fn map(
        locked: LockedFile,
        path: PathBuf,
        folder: &JournalFolder,
        id: FileId,
        image: PathBuf,
        slots: usize,
    ) -> io::Result<Self> {
        let failed = |error: MapError| io::Error::other(error);
        let boot = folder.boot.clone().map_err(io::Error::other)?;
        let pages = SharedPages::of_file(locked.0.try_clone()?.into()).map_err(failed)?;
        let [boot, more] = [0, 8].map(|at| {
            let bytes = boot.get(at..).and_then(|rest| rest.first_chunk());
            u64::from_le_bytes(bytes.copied().unwrap_or_default())
        });
        let number = u64::from(random());
        let version = u64::from(JOURNAL_VERSION);
        Ok(Self {
            pages,
            _lock: locked,
            path,
            image,
            slots,
            fields: [version, number, boot, more, id.0, id.1, slots as u64],
            #[cfg(test)]
            stores: AtomicU64::new(u64::MAX),
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
        #[cfg(test)]
        match self.stores.load(Ordering::Relaxed).checked_sub(1) {
            Some(left) => self.stores.store(left, Ordering::Relaxed),
            None => return,
        }
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
        self.set(PLACE_MISSED, 0);
        self.set_image_path();
        for (field, place) in self.fields.iter().zip((PLACE_FIELDS..).step_by(8)) {
            self.set(place, *field);
        }
        self.set(PLACE_SUM, sum(&self.fields));
        self.set(PLACE_MAGIC, MAGIC);
    }

    /// Stores the image's path behind the slots, unless it is too long.
    fn set_image_path(&self) {
        let place = HEADER + self.slots * SLOT;
        let bytes = self.image.as_os_str().as_bytes();
        let bytes = if bytes.len() > MAX_PATH { &[] } else { bytes };
        let len = bytes.len() as u64;
        let words: Vec<u64> = [len].into_iter().chain(path_words(bytes)).collect();
        self.set(place, sum(&words));
        for (word, place) in words.into_iter().zip((place + 8..).step_by(8)) {
            self.set(place, word);
        }
    }

    /// Returns the path of the image's file, as it was when the journal began. `None`: it is not
    /// known. To be called for a journal whose header [`Journal::recorded`] has checked.
    pub(crate) fn image_path(&self) -> Option<PathBuf> {
        let slots = usize::try_from(self.get(PLACE_FIELDS + 48)).ok()?;
        let place = slots.checked_mul(SLOT)?.checked_add(HEADER)?;
        let len = usize::try_from(self.get(place + 8)).ok();
        let len = len.filter(|len| (1..=MAX_PATH).contains(len))?;
        let places = (place + 8..).step_by(8).take(1 + len.div_ceil(8));
        let words: Vec<u64> = places.map(|place| self.get(place)).collect();
        if self.get(place) != sum(&words) {
            return None;
        }
        let path = words.into_iter().skip(1);
        let mut bytes: Vec<u8> = path.flat_map(u64::to_le_bytes).collect();
        bytes.truncate(len);
        Some(OsString::from_vec(bytes).into())
    }

    /// Records that the image was not found at a time, in seconds since the host's boot. Returns
    /// the time at which it was first not found.
    pub(crate) fn missed(&self, now: u64) -> u64 {
        if self.get(PLACE_MISSED) == 0 {
            self.set(PLACE_MISSED, now);
        }
        self.get(PLACE_MISSED)
    }

    /// Records that the image was found.
    pub(crate) fn found(&self) {
        self.set(PLACE_MISSED, 0);
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

    /// Removes the file of a journal that no image needs. The file at its path is this one, which
    /// is locked: a process that waits for the lock creates another one ([`is_at`]).
    pub(crate) fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            let path = self.path.display();
            tracing::debug!("{path}: a journal that no image needs was not removed: {error}");
        }
    }
}

fn options() -> fs::OpenOptions {
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(NO_LINKS);
    options
}

/// Opens the file of a journal, creates it if there is none, and locks it.
fn create_locked(path: &Path) -> io::Result<LockedFile> {
    let began = Instant::now();
    loop {
        let file = options().create(true).truncate(false).open(path)?;
        match lock_at(file, path)? {
            Lock::Held(locked) => return Ok(locked),
            Lock::Removed => {}
            Lock::Used if began.elapsed() < LOCK_TIMEOUT => thread::sleep(LOCK_PAUSE),
            Lock::Used => return Err(io::Error::other("another process uses it")),
        }
    }
}

/// Result of an attempt to lock the file of a journal.
enum Lock {
    Held(LockedFile),
    /// Another process has the file locked.
    Used,
    /// Another process has removed the file, which it had locked until then.
    Removed,
}

/// Locks the file of a journal, which was opened at `path`.
fn lock_at(file: File, path: &Path) -> io::Result<Lock> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(Lock::Used),
        Err(error) => return Err(error.into()),
    }
    let locked = LockedFile(file);
    Ok(if is_at(&locked.0, path)? {
        Lock::Held(locked)
    } else {
        Lock::Removed
    })
}

/// Returns whether this open file is the one at this path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the bytes of a path as words, the last one filled up with zeroes.
fn path_words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word.iter_mut()
            .zip(chunk)
            .for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(word)
    })
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

    fn open(folder: &JournalFolder, id: FileId, slots: usize) -> io::Result<Journal> {
        Journal::open(folder, id, "/disks/vm0.qcow2".into(), slots)
    }

    #[test]
    fn journal_returns_recorded_entries_to_next_process() {
        let (_directory, folder) = folder(1);
        let journal = open(&folder, (7, 9), 4).unwrap();
        assert_eq!(journal.recorded(), Ok(None));
        journal.begin();
        journal.record(0, 0x40008, L2Entry::data(0x50000));
        journal.record(3, 0x40010, ENTRY);
        journal.clear(0);
        let number = journal.number();
        drop(journal);
        let next = open(&folder, (7, 9), SLOTS).unwrap();
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
        let journal = open(&folder, (7, 9), SLOTS).unwrap();
        journal.begin();
        journal.record(5, 0x40010, ENTRY);
        drop(journal);
        let open = |boot, id| {
            let folder = JournalFolder {
                boot: Ok([boot; 16]),
                ..folder.clone()
            };
            let own = open(&folder, (7, 9), SLOTS).unwrap();
            let mut fields = own.fields;
            (fields[4], fields[5]) = id;
            Journal { fields, ..own }.recorded()
        };
        assert!(open(1, (7, 9)).is_ok());
        assert_eq!(open(2, (7, 9)), Err(JournalError::Boot));
        assert_eq!(open(1, (7, 8)), Err(JournalError::OtherFile));
        let version = u64::from(JOURNAL_VERSION) + 1;
        let journal = super::Journal::open(&folder, (7, 9), PathBuf::new(), SLOTS).unwrap();
        let mut fields = journal.fields;
        fields[0] = version;
        let journal = Journal { fields, ..journal };
        journal.begin();
        drop(journal);
        assert_eq!(open(1, (7, 9)), Err(JournalError::Version(version)));
    }

    #[test]
    fn journal_has_path_of_image() {
        let (_directory, folder) = folder(1);
        for (path, slots) in [("/disks/vm0.qcow2", SLOTS), ("/a", 3), ("/12345678", 900)] {
            let journal = Journal::open(&folder, (7, 9), path.into(), slots).unwrap();
            journal.begin();
            journal.record(slots - 1, 0x40010, ENTRY);
            drop(journal);
            let journal = Journal::look(&folder, (7, 9)).unwrap().unwrap();
            assert_eq!(journal.recorded().unwrap().unwrap().entries.len(), 1);
            assert_eq!(journal.image_path(), Some(path.into()));
            // The checksum, the length, and a byte of the path.
            for place in [0, 8, 16] {
                let place = HEADER + slots * SLOT + place;
                let before = journal.get(place);
                journal.set(place, before ^ 2);
                assert_eq!(journal.image_path(), None);
                journal.set(place, before);
            }
        }
        let long = "/x".repeat(MAX_PATH);
        for path in ["", &long] {
            let journal = Journal::open(&folder, (7, 9), path.into(), SLOTS).unwrap();
            journal.begin();
            assert_eq!(journal.image_path(), None);
        }
    }

    /// A process that is killed while it records an entry leaves the others, and this one as a
    /// whole or not at all.
    #[test]
    fn record_that_is_killed_leaves_whole_slots() {
        let (_directory, folder) = folder(1);
        for stores in 0..4 {
            let journal = open(&folder, (7, 9), SLOTS).unwrap();
            journal.begin();
            journal.record(0, 0x40008, ENTRY);
            // A slot that was used before.
            journal.record(1, 0x40018, L2Entry::data(0x70000));
            journal.clear(1);
            journal.stores.store(stores, Ordering::Relaxed);
            journal.record(1, 0x40010, ENTRY);
            drop(journal);
            let journal = Journal::look(&folder, (7, 9)).unwrap().unwrap();
            let entries = journal.recorded().unwrap().unwrap().entries;
            let both = [(0x40008, ENTRY), (0x40010, ENTRY)];
            assert_eq!(entries, both[..if stores < 3 { 1 } else { 2 }]);
        }
    }

    /// A process that is killed while it begins a journal leaves no entry under its own number, and
    /// no journal that cannot be read.
    #[test]
    fn begin_that_is_killed_leaves_former_journal_or_new_one() {
        let (_directory, folder) = folder(1);
        // With slots for the header's last words to be among them.
        let mut stores = 0;
        loop {
            let journal = open(&folder, (7, 9), 40).unwrap();
            journal.begin();
            journal.record(3, 0x40008, ENTRY);
            let former = journal.number();
            drop(journal);
            let journal = open(&folder, (7, 9), 20).unwrap();
            journal.stores.store(stores, Ordering::Relaxed);
            journal.begin();
            let (number, ended) = (journal.number(), journal.stores.load(Ordering::Relaxed) > 0);
            drop(journal);
            let journal = Journal::look(&folder, (7, 9)).unwrap().unwrap();
            match journal.recorded() {
                Ok(None) => assert!(!ended),
                Ok(Some(found)) if found.number == former => assert!(!ended),
                Ok(Some(found)) => {
                    assert_eq!((found.number, found.entries.len()), (number, 0));
                    assert_eq!(journal.image_path(), Some("/disks/vm0.qcow2".into()));
                }
                Err(error) => panic!("{stores} stores: {error}"),
            }
            if ended {
                break;
            }
            stores += 1;
        }
    }

    #[test]
    fn journal_is_locked_while_it_is_used() {
        let (_directory, folder) = folder(1);
        let journal = open(&folder, (7, 9), SLOTS).unwrap();
        assert!(Journal::look(&folder, (7, 9)).unwrap().is_none());
        drop(journal);
        assert!(Journal::look(&folder, (7, 9)).unwrap().is_some());
    }

    /// Another process removes the file after this one has opened it, and before it is locked.
    #[test]
    fn file_that_was_removed_before_its_lock_is_not_used() {
        let (_directory, folder) = folder(1);
        let journal = open(&folder, (7, 9), SLOTS).unwrap();
        let path = journal.path.clone();
        let again = || lock_at(options().open(&path).unwrap(), &path).unwrap();
        assert!(matches!(again(), Lock::Used));
        let removed = options().open(&path).unwrap();
        journal.remove();
        drop(journal);
        assert!(matches!(lock_at(removed, &path).unwrap(), Lock::Removed));
        // Another file has taken the place of the removed one.
        let replaced = options().create(true).truncate(false).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let next = open(&folder, (7, 9), SLOTS).unwrap();
        assert!(matches!(lock_at(replaced, &path).unwrap(), Lock::Removed));
        drop(next);
        assert!(matches!(again(), Lock::Held(_)));
    }

    /// Another process removes the file while this one waits for its lock.
    #[test]
    fn journal_is_created_again_when_it_is_removed_meanwhile() {
        let (_directory, folder) = folder(1);
        let journal = open(&folder, (7, 9), SLOTS).unwrap();
        thread::scope(|scope| {
            let next = scope.spawn(|| open(&folder, (7, 9), SLOTS).unwrap());
            let waits = || {
                let own = fs::metadata(&journal.path).unwrap();
                let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
                let files = fds.filter_map(|fd| fs::metadata(fd.path()).ok());
                files.filter(|file| file.ino() == own.ino()).count() > 1
            };
            while !waits() {
                thread::yield_now();
            }
            journal.remove();
            drop(journal);
            let next = next.join().unwrap();
            next.begin();
            next.record(1, 0x40010, ENTRY);
        });
        let found = Journal::look(&folder, (7, 9)).unwrap().unwrap();
        assert_eq!(found.recorded().unwrap().unwrap().entries.len(), 1);
    }

    #[test]
    fn damaged_journal_is_refused() {
        let (_directory, folder) = folder(1);
        let journal = open(&folder, (7, 9), SLOTS).unwrap();
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
