//! Memory of an association that its controller uses like guest memory: queues, and a pool for
//! data.
//!
//! The controller accesses it by IOVAs. They begin above zero, so that an address that was never
//! set refers to nothing.

use dma::{Access, DmaMap, Memory, MemoryError, SegmentList};

/// Page size in bytes, in which an association's memory is allocated.
pub(crate) const PAGE: u32 = 4096;
/// Device address (IOVA) of the first byte of an association's memory.
pub(crate) const BASE: u64 = 1 << 40;
/// Number of bytes that one step copies.
const CHUNK: usize = 4096;

/// Block of an association's memory that is allocated for a command or a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// Number of the block's first page, counted from the beginning of the memory.
    page: u32,
    pages: u32,
}

impl Block {
    /// Returns the device address (IOVA) at which the controller accesses the block.
    pub(crate) fn iova(self) -> u64 {
        BASE + self.offset()
    }

    fn offset(self) -> u64 {
        u64::from(self.page) * u64::from(PAGE)
    }

    /// Returns the length of the block in bytes.
    pub(crate) fn len(self) -> u64 {
        u64::from(self.pages) * u64::from(PAGE)
    }
}

/// Memory of one association, for rings and the data of commands, with its allocator.
#[derive(Debug)]
pub(crate) struct AssociationMemory {
    memory: Memory,
    /// Bitmap of allocated pages.
    taken: Vec<u64>,
    pages: u32,
    free: u32,
    /// Number of the page at which the next search for free pages starts.
    hint: u32,
    reserve: Reserve,
}

/// Reserved blocks, one for each queue, which hold the data of one capsule when all other memory is
/// in use. A connection is read in order, so the data after that capsule may belong to the very
/// commands that hold the memory.
#[derive(Debug)]
struct Reserve {
    /// First page of the reserved blocks, of which each queue has one.
    page: u32,
    /// Number of pages of each reserved block.
    pages: u32,
    /// For each queue, whether its reserved block is in use.
    taken: Vec<bool>,
}

impl Reserve {
    /// Returns the index of the queue that owns a reserved block; `None` for another block.
    fn owner(&self, block: Block) -> Option<usize> {
        let place = block.page.checked_sub(self.page)? / self.pages.max(1);
        Some(place as usize).filter(|place| *place < self.taken.len())
    }
}

impl AssociationMemory {
    /// Creates a pool of `pages` pages. They are preceded by `rings` pages for queues, and by the
    /// reserved blocks: (number of queues, pages of each).
    ///
    /// # Errors
    /// [`dma::MapError`] when the memory cannot be mapped.
    pub(crate) fn new(
        rings: u32,
        (queues, each): (u16, u32),
        pages: u32,
    ) -> Result<Self, dma::MapError> {
        let before = rings + u32::from(queues) * each;
        let bytes = (u64::from(before) + u64::from(pages)) * u64::from(PAGE);
        let memory = Memory::anonymous(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let all = before + pages;
        let mut pool = Self {
            memory,
            taken: vec![0; all.div_ceil(64) as usize],
            pages: all,
            free: pages,
            hint: before,
            reserve: Reserve {
                page: rings,
                pages: each,
                taken: vec![false; queues.into()],
            },
        };
        (0..before).for_each(|page| pool.mark(page, true));
        Ok(pool)
    }

    /// Allocates a queue's reserved block, if it is free and has at least `bytes` bytes.
    pub(crate) fn take_reserved(&mut self, qid: u16, bytes: u64) -> Option<Block> {
        let Reserve { page, pages, .. } = self.reserve;
        let taken = self.reserve.taken.get_mut(usize::from(qid))?;
        if *taken || bytes > u64::from(pages) * u64::from(PAGE) {
            return None;
        }
        *taken = true;
        let page = page + u32::from(qid) * pages;
        Some(Block { page, pages })
    }

    /// Returns the memory file that the controller accesses.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    fn is_taken(&self, page: u32) -> bool {
        let word = self.taken.get(page as usize / 64);
        word.is_none_or(|word| word >> (page % 64) & 1 != 0)
    }

    fn mark(&mut self, page: u32, taken: bool) {
        if let Some(word) = self.taken.get_mut(page as usize / 64) {
            let bit = 1 << (page % 64);
            *word = if taken { *word | bit } else { *word & !bit };
        }
    }

    /// Returns the first of `pages` adjacent free pages between `from` and `end`, if there are any.
    fn find(&self, from: u32, end: u32, pages: u32) -> Option<u32> {
        let (mut start, mut at) = (from, from);
        while at < end {
            if at % 64 == 0 && self.taken.get(at as usize / 64) == Some(&u64::MAX) {
                at += 64;
                start = at;
                continue;
            }
            if self.is_taken(at) {
                start = at + 1;
            } else if at + 1 - start >= pages {
                return Some(start);
            }
            at += 1;
        }
        None
    }

    /// Allocates a block of at least `bytes` bytes; `None` if no free range is large enough.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Block> {
        let pages = u32::try_from(bytes.div_ceil(PAGE.into()).max(1)).ok()?;
        if pages > self.free {
            return None;
        }
        let found = self.find(self.hint, self.pages, pages);
        let page = found.or_else(|| self.find(0, self.pages, pages))?;
        (page..page + pages).for_each(|page| self.mark(page, true));
        self.free -= pages;
        self.hint = page + pages;
        Some(Block { page, pages })
    }

    /// Frees an allocated block.
    pub(crate) fn free(&mut self, block: Block) {
        if let Some(owner) = self.reserve.owner(block) {
            if let Some(taken) = self.reserve.taken.get_mut(owner) {
                *taken = false;
            }
            return;
        }
        (block.page..block.page + block.pages).for_each(|page| self.mark(page, false));
        self.free += block.pages;
        self.hint = self.hint.min(block.page);
    }

    /// Returns whether nothing is allocated except for `before` pages.
    #[cfg(test)]
    pub(crate) fn is_idle(&self, before: u32) -> bool {
        self.free + before == self.pages && !self.reserve.taken.contains(&true)
    }

    /// Passes `len` bytes of a block, from byte `at` on, to `each` in pieces.
    ///
    /// # Errors
    /// [`MemoryError`] when a piece cannot be read. The pieces before it were passed.
    pub(crate) fn read(
        &self,
        block: Block,
        at: u32,
        len: u32,
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        let mut chunk = [0; CHUNK];
        let mut done = 0;
        while done < len {
            let count = (len - done).min(CHUNK as u32) as usize;
            let piece = chunk.get_mut(..count).unwrap_or_default();
            let from = block.offset() + u64::from(at) + u64::from(done);
            self.memory.read(from as usize, piece)?;
            each(piece);
            done += count as u32;
        }
        Ok(())
    }

    /// Copies bytes into a block from byte `at` on, as far as it has room. Returns their number.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory cannot be written.
    pub(crate) fn write(&self, block: Block, at: u32, bytes: &[u8]) -> Result<usize, MemoryError> {
        let room = usize::try_from(block.len().saturating_sub(at.into())).unwrap_or(0);
        let bytes = bytes.get(..room).unwrap_or(bytes);
        let to = block.offset() + u64::from(at);
        self.memory.write(to as usize, bytes)?;
        Ok(bytes.len())
    }

    /// Fills a block with zeroes.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory cannot be written.
    pub(crate) fn clear(&self, block: Block) -> Result<(), MemoryError> {
        let zeroes = [0; CHUNK];
        for page in 0..block.pages {
            let to = block.offset() + u64::from(page) * u64::from(PAGE);
            self.memory.write(to as usize, &zeroes)?;
        }
        Ok(())
    }
}

/// Sets `list` to the first `len` bytes of a block. Returns `false` if that is impossible.
pub(crate) fn point(list: &mut SegmentList, map: &DmaMap, block: Block, len: u32) -> bool {
    list.clear();
    list.begin_piece(map, block.iova(), len.into(), Access::Write)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QUEUES: u32 = 3;

    proptest! {
        /// Checks that blocks never overlap, and that all memory is available after freeing all
        /// blocks.
        #[test]
        fn pool_blocks_never_overlap_and_are_reusable(
            steps in proptest::collection::vec((any::<bool>(), 0..30_000u64), 1..200),
        ) {
            let mut pool = AssociationMemory::new(QUEUES - 2, (2, 1), 130).unwrap();
            let mut held: Vec<Block> = Vec::new();
            for (take, bytes) in steps {
                if take || held.is_empty() {
                    let Some(block) = pool.take(bytes) else {
                        continue;
                    };
                    prop_assert!(block.len() >= bytes.max(1) && block.page >= QUEUES);
                    prop_assert!(block.page + block.pages <= QUEUES + 130);
                    for other in &held {
                        let apart = block.page + block.pages <= other.page
                            || other.page + other.pages <= block.page;
                        prop_assert!(apart, "{block:?} {other:?}");
                    }
                    held.push(block);
                } else {
                    let at = bytes as usize % held.len();
                    pool.free(held.swap_remove(at));
                }
            }
            held.drain(..).for_each(|block| pool.free(block));
            prop_assert!(pool.is_idle(QUEUES));
            let all = pool.take(130 * u64::from(PAGE)).unwrap();
            prop_assert!(pool.take(1).is_none());
            pool.free(all);
        }
    }

    #[test]
    fn each_queue_has_reserved_block() {
        let mut pool = AssociationMemory::new(1, (2, 2), 8).unwrap();
        let all = pool.take(8 * u64::from(PAGE)).unwrap();
        let blocks = [0, 1].map(|qid| pool.take_reserved(qid, 8192).unwrap());
        assert_eq!(
            blocks.map(|block| (block.page, block.pages)),
            [(1, 2), (3, 2)]
        );
        assert_eq!(all.page, 5);
        assert_eq!(pool.take_reserved(0, 1), None);
        assert_eq!(pool.take_reserved(2, 1), None);
        pool.free(blocks[0]);
        assert_eq!(pool.take_reserved(0, 8193), None);
        assert_eq!(pool.take_reserved(0, 1), Some(blocks[0]));
        assert_eq!(pool.take(1), None);
        blocks.into_iter().for_each(|block| pool.free(block));
        pool.free(all);
        assert!(pool.is_idle(5));
    }

    #[test]
    fn block_reads_back_written_bytes() {
        let mut pool = AssociationMemory::new(1, (0, 0), 8).unwrap();
        let block = pool.take(5000).unwrap();
        assert_eq!(block.len(), 8192);
        let data: Vec<u8> = (0..6000u32).map(|i| i as u8).collect();
        assert_eq!(pool.write(block, 2192, &data), Ok(6000));
        assert_eq!(pool.write(block, 2193, &data), Ok(5999));
        let mut read = Vec::new();
        let result = pool.read(block, 2193, 5999, |bytes| read.extend_from_slice(bytes));
        assert_eq!((result, &read[..]), (Ok(()), &data[..5999]));
        pool.clear(block).unwrap();
        let result = pool.read(block, 0, 8192, |bytes| {
            assert!(bytes.iter().all(|byte| *byte == 0))
        });
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn block_outside_of_memory_passes_no_bytes() {
        let pool = AssociationMemory::new(1, (0, 0), 8).unwrap();
        let (last, beyond) = (Block { page: 8, pages: 2 }, Block { page: 9, pages: 1 });
        let mut passed = 0;
        let result = pool.read(last, 0, 8192, |bytes| passed += bytes.len());
        assert_eq!((result, passed), (Err(MemoryError::OutOfRange), 4096));
        let result = pool.read(beyond, 0, 1, |bytes| passed += bytes.len());
        assert_eq!((result, passed), (Err(MemoryError::OutOfRange), 4096));
        assert_eq!(pool.write(beyond, 0, &[1]), Err(MemoryError::OutOfRange));
        assert_eq!(pool.clear(last), Err(MemoryError::OutOfRange));
    }
}
