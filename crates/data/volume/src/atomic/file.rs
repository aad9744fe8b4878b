//! Journals of atomic writes that are stored in a file of their own.

use super::AtomicVolume;
use super::journal::{Head, JournalEntry, SLOTS, journal_len, name, slot_at, slot_len};
use crate::{FileOptions, FileVolume, Format, PreviousProcess, Volume, VolumeError};
use dma::Buffer;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

impl AtomicVolume {
    /// Wraps `file` in a volume with atomic writes. The journal is `path`: a file, which is created
    /// if it does not exist, or a block device. No other volume may use the journal at the same
    /// time.
    ///
    /// # Errors
    /// The conditions of [`AtomicVolume::new`]. [`VolumeError`] also when the journal cannot be
    /// opened or created, holds other data or writes of another volume, or when the volume or the
    /// journal is not on a local disk.
    pub fn with_file(
        file: Arc<FileVolume>,
        path: &Path,
        unit: u32,
        previous: PreviousProcess,
    ) -> Result<Self, VolumeError> {
        let system = |what| {
            move |error| VolumeError::System {
                path: path.into(),
                what,
                error,
            }
        };
        let wrong = |why: &'static str| VolumeError::Journal {
            path: path.into(),
            why,
        };
        make(path, unit).map_err(system("cannot be made as the journal of atomic writes"))?;
        let options = FileOptions {
            format: Format::Raw,
            previous,
            atomic: 0,
            ..FileOptions::default()
        };
        let journal = FileVolume::open(path, options)?;
        if file.has_threads() || journal.has_threads() {
            // An abandoned write there may still be done, after later writes.
            return Err(wrong(
                "it and the volume have to be on disks of this machine",
            ));
        }
        let volume = Self::new(file.clone(), Arc::new(journal), unit)?;
        let wanted = Head {
            unit,
            volume: name(&file.id()),
        };
        // Only now that nobody else has it.
        let opened = File::options().read(true).write(true).open(path);
        let opened = opened.map_err(system("cannot be opened"))?;
        let mut head = Buffer::new(4096);
        let read = opened.read_exact_at(&mut head, 0);
        read.map_err(system("cannot be read"))?;
        match Head::parse(&head) {
            Some(found) if found == wanted => return Ok(volume),
            Some(found) if is_empty(&opened, found.unit).map_err(system("cannot be read"))? => {}
            Some(_) => {
                return Err(wrong(
                    "it holds writes of another volume, or of another unit: open that once, and it \
                     repeats them",
                ));
            }
            None if head.iter().all(|byte| *byte == 0) => {}
            None => return Err(wrong("the file holds other data")),
        }
        format(&opened, wanted).map_err(system("cannot be written"))?;
        Ok(volume)
    }
}

/// Opens the journal file, or creates it if it does not exist.
fn make(path: &Path, unit: u32) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).mode(0o600);
    let file = options.open(path)?;
    let found = file.metadata()?;
    if found.file_type().is_block_device() || found.len() > 0 {
        return Ok(());
    }
    // All of it, so that no write finds that there is no space.
    let len = journal_len(unit);
    if fallocate(&file, FallocateFlags::empty(), 0, len).is_err() {
        file.write_all_at(&vec![0; len as usize], 0)?;
    }
    file.sync_all()?;
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Returns whether the journal contains no write that recovery would have to repeat.
fn is_empty(journal: &File, unit: u32) -> io::Result<bool> {
    if unit > crate::MAX_ATOMIC_UNIT {
        return Ok(false);
    }
    let mut slot = vec![0; slot_len(unit) as usize];
    for number in 0..SLOTS {
        journal.read_exact_at(&mut slot, slot_at(unit, number))?;
        if JournalEntry::of_slot(&slot, unit).is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Formats the file as an empty journal. The head is written last, because a file without a head
/// does not count as a journal.
fn format(journal: &File, head: Head) -> io::Result<()> {
    journal.write_all_at(&vec![0; journal_len(head.unit) as usize], 0)?;
    journal.sync_data()?;
    journal.write_all_at(&head.to_bytes(), 0)?;
    journal.sync_data()
}
