//! A volume with small writes made atomic by a journal.

use super::journal::{SLOTS, journal_len};
use super::locks::{Hold, Locks};
use super::queue::AtomicQueue;
use crate::{
    AtomicWrites, FileLock, Info, Io, IoError, MAX_ATOMIC_UNIT, OpenQueue, Volume, VolumeError,
};
use dma::{Buffer, SegmentList};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// A wrapper that makes all writes within a unit atomic ([`AtomicWrites`]). Concurrent commands
/// never see part of a write, because a write locks its unit while it is outstanding. A power cut
/// never leaves part of a write, because the write is made durable in a journal before it is done
/// in place. Writes that the lower volume already promises to be atomic need no journal.
///
/// A journaled write consists of three durable writes: data to the journal, data in place, and the
/// removal of the entry. It is durable when it completes.
///
/// The first queue reads the journal and repeats the entries found there before any request begins.
#[derive(Debug)]
pub struct AtomicVolume {
    shared: Arc<AtomicState>,
}

/// State of an [`AtomicVolume`] that all its queues share.
#[derive(Debug)]
pub(super) struct AtomicState {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) journal: Arc<dyn Volume>,
    pub(super) unit: u32,
    /// Writes that the lower volume itself promises to be atomic, so that they need no journal.
    pub(super) below: AtomicWrites,
    pub(super) locks: Locks,
    /// Bitmap of the journal's free slots.
    slots: AtomicU64,
    /// Set when an entry could not be removed. No further change is made, so that the next opening
    /// can repeat the entry.
    broken: AtomicBool,
    /// Entries of the journal that could not be written in place, for example because the file
    /// system is full. Their blocks may be torn, so that reads take the data from here. A change of
    /// their blocks repeats the entry first.
    pending: Mutex<Vec<PendingWrite>>,
    has_pending: AtomicBool,
    pub(super) recovery: Mutex<Recovery>,
    /// Set when all entries found in the journal have been repeated.
    recovered: AtomicBool,
    /// Unfinished journaled writes of dropped queues, which another queue completes.
    orphans: Mutex<Vec<Orphan>>,
    has_orphans: AtomicBool,
}

/// Progress of the recovery, which repeats the writes found in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recovery {
    /// Recovery is not done yet, and no queue is doing it.
    Due,
    Running,
    Done,
    /// A slot cannot be read, so no request is started.
    Failed,
}

/// A write that is in the journal, and could not be done in place.
#[derive(Debug)]
pub(super) struct PendingWrite {
    pub(super) slot: u32,
    pub(super) offset: u64,
    pub(super) data: Vec<u8>,
}

impl PendingWrite {
    fn overlaps(&self, offset: u64, len: u64) -> bool {
        let end = self.offset.saturating_add(self.data.len() as u64);
        self.offset < offset.saturating_add(len) && offset < end
    }
}

/// A journaled write whose queue was dropped before it completed.
#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) slot: u32,
    pub(super) hold: Hold,
    pub(super) offset: u64,
    pub(super) data: Vec<u8>,
    /// Whether the journal already contains the whole write.
    pub(super) in_journal: bool,
}

impl AtomicVolume {
    /// Wraps `volume` with a journal in `journal`, which holds zeroes or a journal of the same
    /// volume and unit. `unit`: a power of two from 4096 to [`MAX_ATOMIC_UNIT`].
    ///
    /// # Errors
    /// [`VolumeError::Size`] when the unit is invalid, the journal does not have the size
    /// [`AtomicVolume::journal_len`], or its blocks are larger than 4096 bytes.
    pub fn new(
        volume: Arc<dyn Volume>,
        journal: Arc<dyn Volume>,
        unit: u32,
    ) -> Result<Self, VolumeError> {
        let wrong = |size: u64, why| Err(VolumeError::Size { size, why });
        if !unit.is_power_of_two() || !(4096..=MAX_ATOMIC_UNIT).contains(&unit) {
            let why = "as a unit of atomic writes, 4096 to 65536, a power of two, is";
            return wrong(unit.into(), why);
        }
        let info = journal.info();
        if info.size < journal_len(unit) || info.block_size > 4096 {
            return wrong(info.size, "a journal of atomic writes is longer");
        }
        let below = volume.atomic_writes();
        Ok(Self {
            shared: Arc::new(AtomicState {
                volume,
                journal,
                unit,
                below,
                locks: Locks::new(unit),
                slots: AtomicU64::new(u64::MAX >> (64 - SLOTS)),
                broken: AtomicBool::new(false),
                pending: Mutex::default(),
                has_pending: AtomicBool::new(false),
                recovery: Mutex::new(Recovery::Due),
                recovered: AtomicBool::new(false),
                orphans: Mutex::default(),
                has_orphans: AtomicBool::new(false),
            }),
        })
    }

    /// Returns the size in bytes of a journal for write units of `unit` bytes.
    pub const fn journal_len(unit: u32) -> u64 {
        journal_len(unit)
    }
}

impl AtomicState {
    pub(super) fn take_slot(&self) -> Option<u32> {
        let lowest = |free: u64| (free != 0).then_some(free & free.wrapping_sub(1));
        let (taken, failed) = (Ordering::Acquire, Ordering::Relaxed);
        let before = self.slots.fetch_update(taken, failed, lowest);
        before.ok().map(u64::trailing_zeros)
    }

    pub(super) fn free_slot(&self, slot: u32) {
        self.slots.fetch_or(1 << (slot % 64), Ordering::Release);
    }

    /// Keeps a write that could not be done in place, and its slot.
    pub(super) fn postpone(&self, write: PendingWrite, error: IoError) {
        // Recovery has not taken the slot of an entry that it found.
        self.slots
            .fetch_and(!(1 << (write.slot % 64)), Ordering::AcqRel);
        let mut pending = self.pending.lock().unpoisoned();
        if pending.is_empty() {
            tracing::warn!(
                "{}: an atomic write of {} bytes at {} is in the journal, but cannot be done in \
                 place ({error}); reads have its data, and the next write to these blocks, or the \
                 next opening of the volume, repeats it",
                self.volume.info().description,
                write.data.len(),
                write.offset
            );
        }
        pending.push(write);
        self.has_pending.store(true, Ordering::Release);
    }

    /// Returns the range of a pending write that overlaps this one: offset and length.
    pub(super) fn pending_in(&self, offset: u64, len: u64) -> Option<(u64, u64)> {
        if !self.has_pending.load(Ordering::Acquire) {
            return None;
        }
        let pending = self.pending.lock().unpoisoned();
        let found = pending.iter().find(|write| write.overlaps(offset, len));
        found.map(|write| (write.offset, write.data.len() as u64))
    }

    /// Returns the range of any pending write if they occupy all slots of the journal.
    pub(super) fn pending_in_full_journal(&self) -> Option<(u64, u64)> {
        let pending = self.pending.lock().unpoisoned();
        let first = pending.first().filter(|_| pending.len() as u32 == SLOTS);
        first.map(|write| (write.offset, write.data.len() as u64))
    }

    /// Removes the pending write at this offset. The caller owns its unit.
    pub(super) fn take_pending(&self, offset: u64) -> Option<PendingWrite> {
        let mut pending = self.pending.lock().unpoisoned();
        let index = pending.iter().position(|write| write.offset == offset)?;
        let write = pending.swap_remove(index);
        self.has_pending
            .store(!pending.is_empty(), Ordering::Release);
        Some(write)
    }

    /// Copies pending writes over data that was read from the volume at `offset`.
    pub(super) fn add_pending(&self, offset: u64, data: &SegmentList) {
        if !self.has_pending.load(Ordering::Acquire) {
            return;
        }
        let len = data.len_bytes();
        for write in self.pending.lock().unpoisoned().iter() {
            if !write.overlaps(offset, len) {
                continue;
            }
            // Either the write or the data that was read begins first.
            let skipped = offset.saturating_sub(write.offset) as usize;
            let to = write.offset.saturating_sub(offset);
            let part = write.data.get(skipped..).unwrap_or_default();
            let room = usize::try_from(len.saturating_sub(to)).unwrap_or(usize::MAX);
            data.copy_from(to, part.get(..room).unwrap_or(part));
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    pub(super) fn breaks(&self, what: &str, error: IoError) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "{}: {what} ({error}); refusing writes until the volume is reopened and its \
                 journal replayed",
                self.volume.info().description
            );
        }
    }

    pub(super) fn is_recovered(&self) -> bool {
        self.recovered.load(Ordering::Acquire)
    }

    pub(super) fn set_recovery(&self, now: Recovery) {
        *self.recovery.lock().unpoisoned() = now;
        self.recovered
            .store(now == Recovery::Done, Ordering::Release);
    }

    /// Claims the recovery for the calling queue. Returns whether this queue has to read the
    /// journal.
    pub(super) fn begin_recovery(&self) -> bool {
        let mut recovery = self.recovery.lock().unpoisoned();
        let due = *recovery == Recovery::Due;
        if due {
            *recovery = Recovery::Running;
        }
        due
    }

    pub(super) fn has_failed(&self) -> bool {
        *self.recovery.lock().unpoisoned() == Recovery::Failed
    }

    pub(super) fn leave(&self, orphan: Orphan) {
        self.orphans.lock().unpoisoned().push(orphan);
        self.has_orphans.store(true, Ordering::Release);
    }

    pub(super) fn adopt(&self) -> Option<Orphan> {
        if !self.has_orphans.load(Ordering::Acquire) {
            return None;
        }
        let mut orphans = self.orphans.lock().unpoisoned();
        let orphan = orphans.pop();
        self.has_orphans
            .store(!orphans.is_empty(), Ordering::Release);
        orphan
    }
}

impl Volume for AtomicVolume {
    fn info(&self) -> Info {
        let info = self.shared.volume.info();
        let (unit, how) = (self.shared.unit, info.description);
        Info {
            description: format!(
                "{how}, with a journal: atomic writes within units of {unit} bytes"
            ),
            ..info
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::new(AtomicQueue::new(self.shared.clone(), io)?))
    }

    fn id(&self) -> Vec<u8> {
        self.shared.volume.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.shared.volume)
    }

    /// Reads from the lower volume. Entries of the journal may not have been repeated yet.
    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        self.shared.volume.read_at(offset, buffer)
    }

    /// The journal is a second file.
    fn file_lock(&self) -> Option<Arc<FileLock>> {
        None
    }

    fn atomic_writes(&self) -> AtomicWrites {
        AtomicWrites::within(self.shared.unit.into(), 0, 0)
    }
}
