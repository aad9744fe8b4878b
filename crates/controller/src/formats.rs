//! LBA formats that a host may choose for a namespace (Format NVM), and the storage of the chosen
//! one.

use crate::config::NamespaceConfig;
use crate::metadata::MetadataState;
use protection::{Guard, Layout, LayoutError, Protection, StorageTag, Type};
use std::fmt::Debug;
use std::sync::Arc;
use volume::Volume;

/// Supported block sizes in bytes.
const SIZES: [u32; 2] = [512, 4096];
/// LBA formats: bytes of data and of metadata in a block, and the guard. The larger guards are of
/// large blocks, in tuples of 16 bytes.
const ALL: [(u32, u16, Guard); 12] = [
    (512, 0, Guard::Bits16),
    (4096, 0, Guard::Bits16),
    (512, 8, Guard::Bits16),
    (512, 16, Guard::Bits16),
    (512, 64, Guard::Bits16),
    (4096, 8, Guard::Bits16),
    (4096, 16, Guard::Bits16),
    (4096, 64, Guard::Bits16),
    (4096, 16, Guard::Bits32),
    (4096, 64, Guard::Bits32),
    (4096, 16, Guard::Bits64),
    (4096, 64, Guard::Bits64),
];

/// Format of a namespace's blocks, as far as Format NVM chooses it: an LBA format (data size,
/// metadata size, guard and storage tag), and the location of its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFormat {
    /// Bytes of data in a block: 512 or 4096.
    pub block: u32,
    /// Bytes of metadata of a block (MS), 0 for none.
    pub metadata: u16,
    /// The guard of protection information, or the one it would have if there is none (PIF).
    pub guard: Guard,
    /// The storage tag of protection information, likewise (STS, and LBSTM of the namespace).
    pub storage: StorageTag,
    /// Hosts transfer the metadata behind each block's data.
    pub extended: bool,
    /// Protection information in the metadata: its type, and whether it is in the first bytes.
    pub protection: Option<(Type, bool)>,
}

impl BlockFormat {
    /// Creates a format of blocks of that many bytes without metadata.
    pub const fn plain(block: u32) -> Self {
        Self {
            block,
            metadata: 0,
            guard: Guard::Bits16,
            storage: StorageTag::least(Guard::Bits16),
            extended: false,
            protection: None,
        }
    }

    /// Returns the format of blocks with this metadata layout.
    pub fn of(layout: &Layout) -> Self {
        let protection = layout.protection;
        let guard = protection.map_or(Guard::Bits16, |protection| protection.guard);
        Self {
            block: layout.block,
            metadata: layout.metadata,
            guard,
            storage: protection.map_or(StorageTag::least(guard), |p| p.storage),
            extended: layout.extended,
            protection: protection.map(|protection| (protection.kind, protection.first)),
        }
    }

    /// Returns the metadata layout; `None` when the blocks have no metadata.
    pub fn layout(&self) -> Option<Layout> {
        let Self { guard, storage, .. } = *self;
        let protection = |(kind, first)| Protection {
            kind,
            guard,
            storage,
            first,
        };
        (self.metadata > 0).then(|| Layout {
            block: self.block,
            metadata: self.metadata,
            extended: self.extended,
            protection: self.protection.map(protection),
        })
    }

    /// Returns whether the protection information has an extended format.
    pub(crate) fn is_extended(&self) -> bool {
        let protection = self.layout().and_then(|layout| layout.protection);
        protection.is_some_and(|protection| protection.is_extended_format())
    }

    /// Returns whether both have the same LBA format, by its index: no two formats of a namespace
    /// differ by their storage tags alone.
    pub fn is_lba_format_of(&self, other: &Self) -> bool {
        let values = |format: &Self| (format.block, format.metadata, format.guard);
        values(self) == values(other)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`LayoutError`] when a field is invalid, and for protection information without metadata.
    pub fn check(&self) -> Result<(), LayoutError> {
        self.storage.check(self.guard)?;
        match self.layout() {
            Some(layout) => layout.check(),
            None if !SIZES.contains(&self.block) => Err(LayoutError::Block(self.block)),
            None if self.protection.is_some() => Err(LayoutError::Metadata(0)),
            None => Ok(()),
        }
    }
}

/// A stored format.
#[derive(Debug)]
pub struct KeptFormat {
    /// Metadata of the blocks, of which none was ever written; `None` when they have none.
    pub metadata: Option<Arc<MetadataState>>,
}

/// Outcome of storing a format.
#[derive(Debug)]
pub enum SavedFormat {
    /// The format is stored, and outlasts the process and a loss of power.
    New(KeptFormat),
    /// The format cannot be stored. The previous one is in effect; its metadata is no longer
    /// valid.
    Before,
    /// The format cannot be stored, and the next process may find either the new or the previous
    /// one, perhaps without a file for its metadata. The namespace is closed until a later format
    /// is stored, or the process ends.
    Unknown,
}

/// Callback for the end of a save, with its outcome.
pub type FormatSaved = Box<dyn FnOnce(SavedFormat) + Send>;

/// Storage of a namespace's format for the next process.
pub trait FormatStore: Send + Sync + Debug {
    /// Stores the format, which may be the present one: the namespace is erased, and all metadata
    /// of its blocks is void. Must not block, and calls `done`, on any thread: with
    /// [`SavedFormat::New`] when the format outlasts the process and a loss of power, and with
    /// [`SavedFormat::Before`] only when the same is true of the previous one. Any other outcome
    /// is [`SavedFormat::Unknown`]. One call at a time. A store that drops `done` without a call
    /// leaves the host's command without a completion.
    fn save(&self, format: BlockFormat, done: FormatSaved);
}

/// The LBA formats of a namespace: blocks of 512 and of 4096 bytes, as far as its volume can have
/// them, and perhaps with metadata.
#[derive(Clone, Debug)]
pub struct Formats {
    /// Formats by their indices.
    list: Vec<BlockFormat>,
    store: Arc<dyn FormatStore>,
    /// Guard and storage tag of the stored format, for blocks without protection information.
    tuples: (Guard, StorageTag),
    /// The file of the metadata, independent of the format.
    file: Option<Arc<dyn Volume>>,
}

impl Formats {
    /// Creates the formats without metadata: format 0 has blocks of `first` bytes (512 or 4096),
    /// format 1 of the other size.
    pub fn new(first: u32, store: Arc<dyn FormatStore>) -> Self {
        Self {
            list: plain_from(first),
            store,
            tuples: tuples_of(&BlockFormat::plain(first)),
            file: None,
        }
    }

    /// Creates formats of which some have metadata. Format 0 is that of `first`; the rest follow
    /// in the order of their block sizes, guards and metadata sizes, those without metadata in
    /// front. Format 0 has the storage tag of `first`, with any type of protection, and the rest
    /// have the smallest. `now` is the stored format; `file` makes the metadata of any format
    /// durable.
    pub fn with_metadata(
        first: BlockFormat,
        now: BlockFormat,
        file: Option<Arc<dyn Volume>>,
        store: Arc<dyn FormatStore>,
    ) -> Self {
        let others = ALL.into_iter().map(|(block, metadata, guard)| BlockFormat {
            metadata,
            guard,
            storage: StorageTag::least(guard),
            ..BlockFormat::plain(block)
        });
        let others = others.filter(|other| !other.is_lba_format_of(&first));
        let of_index = BlockFormat {
            extended: false,
            protection: None,
            ..first
        };
        Self {
            list: [of_index].into_iter().chain(others).collect(),
            store,
            tuples: tuples_of(&now),
            file,
        }
    }

    /// Returns whether any format has metadata.
    pub fn has_metadata(&self) -> bool {
        self.list.iter().any(|format| format.metadata > 0)
    }

    /// Returns the file of the metadata.
    pub(crate) fn file(&self) -> Option<&Arc<dyn Volume>> {
        self.file.as_ref()
    }

    /// Sets the stored format.
    pub(crate) fn set(&mut self, format: BlockFormat) {
        self.tuples = tuples_of(&format);
    }

    /// Returns the store of the format.
    pub(crate) fn store(&self) -> &Arc<dyn FormatStore> {
        &self.store
    }
}

/// Returns guard and storage tag of the format's protection information.
fn tuples_of(format: &BlockFormat) -> (Guard, StorageTag) {
    (format.guard, format.storage)
}

/// Returns block sizes by the indices of formats, of which format 0 has this one.
pub(crate) fn sizes_from(first: u32) -> [u32; 2] {
    let other = SIZES.into_iter().find(|size| *size != first);
    [first, other.unwrap_or(first)]
}

/// Returns the formats without metadata, of which format 0 has blocks of that many bytes.
pub(crate) fn plain_from(first: u32) -> Vec<BlockFormat> {
    sizes_from(first).map(BlockFormat::plain).into()
}

/// Returns the formats that a namespace with blocks of `current` bytes can have; `None`: the
/// format is not available.
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
    /// Returns the present format.
    pub(crate) fn format(&self) -> BlockFormat {
        let Some(metadata) = &self.metadata else {
            return BlockFormat::plain(self.block_size);
        };
        let format = BlockFormat::of(metadata.layout());
        match &self.formats {
            Some(formats) if format.protection.is_none() => {
                let (guard, storage) = formats.tuples;
                BlockFormat {
                    guard,
                    storage,
                    ..format
                }
            }
            _ => format,
        }
    }

    /// Returns the LBA formats by their indices; `None`: the format is not available.
    pub(crate) fn lba_formats(&self) -> Vec<Option<BlockFormat>> {
        let Some(formats) = &self.formats else {
            return vec![Some(self.format())];
        };
        let info = self.volume.info();
        let fits = |size: u32| info.block_size <= size && info.size.is_multiple_of(size.into());
        available(&formats.list, self.block_size, fits)
    }

    /// Returns the index of the present LBA format.
    pub(crate) fn lba_format(&self) -> u8 {
        let now = self.format();
        let list = self.formats.iter().flat_map(|formats| &formats.list);
        let index = list.into_iter().position(|one| one.is_lba_format_of(&now));
        index.unwrap_or(0) as u8
    }
}
