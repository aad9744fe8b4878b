//! Metadata of a namespace's blocks, and the memory-mapped file that contains it.
//!
//! Other processes may map the file, too. A store to the mapping needs no system call, and the next
//! process finds it after a crash of this one. The file is also opened as a volume: when a host
//! requests durability (Flush, Force Unit Access), the command waits until the file is flushed.

use dma::{MapError, SharedPages};
use protection::Layout;
use protection::table::{self, Block, BlockLookup};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use volume::Volume;

/// Size in bytes of the largest entry, that of a block with 64 bytes of metadata.
const ENTRY: usize = table::entry(64);

/// Metadata of all blocks of a namespace, in memory or in a mapped file.
#[derive(Debug)]
pub struct MetadataState {
    layout: Layout,
    blocks: u64,
    generation: AtomicU32,
    pages: SharedPages,
    volume: Option<Arc<dyn Volume>>,
}

/// State of one block's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredMetadata {
    /// The block was never written, so the metadata has its default value.
    Unwritten,
    /// The stored metadata belongs to the data that was read.
    Written,
    /// The data that was read does not match the newest stored metadata, which is returned.
    Damaged,
}

impl MetadataState {
    /// Opens metadata in the pages of a file; `generation` is from its header ([`table::decode`]).
    /// Flushes of `volume`, the same file, make stores durable. Returns `None` when there are fewer
    /// pages than the blocks need.
    pub fn new(
        layout: Layout,
        blocks: u64,
        generation: u32,
        pages: SharedPages,
        volume: Option<Arc<dyn Volume>>,
    ) -> Option<Self> {
        let needed = table::len(blocks, layout.metadata)?;
        (needed <= pages.len() as u64).then_some(Self {
            layout,
            blocks,
            generation: AtomicU32::new(generation),
            pages,
            volume,
        })
    }

    /// Creates metadata in anonymous memory, which does not outlast the process.
    ///
    /// # Errors
    /// [`MapError`] when the memory cannot be mapped.
    pub fn in_memory(layout: Layout, blocks: u64) -> Result<Self, MapError> {
        let len = table::len(blocks, layout.metadata).and_then(|len| usize::try_from(len).ok());
        let pages = SharedPages::named("vnvme-metadata", len.ok_or(MapError::Overflow)?)?;
        let made = Self::new(layout, blocks, 1, pages, None);
        made.ok_or(MapError::Overflow)
    }

    /// Returns the metadata layout of the blocks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the number of blocks of the namespace.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the metadata file, and whether another process has truncated it. Stores to a
    /// truncated file are lost.
    pub(crate) fn file(&self) -> Option<(&Arc<dyn Volume>, bool)> {
        self.volume.as_ref().map(|volume| (volume, self.is_lost()))
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.pages.memory().is_poisoned()
    }

    fn block(&self, lba: u64, checksum: u32) -> Block {
        Block {
            lba,
            checksum,
            generation: self.generation.load(Ordering::Relaxed),
        }
    }

    /// Returns the metadata entry of a block: its offset in the file, its bytes, and its length.
    fn entry(&self, lba: u64) -> Option<(usize, [u8; ENTRY], usize)> {
        let len = table::entry(self.layout.metadata);
        let at = usize::try_from(lba).ok()?.checked_mul(len)?;
        let at = at.checked_add(table::HEADER)?;
        let mut bytes = [0; ENTRY];
        let entry = bytes.get_mut(..len)?;
        self.pages.memory().read(at, entry).ok()?;
        Some((at, bytes, len))
    }

    /// Reads the metadata of a block; `checksum` of the block's data selects between the newest and
    /// the previous version. Returns `None` when the file is truncated.
    pub(crate) fn read(
        &self,
        lba: u64,
        checksum: u32,
        metadata: &mut [u8],
    ) -> Option<StoredMetadata> {
        let (_, bytes, len) = self.entry(lba)?;
        let found = table::find(bytes.get(..len)?, self.block(lba, checksum));
        Some(match found {
            BlockLookup::Unwritten => {
                self.layout.unwritten(metadata);
                StoredMetadata::Unwritten
            }
            BlockLookup::Written(kept) => {
                metadata.copy_from_slice(kept);
                StoredMetadata::Written
            }
            BlockLookup::Damaged(kept) => {
                metadata.copy_from_slice(kept);
                StoredMetadata::Damaged
            }
        })
    }

    /// Stores the metadata of a block before its data is written. Returns `None` when the file is
    /// truncated.
    pub(crate) fn write(&self, lba: u64, checksum: u32, metadata: &[u8]) -> Option<()> {
        let (at, bytes, len) = self.entry(lba)?;
        let entry = bytes.get(..len)?;
        let (place, word) = table::put(entry, self.block(lba, checksum), metadata);
        let (memory, at) = (self.pages.memory(), at + place);
        memory.write(at + table::WORD, metadata).ok()?;
        crash::point!("controller.metadata.stored");
        memory
            .atomic_u64(at)?
            .store(word.to_le(), Ordering::Release);
        crash::point!("controller.metadata.kept");
        (!self.is_lost()).then_some(())
    }

    fn store(&self, at: usize, place: Option<(usize, u64)>) {
        if let Some((place, word)) = place
            && let Some(cell) = self.pages.memory().atomic_u64(at + place)
        {
            cell.store(word.to_le(), Ordering::Release);
        }
    }

    /// Returns whether any of these blocks may match either the newest or the previous version of
    /// its metadata. Before such a block is overwritten, its data has to be read for
    /// [`MetadataState::settle`].
    pub(crate) fn is_in_doubt(&self, slba: u64, blocks: u64) -> bool {
        let generation = self.generation.load(Ordering::Relaxed);
        (slba..).zip(0..blocks).any(|(lba, _)| {
            let entry = self.entry(lba);
            let entry = entry.as_ref().and_then(|(_, bytes, len)| bytes.get(..*len));
            entry.is_some_and(|entry| table::is_in_doubt(entry, generation))
        })
    }

    /// Decides by the `checksum` of a block's data which version of its metadata is valid, before
    /// the block is overwritten.
    pub(crate) fn settle(&self, lba: u64, checksum: u32) {
        if let Some((at, bytes, len)) = self.entry(lba)
            && let Some(entry) = bytes.get(..len)
            && table::is_in_doubt(entry, self.generation.load(Ordering::Relaxed))
        {
            self.store(at, table::settle(entry, self.block(lba, checksum)));
        }
    }

    /// Records that a block's data was written, so that its newest metadata is valid.
    pub(crate) fn done(&self, lba: u64) {
        if let Some((at, bytes, len)) = self.entry(lba)
            && let Some(entry) = bytes.get(..len)
        {
            let generation = self.generation.load(Ordering::Relaxed);
            self.store(at, table::done(entry, generation));
        }
    }

    /// Invalidates the metadata of all blocks after their data was erased, by starting a new
    /// generation.
    pub(crate) fn forget(&self) {
        let next = table::next_generation(self.generation.load(Ordering::Relaxed));
        self.generation.store(next, Ordering::Relaxed);
        if let Some(word) = self.pages.memory().atomic_u64(table::GENERATION) {
            word.store(u64::from(next).to_le(), Ordering::Release);
        }
    }
}
