//! LBA formats that a host may give a namespace (Format NVM), and where the one that it has chosen
//! is kept.

use crate::config::NamespaceConfig;
use protection::{Guard, Layout, LayoutError, Protection, Type};
use std::fmt::Debug;
use std::sync::Arc;

/// Block sizes in bytes that there are.
const SIZES: [u32; 2] = [512, 4096];

/// What the blocks of a namespace look like, as far as Format NVM chooses it: an LBA format (its
/// data, metadata and guard), and how that has metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFormat {
    /// Bytes of data in a block: 512 or 4096.
    pub block: u32,
    /// Bytes of metadata of a block (MS), 0 for none.
    pub metadata: u16,
    /// The guard of protection information: which one that would be, where there is none (PIF).
    pub guard: Guard,
    /// Hosts have the metadata behind each block's data.
    pub extended: bool,
    /// The metadata contains protection information: of this type, and in its first bytes.
    pub protection: Option<(Type, bool)>,
}

impl BlockFormat {
    /// Blocks of so many bytes without metadata.
    pub const fn plain(block: u32) -> Self {
        Self {
            block,
            metadata: 0,
            guard: Guard::Bits16,
            extended: false,
            protection: None,
        }
    }

    /// What the layout of blocks with metadata says.
    pub fn of(layout: &Layout) -> Self {
        let protection = layout.protection;
        Self {
            block: layout.block,
            metadata: layout.metadata,
            guard: protection.map_or(Guard::Bits16, |protection| protection.guard),
            extended: layout.extended,
            protection: protection.map(|protection| (protection.kind, protection.first)),
        }
    }

    /// How the blocks have metadata; `None`: they have none.
    pub fn layout(&self) -> Option<Layout> {
        let guard = self.guard;
        let protection = |(kind, first)| Protection { kind, guard, first };
        (self.metadata > 0).then(|| Layout {
            block: self.block,
            metadata: self.metadata,
            extended: self.extended,
            protection: self.protection.map(protection),
        })
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`LayoutError`], also of protection information without metadata.
    pub fn check(&self) -> Result<(), LayoutError> {
        match self.layout() {
            Some(layout) => layout.check(),
            None if !SIZES.contains(&self.block) => Err(LayoutError::Block(self.block)),
            None if self.protection.is_some() => Err(LayoutError::Metadata(0)),
            None => Ok(()),
        }
    }
}

/// What is to be called when a format is kept, or cannot be: `true`, or `false`.
pub type FormatSaved = Box<dyn FnOnce(bool) + Send>;

/// Where a namespace's format is kept, so that the next process has it so.
pub trait FormatStore: Send + Sync + Debug {
    /// Keeps the format. Must not block, and calls `done`, on whatever thread: `true` when it
    /// outlasts the process and a loss of power, `false` when the one before is kept. One call at a
    /// time. A store that drops `done` without a call leaves the host's command without an end.
    fn save(&self, format: BlockFormat, done: FormatSaved);
}

/// The LBA formats of a namespace: blocks of 512 and of 4096 bytes, as far as its volume can have
/// them.
#[derive(Clone, Debug)]
pub struct Formats {
    /// By the formats' indices.
    list: Vec<BlockFormat>,
    store: Arc<dyn FormatStore>,
}

impl Formats {
    /// Format 0 has blocks of `first` bytes (512 or 4096), format 1 of the other size.
    pub fn new(first: u32, store: Arc<dyn FormatStore>) -> Self {
        Self {
            list: plain_from(first),
            store,
        }
    }

    /// Where the choice is kept.
    pub(crate) fn store(&self) -> &Arc<dyn FormatStore> {
        &self.store
    }
}

/// Block sizes by the indices of formats, of which format 0 has this one.
pub(crate) fn sizes_from(first: u32) -> [u32; 2] {
    let other = SIZES.into_iter().find(|size| *size != first);
    [first, other.unwrap_or(first)]
}

/// Formats without metadata, of which format 0 has blocks of so many bytes.
pub(crate) fn plain_from(first: u32) -> Vec<BlockFormat> {
    sizes_from(first).map(BlockFormat::plain).into()
}

/// Those that a namespace can have whose blocks are of `current` bytes; `None`: that one is not
/// available.
pub(crate) fn available(
    list: &[BlockFormat],
    current: u32,
    fits: impl Fn(u32) -> bool,
) -> Vec<Option<BlockFormat>> {
    let fits = |format: BlockFormat| format.block == current || fits(format.block);
    let found = list.iter().map(|format| Some(*format).filter(|f| fits(*f)));
    let mut found: Vec<_> = found.collect();
    let last = found.iter().rposition(Option::is_some);
    found.truncate(last.map_or(0, |last| last + 1));
    found
}

impl NamespaceConfig {
    /// The format that it has.
    pub(crate) fn format(&self) -> BlockFormat {
        match &self.metadata {
            Some(metadata) => BlockFormat::of(metadata.layout()),
            None => BlockFormat::plain(self.block_size),
        }
    }

    /// Its LBA formats by their indices; `None`: that one is not available.
    pub(crate) fn lba_formats(&self) -> Vec<Option<BlockFormat>> {
        let Some(formats) = &self.formats else {
            return vec![Some(self.format())];
        };
        let info = self.volume.info();
        let fits = |size: u32| info.block_size <= size && info.size.is_multiple_of(size.into());
        available(&formats.list, self.block_size, fits)
    }

    /// The index of the one that it has.
    pub(crate) fn lba_format(&self) -> u8 {
        let list = self.formats.as_ref().map(|formats| &formats.list);
        let place = |list: &Vec<BlockFormat>| list.iter().position(|f| f.block == self.block_size);
        list.and_then(place).unwrap_or(0) as u8
    }
}
