//! LBA formats that a host may choose for a namespace with Format NVM, and the interface that
//! stores the chosen format.

use crate::config::NamespaceConfig;
use crate::metadata::MetadataState;
use protection::{Guard, Layout, LayoutError, Protection, StorageTag, Type};
use std::fmt::Debug;
use std::sync::Arc;
use volume::Volume;

/// Logical block sizes in bytes that namespaces may have.
const SIZES: [u32; 2] = [512, 4096];
/// All LBA formats: data bytes and metadata bytes of a block, and the guard. Guards of 32 and 64
/// bits are offered for blocks of 4096 bytes with at least 16 bytes of metadata, the size of their
/// protection information.
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

/// Format of a namespace's blocks, as far as Format NVM selects it: an LBA format (data size,
/// metadata size, guard and storage tag), and the location of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFormat {
    /// Data size of a block in bytes: 512 or 4096.
    pub block: u32,
    /// Metadata size of a block in bytes (MS); 0 for blocks without metadata.
    pub metadata: u16,
    /// Guard of protection information (16, 32 or 64 bits), which an LBA format has even while
    /// protection information is off.
    pub guard: Guard,
    /// Layout of the storage tag in protection information (STS, and LBSTM of the namespace), even
    /// while protection information is off.
    pub storage: StorageTag,
    /// Hosts transfer metadata interleaved with the data of each block (extended LBA), not in a
    /// separate buffer.
    pub extended: bool,
    /// Protection information in the metadata: its type, and whether it is in the first bytes;
    /// `None` when it is off.
    pub protection: Option<(Type, bool)>,
}

impl BlockFormat {
    /// Creates a format without metadata, with blocks of `block` bytes.
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

    /// Returns the format of blocks that have this metadata layout.
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

    /// Returns whether the protection information uses an extended format (a guard of 32 or 64
    /// bits, or a storage tag).
    pub(crate) fn is_extended(&self) -> bool {
        let protection = self.layout().and_then(|layout| layout.protection);
        protection.is_some_and(|protection| protection.is_extended_format())
    }

    /// Returns whether both have the same LBA format index. Storage tags are not compared: no two
    /// LBA formats of a namespace differ by them alone.
    pub fn is_lba_format_of(&self, other: &Self) -> bool {
        let values = |format: &Self| (format.block, format.metadata, format.guard);
        values(self) == values(other)
    }

    /// Checks all fields of the format.
    ///
    /// # Errors
    /// [`LayoutError`] when a field is invalid, or when protection information is on without
    /// metadata.
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

/// Result of a [`FormatStore`] that has stored a new format of a namespace.
#[derive(Debug)]
pub struct KeptFormat {
    /// Empty metadata of the newly formatted blocks; `None` for a format without metadata.
    pub metadata: Option<Arc<MetadataState>>,
}

/// Outcome of [`FormatStore::save`].
#[derive(Debug)]
pub enum SavedFormat {
    /// The format is stored, and survives the end of the process and a loss of power.
    New(KeptFormat),
    /// The format could not be stored. The previous format stays in effect, but its metadata is
    /// void.
    Before,
    /// The format could not be stored, and the next process may find either the new or the previous
    /// one, perhaps without its metadata file. The namespace stays closed until a later format is
    /// stored, or the process ends.
    Unknown,
}

/// Callback that receives the outcome of [`FormatStore::save`], on any thread.
pub type FormatSaved = Box<dyn FnOnce(SavedFormat) + Send>;

/// Storage of a namespace's block format, from which the next process reads it.
pub trait FormatStore: Send + Sync + Debug {
    /// Stores the format, which may equal the present one. The namespace was erased, so all
    /// metadata of its blocks becomes void.
    ///
    /// Must not block. Calls `done` once, on any thread: with [`SavedFormat::New`] when the new
    /// format survives the end of the process and a loss of power; with [`SavedFormat::Before`]
    /// only when the previous format does; otherwise with [`SavedFormat::Unknown`]. The controller
    /// makes one call at a time. If `done` is dropped without a call, the host's command never
    /// completes.
    fn save(&self, format: BlockFormat, done: FormatSaved);
}

/// LBA formats of a namespace: blocks of 512 and 4096 bytes, each with or without metadata, as far
/// as its volume supports them.
#[derive(Clone, Debug)]
pub struct Formats {
    /// Block formats of the namespace, by LBA format index.
    list: Vec<BlockFormat>,
    store: Arc<dyn FormatStore>,
    /// Guard and storage tag of the stored format, kept for a format without protection
    /// information.
    tuples: (Guard, StorageTag),
    /// Metadata file, which all formats with metadata use; `None` if there is none.
    file: Option<Arc<dyn Volume>>,
}

impl Formats {
    /// Creates the list of two formats without metadata: format 0 with blocks of `first` bytes (512
    /// or 4096), and format 1 with the other size.
    pub fn new(first: u32, store: Arc<dyn FormatStore>) -> Self {
        Self {
            list: plain_from(first),
            store,
            tuples: tuples_of(&BlockFormat::plain(first)),
            file: None,
        }
    }

    /// Creates a list that includes formats with metadata. Format 0 is `first`, with its storage
    /// tag and any type of protection. The rest follow by block size, guard and metadata size,
    /// those without metadata first; each has the smallest storage tag. `now` is the stored format;
    /// `file` makes the metadata of any format durable.
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

    /// Returns whether the namespace has any LBA format with metadata.
    pub fn has_metadata(&self) -> bool {
        self.list.iter().any(|format| format.metadata > 0)
    }

    /// Returns the metadata file.
    pub(crate) fn file(&self) -> Option<&Arc<dyn Volume>> {
        self.file.as_ref()
    }

    /// Sets the format that is recorded as the stored one.
    pub(crate) fn set(&mut self, format: BlockFormat) {
        self.tuples = tuples_of(&format);
    }

    /// Returns the store that keeps the chosen format.
    pub(crate) fn store(&self) -> &Arc<dyn FormatStore> {
        &self.store
    }
}

/// Returns the guard and the storage tag of a block format.
fn tuples_of(format: &BlockFormat) -> (Guard, StorageTag) {
    (format.guard, format.storage)
}

/// Returns the block sizes in bytes by LBA format index; format 0 has blocks of `first` bytes.
pub(crate) fn sizes_from(first: u32) -> [u32; 2] {
    let other = SIZES.into_iter().find(|size| *size != first);
    [first, other.unwrap_or(first)]
}

/// Returns all LBA formats without metadata, in the order of their index. Format 0 has blocks of
/// `first` bytes (512 or 4096).
pub(crate) fn plain_from(first: u32) -> Vec<BlockFormat> {
    sizes_from(first).map(BlockFormat::plain).into()
}

/// Returns the formats by index for a namespace with blocks of `current` bytes. An entry is `None`
/// when `fits` refuses its block size; trailing ones are left out.
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
    /// Returns the block format that the namespace has at present.
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

    /// Returns the LBA formats of the namespace by index; `None` for an unavailable format.
    pub(crate) fn lba_formats(&self) -> Vec<Option<BlockFormat>> {
        let Some(formats) = &self.formats else {
            return vec![Some(self.format())];
        };
        let info = self.volume.info();
        let fits = |size: u32| info.block_size <= size && info.size.is_multiple_of(size.into());
        available(&formats.list, self.block_size, fits)
    }

    /// Returns the LBA format index of the namespace's present format (FLBAS).
    pub(crate) fn lba_format(&self) -> u8 {
        let now = self.format();
        let list = self.formats.iter().flat_map(|formats| &formats.list);
        let index = list.into_iter().position(|one| one.is_lba_format_of(&now));
        index.unwrap_or(0) as u8
    }
}
