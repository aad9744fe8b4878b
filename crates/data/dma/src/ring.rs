//! Memory of a submission or completion queue.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::table::PageAddresses;
use crate::{Access, DmaError, DmaMap, lines::Evict, prefetch, racy};

/// Memory of a submission or completion queue: entries of one size, resolved once, page by page (a
/// vIOMMU may scatter them). A ring keeps its memory mapped, so it never dangles. After a change of
/// the map ([`DmaMap::generation`]) its owner must resolve it again.
///
/// An access with an invalid index, or of another size than an entry, has no effect, and a load
/// returns zeroes. The same holds for stores into a ring resolved for [`Access::Read`].
pub struct Ring {
    table: PageAddresses,
    iova: u64,
    entries: u32,
    entry_shift: u32,
    /// First index at which 64-byte loads are refused. `load16`, `store64` and `store16` are the
    /// limits of the other accesses.
    load64: u32,
    load16: u32,
    prefetch: u32,
    store64: u32,
    store16: u32,
    generation: u64,
}

// SAFETY: the table's pointers are into mappings that the ring holds; they are accessed by module
// `racy` only.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// Resolves a queue of `entries` entries at `iova`. `entry_size` is a power of two, from 16
    /// to 4096 bytes; a queue that is scattered must be aligned to 4096. A ring for
    /// [`Access::Write`] can be loaded from too.
    ///
    /// # Errors
    /// [`DmaError`] when the memory cannot be accessed: [`DmaError::Overflow`] for impossible
    /// sizes, [`DmaError::Misaligned`] for entries that are not aligned to 8 bytes in host memory
    /// or that lie in two pieces.
    pub fn resolve(
        map: &DmaMap,
        iova: u64,
        entries: u32,
        entry_size: usize,
        access: Access,
    ) -> Result<Ring, DmaError> {
        if !entry_size.is_power_of_two() || !(16..=4096).contains(&entry_size) {
            return Err(DmaError::Overflow);
        }
        let bytes = u64::from(entries)
            .checked_mul(entry_size as u64)
            .ok_or(DmaError::Overflow)?;
        let table = PageAddresses::resolve(map, iova, bytes, 8, access)?;
        let load64 = if entry_size == 64 { entries } else { 0 };
        let load16 = if entry_size == 16 { entries } else { 0 };
        let (store64, store16) = match access {
            Access::Read => (0, 0),
            Access::Write => (load64, load16),
        };
        Ok(Ring {
            table,
            iova,
            entries,
            entry_shift: entry_size.trailing_zeros(),
            load64,
            load16,
            prefetch: entries,
            store64,
            store16,
            generation: map.generation(),
        })
    }

    /// Returns the guest address (IOVA) at which the ring was resolved.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the number of entries in the ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the size of an entry of the ring in bytes.
    pub fn entry_size(&self) -> usize {
        1 << self.entry_shift
    }

    /// Returns the generation of the DMA map when the ring was resolved.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether the file of the memory has shrunk: loads are then meaningless, and stores
    /// are lost.
    pub fn is_poisoned(&self) -> bool {
        self.table.memories().iter().any(crate::Memory::is_poisoned)
    }

    /// Fetches a 64-byte entry (submission queue), once. The caller must have read the tail with
    /// acquire ordering.
    #[inline]
    pub fn load64(&self, index: u32) -> [u8; 64] {
        let mut entry = [[0; 64]];
        self.load_batch(index, &mut entry);
        let [entry] = entry;
        entry
    }

    /// Fetches 64-byte entries from `index` on, each once, limited to one contiguous piece and the
    /// length of `entries`. Returns their number. The caller must have read the tail with acquire
    /// ordering.
    #[inline(always)]
    pub fn load_batch(&self, index: u32, entries: &mut [[u8; 64]]) -> usize {
        let Some(left) = self.load64.checked_sub(index).filter(|&left| left > 0) else {
            return 0;
        };
        let offset = (index as usize) << 6;
        let Some(first) = self.table.at(offset) else {
            return 0;
        };
        let count = (left as usize)
            .min(self.table.run(offset) >> 6)
            .min(entries.len());
        let (wanted, _) = entries.split_at_mut(count);
        let mut at: *mut u8 = first;
        for entry in wanted {
            let words: EntryWords<'_> = EntryWords(at.cast(), std::marker::PhantomData);
            let (bytes, _) = entry.as_chunks_mut::<8>();
            for (i, bytes) in bytes.iter_mut().enumerate() {
                *bytes = words.get(i).load(Ordering::Relaxed).to_ne_bytes();
            }
            at = at.wrapping_add(64);
        }
        count
    }

    /// Evicts the lines of fetched 64-byte entries, see [`crate::lines`]; `count` is the result of
    /// [`Ring::load_batch`]. Affects only speed.
    #[inline]
    pub fn evict(&self, index: u32, count: usize, lines: Evict) {
        let Some(left) = self.load64.checked_sub(index).filter(|&left| left > 0) else {
            return;
        };
        let offset = (index as usize) << 6;
        let Some(first) = self.table.at(offset) else {
            return;
        };
        let count = count.min(left as usize).min(self.table.run(offset) >> 6);
        for entry in 0..count {
            // SAFETY: the entry lies in a mapping that the ring keeps.
            unsafe { lines.line(first.wrapping_add(entry << 6)) };
        }
    }

    /// Stores a 64-byte entry (the host's side of a submission queue). The doorbell's
    /// release makes it visible.
    #[inline]
    pub fn store64(&self, index: u32, entry: [u8; 64]) {
        if let Some(words) = self.words(index, self.store64, 6) {
            for (i, bytes) in entry.chunks_exact(8).enumerate() {
                words.get(i).store(word(bytes), Ordering::Relaxed);
            }
        }
    }

    /// Posts a 16-byte completion: the half with the phase bit last and with release
    /// ordering, so that a host that sees the phase sees the rest (NVMe Base 2.1, 4.2:
    /// Completion Queue Entry, Phase Tag).
    #[inline(always)]
    pub fn store_cqe(&self, index: u32, cqe: [u8; 16]) {
        if let Some(words) = self.words(index, self.store16, 4) {
            store_cqe(&words, cqe);
        }
    }

    /// Returns the memory of up to `wanted` 16-byte completions from `index` on, limited to one
    /// contiguous piece.
    #[inline]
    pub fn cqe_run(&self, index: u32, wanted: u32) -> CqeRun<'_> {
        let left = self.store16.saturating_sub(index).min(wanted);
        let offset = (index as usize) << 4;
        match self.table.at(offset) {
            Some(first) if left > 0 => CqeRun {
                first: EntryWords(first.cast(), std::marker::PhantomData),
                len: (left as usize).min(self.table.run(offset) >> 4),
            },
            _ => CqeRun {
                first: EntryWords(std::ptr::null_mut(), std::marker::PhantomData),
                len: 0,
            },
        }
    }

    /// Loads a 16-byte completion (the host's side): the half with the phase bit first and with
    /// acquire ordering. If the phase is the expected one, the rest belongs to it.
    #[inline]
    pub fn load_cqe(&self, index: u32) -> [u8; 16] {
        let mut cqe = [0; 16];
        if let Some(words) = self.words(index, self.load16, 4) {
            let high = words.get(1).load(Ordering::Acquire);
            let low = words.get(0).load(Ordering::Relaxed);
            let (first, second) = cqe.split_at_mut(8);
            first.copy_from_slice(&low.to_ne_bytes());
            second.copy_from_slice(&high.to_ne_bytes());
        }
        cqe
    }

    /// Prefetches an entry, for a batch that is about to be read. Affects only speed.
    #[inline(always)]
    pub fn prefetch(&self, index: u32) {
        if let Some(words) = self.words(index, self.prefetch, self.entry_shift) {
            prefetch::line(words.0.cast());
        }
    }

    /// Returns the memory of the entry at `index`, if `index` is below `limit`.
    #[inline(always)]
    fn words(&self, index: u32, limit: u32, shift: u32) -> Option<EntryWords<'_>> {
        if index >= limit {
            return None;
        }
        // Entries times entry size was checked against `PageAddresses`'s limit.
        self.table
            .at((index as usize) << shift)
            .map(|ptr| EntryWords(ptr.cast(), std::marker::PhantomData))
    }
}

/// Memory of consecutive completions that are about to be posted, resolved once for all of them.
pub struct CqeRun<'a> {
    first: EntryWords<'a>,
    len: usize,
}

impl CqeRun<'_> {
    /// Returns the number of completions for which the run has room.
    #[inline]
    pub fn len(&self) -> u32 {
        // The number is at most that of the ring's entries.
        self.len as u32
    }

    /// Returns whether the run is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Posts a completion at index `i`, like [`Ring::store_cqe`]; an invalid index is ignored.
    #[inline(always)]
    pub fn store(&self, i: u32, cqe: [u8; 16]) {
        let i = i as usize;
        if i < self.len {
            store_cqe(
                &EntryWords(self.first.0.wrapping_add(i * 2), std::marker::PhantomData),
                cqe,
            );
        }
    }
}

/// Stores a completion, the half with the phase bit last.
#[inline(always)]
fn store_cqe(words: &EntryWords<'_>, cqe: [u8; 16]) {
    let (low, high) = cqe.split_at(8);
    words.get(0).store(word(low), Ordering::Relaxed);
    words.get(1).store(word(high), Ordering::Release);
}

/// 64-bit words of a queue entry in guest memory.
struct EntryWords<'a>(*mut u64, std::marker::PhantomData<&'a Ring>);

impl EntryWords<'_> {
    /// Returns word `i` of the entry. Private to this module, which keeps `i` inside the entry by
    /// its limits.
    #[inline]
    fn get(&self, i: usize) -> &AtomicU64 {
        // SAFETY: the entry is contiguous in a mapping that the borrowed ring keeps, and is aligned
        // to 8 bytes. In a ring that was resolved for reading, the callers only load.
        unsafe { racy::cell64(self.0.wrapping_add(i).cast()) }
    }
}

/// Returns the word that has these eight bytes in memory.
#[inline]
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("iova", &self.iova)
            .field("entries", &self.entries)
            .field("entry_size", &self.entry_size())
            .finish_non_exhaustive()
    }
}
