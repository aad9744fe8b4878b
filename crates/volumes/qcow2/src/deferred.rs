//! L2 entries of new clusters that are valid in memory and not in the image yet.
//!
//! An entry is deferred where nothing in the image has to be freed for it: the guest cluster had no
//! host cluster, or keeps its own. Its record in the [`Journal`] comes first, so that a killed
//! process loses no write that was answered. The entries go to the image together
//! ([`Writer::write_back`]): when the guest flushes, before another change of the same entries,
//! when many wait or have waited for some seconds ([`Deferred::is_due`]), and when the volume is
//! closed.

use crate::format::L2Entry;
use crate::image::{Allocated, Image, Writer};
use crate::journal::Journal;
use crate::read::StartedOperations;
use crate::store::{Access, FileRole, Store};
use crate::tables::Slice;
use crate::wait::RangeLocks;
use dma::{Buffer, SegmentList};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use sync::Unpoisoned;
use volume::{IoError, Op};

/// Deferred entries of an image, with their journal.
pub(crate) struct Deferred {
    journal: Journal,
    pending: Mutex<Pending>,
    /// Lock of the task that writes entries to the image.
    turn: RangeLocks,
    /// Number of entries.
    count: AtomicUsize,
    /// Whether a queue should write the entries in the background.
    due: AtomicBool,
    /// Number of times that entries were written to the image.
    turns: AtomicU64,
}

struct Pending {
    /// Deferred entries, by their byte offsets in the image.
    entries: BTreeMap<u64, DeferredEntry>,
    /// Free slots of the journal.
    free: Vec<usize>,
}

#[derive(Clone)]
struct DeferredEntry {
    entry: L2Entry,
    /// Slice with the entry, which stays in memory because this refers to it.
    _slice: Arc<Slice>,
    slot: usize,
    /// Whether the entry's cluster must be durable before the image refers to it.
    barrier: bool,
}

impl Deferred {
    /// Creates a list without entries, which begins with [`Deferred::begin`].
    pub(crate) fn new(journal: Journal) -> Self {
        let free = (0..journal.slots()).rev().collect();
        Self {
            journal,
            pending: Mutex::new(Pending {
                entries: BTreeMap::new(),
                free,
            }),
            turn: RangeLocks::default(),
            count: AtomicUsize::new(0),
            due: AtomicBool::new(false),
            turns: AtomicU64::new(0),
        }
    }

    /// Begins with an empty journal: the image has all that a previous process has recorded.
    pub(crate) fn begin(&self) {
        self.journal.begin();
    }

    /// Returns the number of the journal, for the image's header.
    pub(crate) fn number(&self) -> u32 {
        self.journal.number()
    }

    /// Removes the journal's file, unless entries wait. To be called while the image is locked.
    pub(crate) fn remove(&self) {
        if self.is_empty() {
            self.journal.remove();
        }
    }

    /// Returns whether so many entries can be deferred at once.
    pub(crate) fn takes(&self, entries: usize) -> bool {
        !self.journal.is_lost() && entries <= self.journal.slots()
    }

    /// Has a queue write the entries in the background.
    pub(crate) fn request(&self) {
        self.due.store(true, Ordering::Relaxed);
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unpoisoned()
    }

    /// Returns whether no entry is deferred.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Returns the number of times that entries were written to the image.
    pub(crate) fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Returns whether a queue should write the entries, once for each request and for each time
    /// that half of the slots have become used.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed) && self.due.swap(false, Ordering::Relaxed)
    }

    /// Returns whether an entry at these byte offsets of the image is deferred.
    fn has_any(&self, places: Range<u64>) -> bool {
        self.pending().entries.range(places).next().is_some()
    }

    /// Records entries of a slice by their index. `false`: the journal has no room for them.
    fn record(&self, slice: &Arc<Slice>, changed: &[(usize, L2Entry)], barrier: bool) -> bool {
        let mut pending = self.pending();
        let left = pending.free.len().checked_sub(changed.len());
        let Some(left) = left else {
            return false;
        };
        let half = self.journal.slots() / 2;
        if pending.free.len() >= half && left < half {
            self.request();
        }
        for &(index, entry) in changed {
            // Enough slots are free.
            let Some(slot) = pending.free.pop() else {
                return false;
            };
            let at = slice.place(index);
            self.journal.record(slot, at, entry);
            crash::point!("qcow2.entry.recorded");
            // No entry is there yet: a deferred one refers to data, and is not deferred again.
            pending.entries.insert(
                at,
                DeferredEntry {
                    entry,
                    _slice: slice.clone(),
                    slot,
                    barrier,
                },
            );
        }
        self.count.store(pending.entries.len(), Ordering::Release);
        true
    }

    /// Removes entries that the image has.
    fn forget(&self, written: BTreeMap<u64, DeferredEntry>) {
        let mut pending = self.pending();
        for (at, DeferredEntry { slot, .. }) in written {
            self.journal.clear(slot);
            pending.entries.remove(&at);
            pending.free.push(slot);
        }
        self.count.store(pending.entries.len(), Ordering::Release);
        self.turns.fetch_add(1, Ordering::Relaxed);
    }
}

impl Image {
    /// Sets adjacent entries of a slice in memory, and leaves their write to the image for later.
    /// The caller has locked the guest clusters, and has written their data. No entry that changes
    /// has had another host cluster before. `barrier`: the data must be durable before the image
    /// refers to it. Keeps the allocated clusters as soon as an entry refers to them, even if an
    /// error follows.
    pub(crate) async fn defer_entries(
        &self,
        deferred: &Deferred,
        (writer, allocated): (&Writer, Vec<Allocated<'_>>),
        store: &impl Store,
        (slice, first): (&Arc<Slice>, usize),
        entries: &[L2Entry],
        barrier: bool,
    ) -> Result<(), IoError> {
        let entries = (first..).zip(entries.iter().copied());
        let changed: Vec<(usize, L2Entry)> = entries
            .filter(|(index, entry)| slice.get(*index) != *entry)
            .collect();
        while !deferred.record(slice, &changed, barrier) {
            writer.write_back(store).await?;
        }
        allocated.into_iter().for_each(|new| new.keep(&Ok(())));
        // A flush that has not seen the entries does not count as one that made them durable.
        writer.changed();
        for (index, entry) in changed {
            slice.set(index, entry);
        }
        if deferred.journal.is_lost() {
            // The records were lost, too: the image has to have the entries before the guest is
            // answered.
            writer.write_back(store).await?;
        }
        Ok(())
    }
}

impl Writer {
    /// Returns whether an L2 entry at these byte offsets of the image is deferred.
    pub(crate) fn has_deferred(&self, places: Range<u64>) -> bool {
        let deferred = self.deferred.as_ref();
        deferred.is_some_and(|deferred| deferred.has_any(places))
    }

    /// Writes all deferred entries to the image: refcounts first, then the entries, once the
    /// clusters are durable that have to be. The entries themselves are not durable yet.
    pub(crate) async fn write_back(&self, store: &impl Store) -> Result<(), IoError> {
        let deferred = self.deferred.as_ref().filter(|all| !all.is_empty());
        let Some(deferred) = deferred else {
            return Ok(());
        };
        let _turn = deferred.turn.lock(store, 0..1).await?;
        let entries = deferred.pending().entries.clone();
        let _shield = store.shield();
        self.settle_all(store).await?;
        if entries.values().any(|entry| entry.barrier) {
            self.barrier(store).await?;
        }
        crash::point!("qcow2.clusters.durable");
        let mut started = StartedOperations::default();
        let mut result = Ok(());
        for (at, bytes) in runs(&entries) {
            result = started.below_most().await;
            if result.is_err() {
                break;
            }
            started.push(store.start(Access {
                layer: 0,
                part: FileRole::Tables,
                op: Op::Write { fua: false },
                at,
                len: bytes.len() as u64,
                data: SegmentList::owned(Buffer::from_slice(&bytes)),
            }));
        }
        // Entries whose write has failed stay deferred, and are written again.
        result.and(started.all().await)?;
        crash::point!("qcow2.entries.written");
        deferred.forget(entries);
        crash::point!("qcow2.entries.forgotten");
        Ok(())
    }
}

/// Returns the bytes of adjacent entries, with their byte offset in the image.
fn runs(entries: &BTreeMap<u64, DeferredEntry>) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (&at, DeferredEntry { entry, .. }) in entries {
        let bytes = entry.0.to_be_bytes();
        match runs.last_mut() {
            Some((start, run)) if *start + run.len() as u64 == at => run.extend(bytes),
            _ => runs.push((at, bytes.to_vec())),
        }
    }
    runs
}
