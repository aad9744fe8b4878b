//! L1 table of an image, and a cache of its L2 tables.
//!
//! L2 tables are cached in slices of up to 4 KiB with atomic entries, so that any worker reads a
//! slice without a lock. A slice is written only by the task that has locked its guest clusters
//! ([`crate::image::Writer::clusters`]), first on the disk and then in memory, so that all data
//! that a guest reads through it survives this process. The lock on the list of slices is taken
//! only to find a slice that the caller has not cached, and never while waiting for a file.

use crate::format::{Geometry, L2Entry, Mapping, table_entry};
use crate::store::Store;
use crate::wait::wait;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use sync::Unpoisoned;
use volume::{IoError, IoErrorKind};

/// Logarithm of the number of entries in a slice, unless a whole table has fewer.
const SLICE_BITS: u32 = 9;

/// L1 table of an image, which refers to the L2 tables, in memory.
#[derive(Debug)]
pub(crate) struct L1 {
    /// Byte offset of the L1 table in the file.
    pub(crate) at: u64,
    entries: Box<[AtomicU64]>,
}

impl L1 {
    /// Creates the table from the bytes that were read; invalid entries count as unallocated.
    pub(crate) fn new(at: u64, bytes: &[u8]) -> Self {
        Self {
            at,
            entries: numbers(bytes).map(AtomicU64::new).collect(),
        }
    }

    /// Returns the number of entries of the L1 table.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns an entry of the L1 table in its on-disk form; 0 for an index beyond the end.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> u64 {
        let entry = self.entries.get(index);
        entry.map_or(0, |entry| entry.load(Ordering::Acquire))
    }

    pub(crate) fn set(&self, index: usize, entry: u64) {
        if let Some(place) = self.entries.get(index) {
            place.store(entry, Ordering::Release);
        }
    }

    /// Returns all entries of the L1 table in their on-disk form.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries
            .iter()
            .map(|entry| entry.load(Ordering::Acquire))
    }
}

/// Returns the big-endian 64-bit numbers that `bytes` consists of.
pub(crate) fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let (chunks, _) = bytes.as_chunks::<8>();
    chunks.iter().map(|chunk| u64::from_be_bytes(*chunk))
}

/// Part of an L2 table that is cached in memory (slice).
#[derive(Debug)]
pub(crate) struct Slice {
    /// Byte offset of the slice in the file.
    at: u64,
    entries: Box<[AtomicU64]>,
    /// Whether the slice was used since the last pass that removes unused slices.
    used: AtomicBool,
}

impl Slice {
    /// Returns the L2 entry at this index; an invalid one beyond the end.
    #[inline(always)]
    pub(crate) fn get(&self, index: usize) -> L2Entry {
        let entry = self.entries.get(index);
        entry.map_or(L2Entry::INVALID, |entry| {
            L2Entry(entry.load(Ordering::Acquire))
        })
    }

    /// Returns the number of L2 entries in the slice.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the byte offset in the file of the L2 entry at this index.
    pub(crate) fn place(&self, index: usize) -> u64 {
        self.at + index as u64 * 8
    }

    /// Sets an L2 entry in memory, after it was written to the disk.
    pub(crate) fn set(&self, index: usize, entry: L2Entry) {
        if let Some(place) = self.entries.get(index) {
            place.store(entry.0, Ordering::Release);
        }
    }
}

/// Result of looking up a guest cluster in the cached tables.
#[derive(Debug, Clone)]
pub(crate) enum TableLookup {
    Slice(Arc<Slice>),
    /// There is no L2 table, so none of the slice's clusters is allocated.
    NoTable,
}

enum Slot {
    /// A slice that is being read, and the wakers of the tasks that wait for it.
    Loading(Vec<Waker>),
    Ready(Arc<Slice>),
}

/// L1 table and cached L2 slices of an image.
pub(crate) struct Tables {
    geometry: Geometry,
    layer: usize,
    slice_bits: u32,
    l1: Mutex<Arc<L1>>,
    /// Number of times that the L1 table was replaced because the disk has grown.
    l1_count: AtomicU32,
    slices: Mutex<HashMap<u64, Slot>>,
    /// Maximum number of L2 slices in the cache.
    most: usize,
}

impl Tables {
    /// Creates the cache for the image at `layer` of its chain. `bytes`: memory limit for L2
    /// tables.
    pub(crate) fn new(geometry: Geometry, layer: usize, l1: L1, bytes: u64) -> Self {
        let slice_bits = geometry.table_bits().min(SLICE_BITS);
        let most = usize::try_from(bytes >> (slice_bits + 3)).unwrap_or(usize::MAX);
        Self {
            geometry,
            layer,
            slice_bits,
            l1: Mutex::new(Arc::new(l1)),
            l1_count: AtomicU32::new(0),
            slices: Mutex::default(),
            most: most.max(16),
        }
    }

    /// Returns the number of guest clusters that a slice maps, as a power of two.
    #[inline]
    pub(crate) fn slice_bits(&self) -> u32 {
        self.slice_bits
    }

    /// Returns the maximum number of L2 slices in the cache.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Returns the present L1 table.
    pub(crate) fn l1(&self) -> Arc<L1> {
        self.l1.lock().unpoisoned().clone()
    }

    /// Returns a number that changes whenever the L1 table is replaced.
    #[inline]
    pub(crate) fn l1_count(&self) -> u32 {
        self.l1_count.load(Ordering::Acquire)
    }

    /// Replaces the L1 table.
    pub(crate) fn replace_l1(&self, l1: L1) {
        *self.l1.lock().unpoisoned() = Arc::new(l1);
        self.l1_count.fetch_add(1, Ordering::Release);
    }

    /// Returns the index of the L1 entry for a slice.
    #[inline]
    pub(crate) fn l1_index(&self, slice: u64) -> usize {
        let index = slice >> (self.geometry.table_bits() - self.slice_bits);
        usize::try_from(index).unwrap_or(usize::MAX)
    }

    /// Returns L2 slice number `slice` if it is cached.
    pub(crate) fn cached(&self, slice: u64) -> Option<Arc<Slice>> {
        match self.slices.lock().unpoisoned().get(&slice) {
            Some(Slot::Ready(found)) => {
                found.used.store(true, Ordering::Relaxed);
                Some(found.clone())
            }
            _ => None,
        }
    }

    /// Returns the slice, and reads it if it is not cached. `check` is applied to each of its
    /// entries.
    pub(crate) async fn look(
        &self,
        store: &impl Store,
        slice: u64,
        check: impl Fn(L2Entry) -> L2Entry,
    ) -> Result<TableLookup, IoError> {
        loop {
            let table = self.l1().get(self.l1_index(slice));
            let Some((table, _)) = table_entry(table, &self.geometry) else {
                return Err(IoErrorKind::MediaRead.into());
            };
            if table == 0 {
                return Ok(TableLookup::NoTable);
            }
            let loads = {
                let mut slices = self.slices.lock().unpoisoned();
                match slices.get(&slice) {
                    Some(Slot::Ready(found)) => {
                        found.used.store(true, Ordering::Relaxed);
                        return Ok(TableLookup::Slice(found.clone()));
                    }
                    Some(Slot::Loading(_)) => false,
                    None => {
                        slices.insert(slice, Slot::Loading(Vec::new()));
                        true
                    }
                }
            };
            if loads {
                let loading = Loading {
                    tables: self,
                    slice,
                    done: None,
                };
                let found = self.load(store, slice, table, loading, &check).await?;
                return Ok(TableLookup::Slice(found));
            }
            wait(store, |context| {
                match self.slices.lock().unpoisoned().get_mut(&slice) {
                    Some(Slot::Loading(waiters)) => {
                        waiters.push(context.waker().clone());
                        Poll::Pending
                    }
                    _ => Poll::Ready(()),
                }
            })
            .await?;
        }
    }

    async fn load(
        &self,
        store: &impl Store,
        slice: u64,
        table: u64,
        mut loading: Loading<'_>,
        check: &impl Fn(L2Entry) -> L2Entry,
    ) -> Result<Arc<Slice>, IoError> {
        let in_table = slice & ((1 << (self.geometry.table_bits() - self.slice_bits)) - 1);
        let at = table + (in_table << (self.slice_bits + 3));
        let bytes = store.read(self.layer, at, 8 << self.slice_bits).await?;
        let entries = numbers(&bytes).map(|entry| AtomicU64::new(check(L2Entry(entry)).0));
        let found = Arc::new(Slice {
            at,
            entries: entries.collect(),
            used: AtomicBool::new(true),
        });
        loading.done = Some(found.clone());
        Ok(found)
    }

    /// Evicts unused slices when there are too many: first those that were not looked up since the
    /// last eviction, then others.
    fn trim(&self, slices: &mut HashMap<u64, Slot>) {
        for all in [false, true] {
            if slices.len() <= self.most {
                return;
            }
            // A few more slices than necessary are evicted, so that eviction is rare.
            let mut wanted = (slices.len() - self.most) + self.most / 16;
            slices.retain(|_, slot| match slot {
                Slot::Ready(slice) if wanted > 0 && Arc::strong_count(slice) == 1 => {
                    let keep = slice.used.swap(false, Ordering::Relaxed) && !all;
                    wanted -= usize::from(!keep);
                    keep
                }
                _ => true,
            });
        }
    }
}

/// Returns the L2 entry if it is valid for this geometry, otherwise [`L2Entry::INVALID`].
pub(crate) fn checked(entry: L2Entry, geometry: &Geometry) -> L2Entry {
    match entry.mapping(geometry) {
        Mapping::Invalid => L2Entry::INVALID,
        _ => entry,
    }
}

/// Guard of a slice that is being read. Dropping it wakes the waiting tasks, whether or not the
/// read succeeded.
struct Loading<'a> {
    tables: &'a Tables,
    slice: u64,
    done: Option<Arc<Slice>>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut slices = self.tables.slices.lock().unpoisoned();
        let before = match self.done.take() {
            Some(found) => slices.insert(self.slice, Slot::Ready(found)),
            None => slices.remove(&self.slice),
        };
        if slices.len() > self.tables.most {
            self.tables.trim(&mut slices);
        }
        drop(slices);
        if let Some(Slot::Loading(waiters)) = before {
            waiters.into_iter().for_each(Waker::wake);
        }
    }
}
