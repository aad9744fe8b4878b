//! Refcounts of an image (section "Host cluster management"), held completely in memory, and the
//! set of free clusters. No I/O is done here.

use crate::format::Geometry;
use crate::ranges::Ranges;
use std::ops::Range;
use std::task::Waker;

/// Adjacent host clusters that were allocated together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    /// Numbers of the allocated host clusters.
    pub(crate) clusters: Range<u64>,
    /// Whether the clusters read as zeroes, even after a power cut.
    pub(crate) zeroed: bool,
}

/// Reason why no host cluster could be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRun {
    /// The refcount block with this index has to be created first.
    Block(usize),
    /// The image cannot grow: its device or its refcount table ends here.
    Full,
}

/// Refcount block of an image: one cluster of big-endian refcounts, in memory.
pub(crate) struct Block {
    /// Byte offset of the refcount block in the file.
    pub(crate) at: u64,
    bytes: Box<[u8]>,
    /// Bytes of the block that have changed since they were written to the disk.
    dirty: Option<Range<usize>>,
    /// Number of changes made to the block in memory.
    version: u64,
    /// Value of `version` for which the block is on the disk.
    settled: u64,
    writing: bool,
    waiters: Vec<Waker>,
}

/// Next step to get the changes of a refcount block onto the disk.
pub(crate) enum Settle {
    /// All changes of the block are on the disk.
    Done,
    /// Another task is writing the block to the disk.
    Wait,
    /// These bytes have to be written; then [`Refcounts::written`] must be called.
    Write {
        /// Byte offset in the file of the bytes to write.
        at: u64,
        bytes: Vec<u8>,
        /// Range of the bytes in the block, and the version of the block that they belong to.
        range: Range<usize>,
        version: u64,
    },
}

pub(crate) struct Refcounts {
    geometry: Geometry,
    /// Refcount blocks by their index in the refcount table; `None` where there is no block.
    blocks: Vec<Option<Block>>,
    /// Number of entries that the refcount table has.
    room: usize,
    /// Free host clusters that read as zeroes.
    free: Ranges,
    /// First host cluster behind all that were ever used.
    fresh: u64,
    /// First host cluster behind the end of the device, for an image on a block device.
    end: u64,
    /// Whether host clusters behind the end of the file read as zeroes.
    fresh_is_zeroed: bool,
}

impl Refcounts {
    /// Creates refcounts without blocks, for an image with a refcount table of `room` entries.
    /// `end`: number of clusters of the device on which the image lies.
    pub(crate) fn new(geometry: Geometry, room: usize, end: Option<u64>) -> Self {
        Self {
            geometry,
            blocks: Vec::new(),
            room,
            free: Ranges::default(),
            fresh: 0,
            end: end.unwrap_or(u64::MAX),
            fresh_is_zeroed: end.is_none(),
        }
    }

    /// Adds a refcount block that was read from byte offset `at` of the file.
    pub(crate) fn enter(&mut self, index: usize, at: u64, bytes: Box<[u8]>) {
        if self.blocks.len() <= index {
            self.blocks.resize_with(index + 1, || None);
        }
        if let Some(place) = self.blocks.get_mut(index) {
            *place = Some(Block {
                at,
                bytes,
                dirty: None,
                version: 0,
                settled: 0,
                writing: false,
                waiters: Vec::new(),
            });
        }
    }

    /// Iterates over the existing blocks, with their index in the table.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (usize, &Block)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter_map(|(index, block)| Some((index, block.as_ref()?)))
    }

    /// Returns the ranges of host clusters for which refcount blocks are loaded.
    pub(crate) fn covered(&self) -> Vec<Range<u64>> {
        let bits = self.geometry.refcount_bits();
        let range = |index: usize| (index as u64) << bits..(index as u64 + 1) << bits;
        self.blocks().map(|(index, _)| range(index)).collect()
    }

    /// Returns the index of the block with the refcount of the next cluster that was never used.
    pub(crate) fn next_block(&self) -> usize {
        self.place(self.fresh).0
    }

    /// Returns whether the refcount block of a host cluster is loaded.
    pub(crate) fn counts(&self, cluster: u64) -> bool {
        matches!(self.blocks.get(self.place(cluster).0), Some(Some(_)))
    }

    /// Returns the number of entries that the refcount table has.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Records that the refcount table was replaced by a larger one.
    pub(crate) fn set_room(&mut self, room: usize) {
        self.room = room;
    }

    /// Completes loading after all blocks were added. `file_bytes` is the size of the image's file
    /// (0 on a device). Returns the free clusters with unknown content.
    pub(crate) fn begin(&mut self, file_bytes: u64) -> Ranges {
        let mut unknown = Ranges::default();
        let per_block = 1u64 << self.geometry.refcount_bits();
        let last = self.blocks().flat_map(|(index, block)| {
            let last = (0..per_block).rev().find(|&n| self.read(block, n) != 0)?;
            Some(index as u64 * per_block + last)
        });
        let used = last.max().map_or(0, |last| last + 1);
        self.fresh = used.max(self.geometry.clusters(file_bytes)).min(self.end);
        let mut start = None;
        for cluster in 0..self.fresh {
            // Clusters without a refcount block are left alone.
            match (self.counts(cluster) && self.get(cluster) == 0, start) {
                (true, None) => start = Some(cluster),
                (false, Some(from)) => {
                    unknown.insert(from..cluster);
                    start = None;
                }
                _ => {}
            }
        }
        if let Some(from) = start {
            unknown.insert(from..self.fresh);
        }
        unknown
    }

    fn place(&self, cluster: u64) -> (usize, u64) {
        let bits = self.geometry.refcount_bits();
        // A table has at most a million entries; beyond that there is no block.
        let index = usize::try_from(cluster >> bits).unwrap_or(usize::MAX);
        (index, cluster & ((1 << bits) - 1))
    }

    /// Returns the byte range of a refcount in its block. Only refcounts of whole bytes are
    /// written.
    fn bytes_of(&self, number: u64) -> Range<usize> {
        let width = 1usize << self.geometry.refcount_order.saturating_sub(3);
        let start = number as usize * width;
        start..start + width
    }

    fn read(&self, block: &Block, number: u64) -> u64 {
        let order = self.geometry.refcount_order;
        if order < 3 {
            let bits = 1u32 << order;
            let at = number << order;
            let byte = block.bytes.get((at >> 3) as usize).copied().unwrap_or(0);
            return u64::from(byte >> (at & 7)) & ((1 << bits) - 1);
        }
        let bytes = block.bytes.get(self.bytes_of(number)).unwrap_or(&[]);
        bytes
            .iter()
            .fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    /// Returns the refcount of a host cluster; 0 if it is free.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let (index, number) = self.place(cluster);
        let block = self.blocks.get(index).and_then(Option::as_ref);
        block.map_or(0, |block| self.read(block, number))
    }

    /// Returns the maximum refcount that the image's refcount width allows.
    pub(crate) fn most(&self) -> u64 {
        let bits = 1u32 << self.geometry.refcount_order;
        u64::MAX >> (64 - bits)
    }

    /// Sets the refcount of a host cluster. Its refcount block must be loaded.
    pub(crate) fn set(&mut self, cluster: u64, count: u64) {
        let (index, number) = self.place(cluster);
        let range = self.bytes_of(number);
        let Some(block) = self.blocks.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        let Some(bytes) = block.bytes.get_mut(range.clone()) else {
            return;
        };
        let big = count.to_be_bytes();
        let tail = big.get(big.len() - bytes.len()..).unwrap_or(&big);
        bytes.copy_from_slice(tail);
        block.touch(range);
    }

    /// Decrements the refcount of a cluster. Returns `true` when it became zero.
    pub(crate) fn release(&mut self, cluster: u64) -> bool {
        let count = self.get(cluster);
        if count > 0 {
            self.set(cluster, count - 1);
        }
        count == 1
    }

    /// Allocates up to `most` adjacent host clusters, and sets their refcounts to one.
    pub(crate) fn take(&mut self, most: u64) -> Result<Run, NoRun> {
        if let Some(clusters) = self.free.take(most) {
            // Free clusters are taken first: they have refcount blocks, are adjacent, and were used
            // before.
            return self.own(clusters, true);
        }
        let left = self.end.saturating_sub(self.fresh);
        if left == 0 {
            return Err(NoRun::Full);
        }
        let (index, number) = self.place(self.fresh);
        if !matches!(self.blocks.get(index), Some(Some(_))) {
            return Err(if index < self.room {
                NoRun::Block(index)
            } else {
                NoRun::Full
            });
        }
        let in_block = (1 << self.geometry.refcount_bits()) - number;
        let count = most.max(1).min(left).min(in_block);
        let clusters = self.fresh..self.fresh + count;
        self.fresh = clusters.end;
        self.own(clusters, self.fresh_is_zeroed)
    }

    fn own(&mut self, clusters: Range<u64>, zeroed: bool) -> Result<Run, NoRun> {
        for cluster in clusters.clone() {
            self.set(cluster, 1);
        }
        Ok(Run { clusters, zeroed })
    }

    fn take_fresh(&mut self, count: u64) -> Option<Range<u64>> {
        let clusters = self.fresh..self.fresh.checked_add(count)?;
        if clusters.end > self.end {
            return None;
        }
        self.fresh = clusters.end;
        Some(clusters)
    }

    /// Reserves `count` adjacent clusters that were never used, followed by one cluster for each
    /// refcount block that has to be created to count them. Returns the first cluster and the
    /// indices of these blocks. With a `count` of 0, reserves the
    /// refcount block of the next cluster, if that block is missing.
    pub(crate) fn reserve(&mut self, count: u64) -> Option<(u64, Vec<usize>)> {
        let start = self.fresh;
        let mut blocks = Vec::new();
        loop {
            let more = count.checked_add(blocks.len() as u64)?.max(1);
            let last = start.checked_add(more)?.checked_sub(1)?;
            let (from, to) = (self.place(start).0, self.place(last).0);
            let missing = |index: &usize| !matches!(self.blocks.get(*index), Some(Some(_)));
            let needed: Vec<usize> = (from..=to).filter(missing).collect();
            if needed.len() == blocks.len() {
                break;
            }
            blocks = needed;
        }
        let all = count + blocks.len() as u64;
        self.take_fresh(all)?;
        Some((start, blocks))
    }

    /// Adds host clusters to the free ones; they must read as zeroes.
    pub(crate) fn free(&mut self, clusters: Ranges) {
        self.free.extend(clusters);
    }

    /// Returns the indices and current versions of the blocks with the refcounts of these clusters.
    pub(crate) fn versions(&self, clusters: &Range<u64>) -> Vec<(usize, u64)> {
        if clusters.is_empty() {
            return Vec::new();
        }
        let (first, last) = (self.place(clusters.start).0, self.place(clusters.end - 1).0);
        let version = |index: usize| {
            let block = self.blocks.get(index)?.as_ref()?;
            Some((index, block.version))
        };
        (first..=last).filter_map(version).collect()
    }

    /// Returns the next step to bring a block to the disk, at least in the version `version`.
    /// `waker` is woken when another task has written it.
    pub(crate) fn settle(&mut self, index: usize, version: u64, waker: &Waker) -> Settle {
        let Some(block) = self.blocks.get_mut(index).and_then(Option::as_mut) else {
            return Settle::Done;
        };
        if block.settled >= version {
            return Settle::Done;
        }
        if block.writing {
            block.waiters.push(waker.clone());
            return Settle::Wait;
        }
        block.next_write()
    }

    /// Returns the indices and current versions of the blocks that are not on the disk.
    pub(crate) fn unsettled(&self) -> Vec<(usize, u64)> {
        let unsettled = self
            .blocks()
            .filter(|(_, block)| block.settled < block.version);
        unsettled
            .map(|(index, block)| (index, block.version))
            .collect()
    }

    /// Records that bytes of a refcount block were written, or that the write has failed.
    pub(crate) fn written(&mut self, index: usize, range: Range<usize>, version: Option<u64>) {
        let Some(block) = self.blocks.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        block.writing = false;
        match version {
            Some(version) => block.settled = block.settled.max(version),
            None => block.dirty = Some(join(block.dirty.take(), range)),
        }
        block.waiters.drain(..).for_each(Waker::wake);
    }
}

impl Block {
    fn touch(&mut self, range: Range<usize>) {
        self.version += 1;
        self.dirty = Some(join(self.dirty.take(), range));
    }

    fn next_write(&mut self) -> Settle {
        let Some(range) = self.dirty.take() else {
            self.settled = self.version;
            return Settle::Done;
        };
        self.writing = true;
        Settle::Write {
            at: self.at + range.start as u64,
            bytes: self.bytes.get(range.clone()).unwrap_or(&[]).to_vec(),
            range,
            version: self.version,
        }
    }

    /// Returns the whole block in its on-disk form.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn join(one: Option<Range<usize>>, two: Range<usize>) -> Range<usize> {
    match one {
        Some(one) => one.start.min(two.start)..one.end.max(two.end),
        None => two,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(refcount_order: u32) -> Geometry {
        Geometry {
            version: 3,
            cluster_bits: 9,
            refcount_order,
        }
    }

    fn with_block(order: u32) -> Refcounts {
        let mut refs = Refcounts::new(geometry(order), 4, None);
        refs.enter(0, 0x400, vec![0; 512].into());
        refs
    }

    #[test]
    fn refcounts_of_every_width_work() {
        for order in 3..=6 {
            let mut refs = with_block(order);
            let count = 1u64 << geometry(order).refcount_bits();
            assert_eq!(count, (512 * 8) >> order);
            for cluster in 0..count {
                refs.set(cluster, cluster & refs.most());
            }
            for cluster in 0..count {
                assert_eq!(refs.get(cluster), cluster & refs.most(), "{order}");
            }
            assert_eq!(refs.get(count), 0);
        }
        // Narrow ones are only read: from the low bits of a byte on.
        let mut refs = Refcounts::new(geometry(1), 1, None);
        let mut bytes = vec![0; 512];
        bytes[1] = 0b11_10_01_00;
        refs.enter(0, 0x400, bytes.into());
        let read: Vec<u64> = (4..8).map(|cluster| refs.get(cluster)).collect();
        assert_eq!(read, [0, 1, 2, 3]);
    }

    #[test]
    fn clusters_are_allocated_once() {
        let mut refs = with_block(4);
        for used in [0, 1, 2, 5] {
            refs.set(used, 1);
        }
        let unknown = refs.begin(8 * 512);
        assert_eq!(unknown.iter().collect::<Vec<_>>(), [3..5, 6..8]);
        let run = refs.take(4).unwrap();
        assert_eq!((run.clusters.clone(), run.zeroed), (8..12, true));
        assert!(run.clusters.clone().all(|cluster| refs.get(cluster) == 1));
        assert!(refs.release(9) && !refs.release(9));
        let mut free = Ranges::default();
        free.insert(9..10);
        refs.free(free);
        assert_eq!(refs.take(4).unwrap().clusters, 9..10);
        // Up to the end of the block; then there has to be another one.
        assert_eq!(refs.take(1000).unwrap().clusters, 12..256);
        assert_eq!(refs.take(1), Err(NoRun::Block(1)));
        assert_eq!(refs.reserve(0), Some((256, vec![1])));
        refs.enter(1, 256 * 512, vec![0; 512].into());
        refs.set(256, 1);
        assert_eq!(refs.take(1).unwrap().clusters, 257..258);
        assert_eq!(refs.reserve(0), Some((258, vec![])));
        // Three blocks of 256 clusters, from within the first one on.
        assert_eq!(refs.reserve(700), Some((258, vec![2, 3])));
    }

    #[test]
    fn allocation_ends_with_device() {
        let mut refs = Refcounts::new(geometry(4), 4, Some(10));
        refs.enter(0, 0x400, vec![0; 512].into());
        refs.set(0, 1);
        assert_eq!(refs.begin(0).len(), 0);
        // The content of the device at these clusters is unknown.
        let run = refs.take(20).unwrap();
        assert_eq!((run.clusters, run.zeroed), (1..10, false));
        assert_eq!(refs.take(1), Err(NoRun::Full));
    }

    #[test]
    fn refcount_block_has_single_writer() {
        let mut refs = with_block(4);
        let waker = Waker::noop();
        refs.set(3, 1);
        let [(index, version)] = refs.versions(&(3..4))[..] else {
            panic!("one block");
        };
        let Settle::Write {
            at,
            bytes,
            range,
            version: now,
        } = refs.settle(index, version, waker)
        else {
            panic!("nothing was written yet");
        };
        assert_eq!((at, &*bytes, now), (0x400 + 6, &[0, 1][..], version));
        refs.set(4, 2);
        let later = refs.versions(&(4..5));
        assert!(matches!(
            refs.settle(index, later[0].1, waker),
            Settle::Wait
        ));
        // The write failed: the next one writes both.
        refs.written(index, range, None);
        let Settle::Write {
            at,
            bytes,
            range,
            version,
        } = refs.settle(index, version, waker)
        else {
            panic!("it failed");
        };
        assert_eq!((at, &*bytes), (0x400 + 6, &[0, 1, 0, 2][..]));
        refs.written(index, range, Some(version));
        assert!(matches!(
            refs.settle(index, later[0].1, waker),
            Settle::Done
        ));
        assert_eq!(refs.unsettled(), []);
    }
}
