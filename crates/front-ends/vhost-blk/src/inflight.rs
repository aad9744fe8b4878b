//! Inflight I/O tracking ("Vhost-user Protocol", Inflight I/O tracking, split virtqueue). It
//! records requests that have been fetched and not answered, in memory that the front-end keeps
//! when this process dies. The next process begins them again.
//!
//! By the protocol the memory is the back-end's alone, but the front-end can write it: indices from
//! it are checked.

use dma::{MapError, Memory};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

const HEADER: usize = 16;
const ENTRY: usize = 16;
const ALIGN: usize = 64;
const VERSION: u64 = 1;
/// Private trailer behind the queues' parts: "vnvmeWCE" and the write cache's state, which the
/// front-end shows to the guest but does not pass to the next back-end.
const TRAILER: usize = ALIGN;
const TRAILER_MARK: u64 = 0x766e_766d_6557_4300;

/// Shared memory in which the back-end records outstanding requests (vhost-user inflight tracking).
#[derive(Clone, Debug)]
pub(crate) struct Inflight {
    memory: Memory,
    offset: usize,
    queues: u16,
    queue_size: u16,
}

fn part_size(queue_size: u16) -> usize {
    (HEADER + ENTRY * usize::from(queue_size)).next_multiple_of(ALIGN)
}

impl Inflight {
    /// Creates a region for `queues` queues of `queue_size` entries, in a new memory file.
    pub(crate) fn new(queues: u16, queue_size: u16) -> Result<Inflight, MapError> {
        let len = usize::from(queues) * part_size(queue_size) + TRAILER;
        Ok(Inflight {
            memory: Memory::anonymous(len)?,
            offset: 0,
            queues,
            queue_size,
        })
    }

    /// Imports the region that a front-end has kept. `map` maps its file; its argument is the
    /// minimum end of the file. The region has `size` bytes from `offset` on, for `queues` queues
    /// of `queue_size` entries.
    pub(crate) fn import(
        map: impl FnOnce(u64) -> Result<Memory, MapError>,
        offset: u64,
        size: u64,
        queues: u16,
        queue_size: u16,
    ) -> Result<Inflight, MapError> {
        let end = offset.checked_add(size).ok_or(MapError::Overflow)?;
        let wanted = usize::from(queues) * part_size(queue_size);
        if size < wanted as u64 || !offset.is_multiple_of(8) {
            return Err(MapError::OutOfBacking {
                end: wanted as u64,
                size,
            });
        }
        Ok(Inflight {
            memory: map(end)?,
            // The region lies within a mapping.
            offset: offset as usize,
            queues,
            queue_size,
        })
    }

    /// Returns the size of the region in bytes.
    pub(crate) fn size(&self) -> u64 {
        (usize::from(self.queues) * part_size(self.queue_size) + TRAILER) as u64
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Returns the part of one queue, if there is one for a queue of `size` entries.
    pub(crate) fn tracker(&self, queue: u16, size: u16) -> Option<Tracker> {
        (queue < self.queues && size <= self.queue_size).then(|| Tracker {
            memory: self.memory.clone(),
            base: self.offset + usize::from(queue) * part_size(self.queue_size),
            size,
            counter: 0,
            last_batch: 0,
            batch: Vec::new(),
        })
    }

    fn trailer(&self) -> Option<&AtomicU64> {
        let at = usize::from(self.queues) * part_size(self.queue_size);
        self.memory.atomic_u64(self.offset.checked_add(at)?)
    }

    /// Returns the state of the write cache that an earlier back-end of this program noted.
    pub(crate) fn write_cache(&self) -> Option<bool> {
        let value = self.trailer()?.load(Ordering::Relaxed);
        (value & !0xff == TRAILER_MARK).then_some(value & 0xff != 0)
    }

    /// Stores the state of the write cache for the next back-end.
    pub(crate) fn set_write_cache(&self, on: bool) {
        if let Some(trailer) = self.trailer() {
            trailer.store(TRAILER_MARK | u64::from(on), Ordering::Relaxed);
            crash::point!("vhost-blk.write-cache.noted");
        }
    }
}

/// A queue's part (`struct QueueRegionSplit`): a header of `features`, `version`, `desc_num`,
/// `last_batch_head`, `used_idx`, then for each descriptor `inflight`, padding, `next`, `counter`.
#[derive(Debug)]
pub(crate) struct Tracker {
    memory: Memory,
    base: usize,
    size: u16,
    counter: u64,
    last_batch: u16,
    /// Head indices of requests that are removed from the record when the used index is published.
    batch: Vec<u16>,
}

/// Header of a queue's part of the region: the four 16-bit fields behind `features`.
struct Head {
    version: u64,
    entries: u16,
    last_batch: u16,
    used_idx: u16,
}

impl Tracker {
    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.memory.atomic_u64(self.base.checked_add(offset)?)
    }

    fn load(&self, offset: usize) -> u64 {
        self.word(offset)
            .map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Stores a value. A killed process loses no store, so the order of stores is sufficient.
    fn store(&self, offset: usize, value: u64) {
        if let Some(word) = self.word(offset) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    fn head(&self) -> Head {
        let word = self.load(8);
        Head {
            version: word & 0xffff,
            entries: (word >> 16) as u16,
            last_batch: (word >> 32) as u16,
            used_idx: (word >> 48) as u16,
        }
    }

    fn store_head(&self, used_idx: u16) {
        let word = VERSION
            | u64::from(self.size) << 16
            | u64::from(self.last_batch) << 32
            | u64::from(used_idx) << 48;
        self.store(8, word);
    }

    fn entry(index: u16) -> usize {
        HEADER + usize::from(index) * ENTRY
    }

    /// Marks a request as no longer in flight. Its `next` stays: while the header has the used
    /// index from before its batch, the whole batch is found by it.
    fn retire(&self, at: usize) {
        self.store(at, self.load(at) & !0xff);
    }

    /// Begins to track a queue with used index `used_idx`. Returns the heads of requests that an
    /// earlier back-end fetched and did not answer, oldest first.
    pub(crate) fn recover(&mut self, used_idx: u16) -> Vec<u16> {
        let head = self.head();
        if head.version != VERSION || head.entries != self.size {
            for index in 0..self.size {
                self.store(Self::entry(index), 0);
                crash::point!("vhost-blk.recover.cleared");
            }
            self.store_head(used_idx);
            return Vec::new();
        }
        self.last_batch = head.last_batch;
        // The used index was published, but its batch may not have been retired.
        let mut index = head.last_batch;
        for _ in 0..used_idx.wrapping_sub(head.used_idx).min(self.size) {
            if index >= self.size {
                break;
            }
            let at = Self::entry(index);
            index = (self.load(at) >> 48) as u16;
            self.retire(at);
            crash::point!("vhost-blk.recover.retired");
        }
        self.store_head(used_idx);
        crash::point!("vhost-blk.recover.settled");
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|index| self.load(Self::entry(*index)) & 0xff == 1)
            .map(|index| (self.load(Self::entry(index) + 8), index))
            .collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(last, _)| last.wrapping_add(1));
        found.into_iter().map(|(_, index)| index).collect()
    }

    /// Records the fetched request with this head index as outstanding.
    #[inline]
    pub(crate) fn begin(&mut self, head: u16) {
        let at = Self::entry(head);
        self.store(at + 8, self.counter);
        self.counter = self.counter.wrapping_add(1);
        crash::point!("vhost-blk.inflight.counted");
        self.store(at, 1);
        crash::point!("vhost-blk.inflight.begun");
    }

    /// Records that a request's used entry has been written, and will be published with the next
    /// used index.
    #[inline]
    pub(crate) fn answer(&mut self, head: u16, used_idx: u16) {
        self.store(Self::entry(head), 1 | u64::from(self.last_batch) << 48);
        crash::point!("vhost-blk.inflight.chained");
        self.last_batch = head;
        self.store_head(used_idx);
        crash::point!("vhost-blk.inflight.batched");
        self.batch.push(head);
    }

    /// Records that used entries of requests without a record have been written, and will be
    /// published with the next used index. `head` is that of one of them. Its entry becomes the
    /// whole chain of the batch: not in flight, and its own `next`. The chain thus leads to no
    /// request of an earlier batch, which may be in flight again.
    #[inline(never)]
    pub(crate) fn answer_unrecorded(&mut self, head: u16, used_idx: u16) {
        self.store(Self::entry(head), u64::from(head) << 48);
        crash::point!("vhost-blk.plain.chained");
        self.last_batch = head;
        self.store_head(used_idx);
        crash::point!("vhost-blk.plain.batched");
    }

    /// Records that the used index has been published, so that its requests are no longer
    /// outstanding.
    #[inline(never)]
    pub(crate) fn published(&mut self, used_idx: u16) {
        while let Some(head) = self.batch.pop() {
            self.retire(Self::entry(head));
            crash::point!("vhost-blk.inflight.retired");
        }
        self.store_head(used_idx);
        crash::point!("vhost-blk.inflight.settled");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(region: &Inflight, used_idx: u16) -> (Tracker, Vec<u16>) {
        let mut tracker = region.tracker(1, 8).unwrap();
        let found = tracker.recover(used_idx);
        (tracker, found)
    }

    #[test]
    fn unanswered_requests_are_found_in_order() {
        let region = Inflight::new(2, 8).unwrap();
        let (mut t, found) = tracker(&region, 40);
        assert!(found.is_empty());
        for head in [5, 2, 7, 1] {
            t.begin(head);
        }
        t.answer(2, 40);
        t.published(41);
        let (mut t, found) = tracker(&region, 41);
        assert_eq!(found, [5, 7, 1]);
        // Later requests follow the recovered ones.
        t.begin(0);
        assert_eq!(tracker(&region, 41).1, [5, 7, 1, 0]);
    }

    #[test]
    fn published_batch_is_not_repeated_after_death() {
        for died_before_publishing in [true, false] {
            let region = Inflight::new(2, 8).unwrap();
            let (mut t, _) = tracker(&region, 0xffff);
            for head in [3, 4, 5, 6] {
                t.begin(head);
            }
            // A complete first batch; then a second one of two requests, with at most the used
            // index published.
            t.answer(4, 0xffff);
            t.published(0);
            t.answer(3, 0);
            t.answer(6, 0);
            let (_, found) = tracker(&region, if died_before_publishing { 0 } else { 2 });
            if died_before_publishing {
                assert_eq!(found, [3, 5, 6]);
            } else {
                assert_eq!(found, [5]);
            }
        }
    }

    #[test]
    fn corrupted_inflight_region_is_harmless() {
        let region = Inflight::new(2, 8).unwrap();
        let (mut t, _) = tracker(&region, 0);
        t.begin(1);
        let junk: Vec<u8> = (0..region.memory.len())
            .map(|i| (i * 37 + 1) as u8)
            .collect();
        region.memory.write(0, &junk).unwrap();
        // Version 1, 8 entries, last batch far outside, a used index far away.
        for word in [u64::MAX, 1 | 8 << 16 | 0xffff << 32 | 9 << 48] {
            t.store(8, word);
            let (_, found) = tracker(&region, 3);
            assert!(found.iter().all(|head| *head < 8));
        }
    }

    #[test]
    fn inflight_regions_of_wrong_size_are_refused() {
        let region = Inflight::new(2, 8).unwrap();
        assert!(region.tracker(2, 8).is_none());
        assert!(region.tracker(0, 16).is_none());
        let map = |end| Memory::from_fd(region.fd().try_clone_to_owned().unwrap(), end, true);
        assert!(Inflight::import(map, 0, region.size(), 2, 8).is_ok());
        assert!(Inflight::import(map, 0, region.size(), 2, 16).is_err());
        assert!(Inflight::import(map, 4, region.size() - 8, 2, 8).is_err());
        assert!(Inflight::import(map, 64, region.size(), 2, 8).is_err());
        assert!(Inflight::import(map, u64::MAX - 7, region.size(), 2, 8).is_err());
    }

    #[test]
    fn write_cache_state_survives_process() {
        let region = Inflight::new(2, 8).unwrap();
        assert_eq!(region.write_cache(), None);
        region.set_write_cache(false);
        let map = |end| Memory::from_fd(region.fd().try_clone_to_owned().unwrap(), end, true);
        let again = Inflight::import(map, 0, region.size(), 2, 8).unwrap();
        assert_eq!(again.write_cache(), Some(false));
        again.set_write_cache(true);
        assert_eq!(region.write_cache(), Some(true));
    }
}
