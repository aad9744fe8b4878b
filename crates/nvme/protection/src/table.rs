//! File format of a namespace's metadata, beside the volume that has the data.
//!
//! ```text
//! byte 0      header (one page)   layout of the blocks, and identity of the namespace; the word at
//!                                 byte 64, the generation, is the only one that changes
//! byte 4096   entry 0, entry 1..  one for each block: two places for its metadata
//! ```
//!
//! A place is a word and metadata. The word has a checksum over the block's data, its metadata and
//! its number, and over the rest of the word: a sequence number that identifies the newer place,
//! and the generation. A write goes to the older place before its data is written to the volume.
//! Whichever data is found there, old or new, the place whose checksum matches has its metadata. If
//! neither matches, the data is damaged, or was torn.
//!
//! One bit of the word, not covered by the checksum, marks that the write has ended well. If the
//! newer place lacks it, either place may belong to the data ([`is_in_doubt`]). Before one is
//! reused for another write, the data is read, and the other place is given up ([`settle`]).
//!
//! Places of another generation belong to blocks that were never written: so one store discards all
//! of them.
//!
//! Version 1 has storage tags of the guard's fewest bits ([`StorageTag::least`]), and is still
//! written for those. Version 2 stores the number of bits, which older programs do not know. The
//! mask is in no file: it changes the comparison, not the tuple.

use crate::{Guard, Layout, StorageTag, Type};
use crc32fast::Hasher;

/// Size of the header in bytes, before the first entry.
pub const HEADER: usize = 4096;
/// Byte offset of the generation in the header of a metadata file.
pub const GENERATION: usize = 64;
/// Size in bytes of a slot's word, which precedes the slot's metadata.
pub const WORD: usize = 8;
/// Bit of a word that is set after the write has completed successfully.
const DONE: u64 = 1 << 39;
/// Newest version of the file format that this program writes.
pub const VERSION: u32 = 2;
/// Version of files with storage tags of the minimum size.
const MIN_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"vnvmemet";
/// Number of bytes of the header that its checksum covers.
const CHECKED: usize = 48;
/// Mask of the sequence numbers in the words of slots, which wrap around.
const NUMBERS: u8 = 0x7f;
/// Number of bits of a metadata file's generation.
const GENERATIONS: u32 = 24;

/// Reason why a metadata file is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The metadata file is truncated.
    #[error("it has {found} bytes instead of the {needed} of these blocks' metadata")]
    Size {
        /// Number of bytes that the file has.
        found: u64,
        /// Number of bytes that the layout requires.
        needed: u64,
    },
    /// The magic number of the file does not match.
    #[error("not a metadata file")]
    Magic,
    /// A newer program has written the file.
    #[error("unknown format version {0}")]
    Version(u32),
    /// The checksum of the header does not match.
    #[error("the header is damaged")]
    Checksum,
    /// The metadata file belongs to another namespace.
    #[error("it has the metadata of another volume")]
    OtherNamespace,
    /// The metadata file was written for another metadata layout.
    #[error(
        "it is of {blocks} blocks of {block} bytes with {metadata} bytes of metadata (protection \
         {protection}, guard of {guard} bits, storage tag of {storage}{first}), unlike the \
         configured namespace"
    )]
    OtherLayout {
        /// Number of blocks, as the file states it.
        blocks: u64,
        /// Data size of a block in bytes, as the file states it.
        block: u32,
        /// Metadata size of a block in bytes, as the file states it.
        metadata: u16,
        /// Type of protection information, as the file states it; 0 for none.
        protection: u8,
        /// Size of the guard in bits, as the file states it.
        guard: u8,
        /// Size of the storage tag in bits, as the file states it.
        storage: u8,
        /// Location of protection information in the metadata, as text for the message.
        first: &'static str,
    },
}

/// Identity of the namespace that a metadata file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Identifier of the namespace, derived from its volume.
    pub namespace: [u8; 16],
    /// Number of blocks in the namespace.
    pub blocks: u64,
}

/// Returns the size in bytes of the entry of a block with `metadata` bytes of metadata.
pub const fn entry(metadata: u16) -> usize {
    2 * (WORD + metadata as usize)
}

/// Returns the size in bytes of a file for `blocks` blocks; `None` when that overflows. Without
/// metadata, the file has only the header.
pub fn len(blocks: u64, metadata: u16) -> Option<u64> {
    if metadata == 0 {
        return Some(HEADER as u64);
    }
    let entries = blocks.checked_mul(entry(metadata) as u64)?;
    let all = entries.checked_add(HEADER as u64)?;
    all.checked_next_multiple_of(HEADER as u64)
}

/// Returns the header of a new file. The rest of a new file is zeroes.
pub fn encode(layout: &Layout, identity: Identity) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    let shape = Shape::of(layout);
    let (version, storage) = shape.version();
    bytes.extend(version.to_le_bytes());
    bytes.extend(layout.block.to_le_bytes());
    bytes.extend(identity.namespace);
    bytes.extend(identity.blocks.to_le_bytes());
    bytes.extend(layout.metadata.to_le_bytes());
    bytes.extend([shape.kind, shape.guard, u8::from(shape.first), storage]);
    bytes.resize(CHECKED, 0);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes.resize(GENERATION, 0);
    bytes.extend(1_u64.to_le_bytes());
    bytes.resize(HEADER, 0);
    bytes
}

/// Fields of the header that describe protection information; all zero without it.
#[derive(Default, PartialEq, Eq)]
struct Shape {
    kind: u8,
    guard: u8,
    first: bool,
    storage: u8,
}

impl Shape {
    fn of(layout: &Layout) -> Self {
        let Some(protection) = layout.protection else {
            return Self::default();
        };
        let kind: Type = protection.kind;
        Self {
            kind: kind as u8,
            guard: protection.guard.bits(),
            first: protection.first,
            storage: protection.storage.bits,
        }
    }

    /// Returns the size of storage tags in version 1 for a guard, in bits.
    fn least(guard: u8) -> u8 {
        Guard::of(guard).map_or(0, |guard| StorageTag::least(guard).bits)
    }

    /// Returns the version of the file format, and the header field for storage tags.
    fn version(&self) -> (u32, u8) {
        if self.storage == Self::least(self.guard) {
            (MIN_VERSION, 0)
        } else {
            (VERSION, self.storage)
        }
    }
}

/// Checks the header of a file of `size` bytes, and returns the generation.
///
/// # Errors
/// [`TableError`] when the header is damaged, or does not match this namespace.
pub fn decode(
    bytes: &[u8],
    size: u64,
    layout: &Layout,
    identity: Identity,
) -> Result<u32, TableError> {
    let needed = len(identity.blocks, layout.metadata).unwrap_or(u64::MAX);
    let short = TableError::Size {
        found: size,
        needed,
    };
    let mut rest = bytes.get(..HEADER).ok_or(short)?;
    let checked = rest.get(..CHECKED).ok_or(short)?;
    if take(&mut rest) != MAGIC {
        return Err(TableError::Magic);
    }
    let version = u32::from_le_bytes(take(&mut rest));
    if !matches!(version, MIN_VERSION | VERSION) {
        return Err(TableError::Version(version));
    }
    let block = u32::from_le_bytes(take(&mut rest));
    let namespace: [u8; 16] = take(&mut rest);
    let blocks = u64::from_le_bytes(take(&mut rest));
    let metadata = u16::from_le_bytes(take(&mut rest));
    let [kind, guard, first, storage] = take(&mut rest);
    let _: [u8; 2] = take(&mut rest);
    if u32::from_le_bytes(take(&mut rest)) != crc32fast::hash(checked) {
        return Err(TableError::Checksum);
    }
    let shape = Shape {
        kind,
        guard,
        first: first != 0,
        storage: match version {
            MIN_VERSION => Shape::least(guard),
            _ => storage,
        },
    };
    let found = (block, blocks, metadata);
    let wanted = (layout.block, identity.blocks, layout.metadata);
    if found != wanted || shape != Shape::of(layout) {
        return Err(TableError::OtherLayout {
            blocks,
            block,
            metadata,
            protection: kind,
            guard,
            storage: shape.storage,
            first: if first != 0 { ", in front" } else { "" },
        });
    }
    if namespace != identity.namespace {
        return Err(TableError::OtherNamespace);
    }
    if size != needed {
        return Err(short);
    }
    let _: [u8; GENERATION - CHECKED - 4] = take(&mut rest);
    let generation = u64::from_le_bytes(take(&mut rest));
    let generation = u32::try_from(generation).ok();
    let generation = generation.filter(|number| *number != 0 && *number == wrapped(*number));
    generation.ok_or(TableError::Checksum)
}

/// Checks that a file that begins with these bytes is a metadata file of this namespace. Its layout
/// and the rest of its header are not checked.
///
/// # Errors
/// [`TableError::Magic`] for any other file, [`TableError::OtherNamespace`] for the file of another
/// namespace.
pub fn check_owner(bytes: &[u8], namespace: [u8; 16]) -> Result<(), TableError> {
    let mut rest = bytes;
    if take(&mut rest) != MAGIC {
        return Err(TableError::Magic);
    }
    let _: [u8; 8] = take(&mut rest);
    if take(&mut rest) == namespace {
        Ok(())
    } else {
        Err(TableError::OtherNamespace)
    }
}

/// Removes and returns the first `N` bytes of `rest`, padded with zeroes if there are fewer.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (bytes, behind) = rest.split_first_chunk().unwrap_or((&[0; N], &[]));
    *rest = behind;
    *bytes
}

const fn wrapped(generation: u32) -> u32 {
    generation & ((1 << GENERATIONS) - 1)
}

/// Returns the generation after this one, which wraps around.
pub const fn next_generation(generation: u32) -> u32 {
    match wrapped(generation.wrapping_add(1)) {
        0 => 1,
        next => next,
    }
}

/// Returns the checksum of a block's data, by which its metadata is found ([`Block`]).
pub fn checksum(data: &[u8]) -> u32 {
    crc32fast::hash(data)
}

/// Block of which the metadata is looked up, with the checksum of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Number of the block (LBA).
    pub lba: u64,
    /// [`checksum`] of the block's data.
    pub checksum: u32,
    /// Present generation of the metadata file; older entries are void.
    pub generation: u32,
}

impl Block {
    /// Returns the word of a slot that stores this metadata with sequence number `number`.
    fn word(&self, metadata: &[u8], number: u8) -> u64 {
        let head = wrapped(self.generation) << 8 | u32::from(number & NUMBERS);
        let mut hasher = Hasher::new_with_initial(self.checksum);
        hasher.update(metadata);
        hasher.update(&self.lba.to_le_bytes());
        hasher.update(&head.to_le_bytes());
        u64::from(head) << 32 | u64::from(hasher.finalize())
    }
}

/// Result of looking up the metadata of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockLookup<'a> {
    /// The block was never written.
    Unwritten,
    /// Metadata that belongs to the block's data.
    Written(&'a [u8]),
    /// The data matches no stored metadata; the value is the newest metadata.
    Damaged(&'a [u8]),
}

/// Slot of an entry that was written: its word and its metadata.
type StoredBlock<'a> = (u64, &'a [u8]);

/// Returns the word and metadata of a slot; `None` if it was not written in this generation.
fn place(bytes: &[u8], generation: u32) -> Option<StoredBlock<'_>> {
    let (word, metadata) = bytes.split_first_chunk::<WORD>()?;
    let word = u64::from_le_bytes(*word);
    ((word >> 40) as u32 == wrapped(generation)).then_some((word, metadata))
}

const fn number(word: u64) -> u8 {
    (word >> 32) as u8 & NUMBERS
}

/// Returns both slots of an entry with their offsets, the newer one first.
fn places(entry: &[u8], generation: u32) -> [(usize, Option<StoredBlock<'_>>); 2] {
    let half = entry.len() / 2;
    let (first, second) = entry.split_at(half);
    let (a, b) = (place(first, generation), place(second, generation));
    let swapped = match (a, b) {
        (Some((a, _)), Some((b, _))) => number(b).wrapping_sub(number(a)) & NUMBERS < 0x40,
        (None, _) => true,
        _ => false,
    };
    if swapped {
        [(half, b), (0, a)]
    } else {
        [(0, a), (half, b)]
    }
}

/// Looks up the metadata that belongs to the block's data.
pub fn find(entry: &[u8], block: Block) -> BlockLookup<'_> {
    let [(_, newer), (_, older)] = places(entry, block.generation);
    let matches =
        |(word, metadata): StoredBlock<'_>| block.word(metadata, number(word)) == word & !DONE;
    match (newer, older) {
        (Some(newer), _) if matches(newer) => BlockLookup::Written(newer.1),
        (_, Some(older)) if matches(older) => BlockLookup::Written(older.1),
        (Some((_, metadata)), _) | (None, Some((_, metadata))) => BlockLookup::Damaged(metadata),
        (None, None) => BlockLookup::Unwritten,
    }
}

/// Selects the slot for the metadata of new data. Returns its offset in the entry, and the word to
/// be stored there. The metadata has to be stored behind the word first.
pub fn put(entry: &[u8], block: Block, metadata: &[u8]) -> (usize, u64) {
    let [(_, newer), (at, _)] = places(entry, block.generation);
    let next = newer.map_or(0, |(word, _)| number(word).wrapping_add(1));
    (at, block.word(metadata, next))
}

/// Returns whether either slot may belong to the data, because the write of the newer one has not
/// completed successfully.
pub fn is_in_doubt(entry: &[u8], generation: u32) -> bool {
    match places(entry, generation) {
        [(_, Some((word, _))), (_, Some(_))] => word & DONE == 0,
        _ => false,
    }
}

/// Resolves the doubt about an entry before a new write; `block` describes the data as read.
/// Returns the offset of the slot with the word to replace, and the new word. `None` when no slot
/// matches, or there is no doubt.
pub fn settle(entry: &[u8], block: Block) -> Option<(usize, u64)> {
    let [(at, newer), (_, older)] = places(entry, block.generation);
    let ((word, metadata), (old, before)) = (newer?, older?);
    let matches = |word: u64, metadata| block.word(metadata, number(word)) == word & !DONE;
    match (matches(word, metadata), matches(old, before)) {
        (true, _) => Some((at, word | DONE)),
        (_, true) => Some((at, 0)),
        _ => None,
    }
}

/// Marks the newer slot's write as completed. Returns the offset of the slot and its new word.
pub fn done(entry: &[u8], generation: u32) -> Option<(usize, u64)> {
    let [(at, newer), _] = places(entry, generation);
    Some((at, newer?.0 | DONE))
}
