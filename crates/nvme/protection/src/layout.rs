//! Layout of a namespace's blocks: data, metadata and protection information.

use crate::{Guard, Protection, StorageTag};

/// Layout of blocks with metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Data size of a block in bytes.
    pub block: u32,
    /// Metadata size of a block in bytes (MS): 8, 16 or 64.
    pub metadata: u16,
    /// Whether hosts transfer metadata interleaved with the data, after each block (extended LBAs),
    /// instead of in a separate buffer.
    pub extended: bool,
    /// Protection information in the metadata, if any.
    pub protection: Option<Protection>,
}

/// Error in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The block size is not supported.
    #[error("blocks of {0} bytes have no metadata: 512 and 4096 are allowed")]
    Block(u32),
    /// The metadata size is not supported.
    #[error("{0} bytes of metadata: 8, 16 and 64 are allowed")]
    Metadata(u16),
    /// The protection tuple is larger than the metadata.
    #[error("a guard of {guard} bits is in a tuple of 16 bytes, and the metadata has {metadata}")]
    Room {
        /// Size of the guard in bits.
        guard: u8,
        /// Size of the metadata in bytes.
        metadata: u16,
    },
    /// The guard size requires larger blocks.
    #[error("a guard of {0} bits is for blocks of 4096 bytes")]
    SmallBlock(u8),
    /// The size of the storage tag is not allowed for this guard.
    #[error("a storage tag of {bits} bits: a guard of {guard} bits has one of {least} to {most}")]
    StorageTag {
        /// Size of the storage tag in bits.
        bits: u8,
        /// Size of the guard in bits.
        guard: u8,
        /// Minimum size in bits.
        least: u8,
        /// Maximum size in bits.
        most: u8,
    },
    /// The mask has bits outside the storage tag.
    #[error("a mask of {mask:#x} for a storage tag of {bits} bits")]
    StorageMask {
        /// Mask of the storage tag.
        mask: u64,
        /// Size of the storage tag in bits.
        bits: u8,
    },
}

impl StorageTag {
    /// Checks that the storage tag is valid for tuples with this guard.
    ///
    /// # Errors
    /// [`LayoutError::StorageTag`] for an invalid size, [`LayoutError::StorageMask`] for an invalid
    /// mask.
    pub fn check(self, guard: Guard) -> Result<(), LayoutError> {
        let Self { bits, mask } = self;
        let (least, most) = guard.storage_bits();
        if !(least..=most).contains(&bits) {
            return Err(LayoutError::StorageTag {
                bits,
                guard: guard.bits(),
                least,
                most,
            });
        }
        match mask & !Self::of(bits).mask {
            0 => Ok(()),
            _ => Err(LayoutError::StorageMask { mask, bits }),
        }
    }
}

impl Layout {
    /// Checks every field.
    ///
    /// # Errors
    /// [`LayoutError`] names the first invalid field. Guards of 32 and 64 bits need blocks of 4096
    /// bytes ("NVM Command Set 1.1", 5.3.1).
    pub fn check(&self) -> Result<(), LayoutError> {
        if !matches!(self.block, 512 | 4096) {
            return Err(LayoutError::Block(self.block));
        }
        if !matches!(self.metadata, 8 | 16 | 64) {
            return Err(LayoutError::Metadata(self.metadata));
        }
        let Some(protection) = self.protection else {
            return Ok(());
        };
        let (guard, metadata) = (protection.guard.bits(), self.metadata);
        if protection.guard.tuple() > usize::from(metadata) {
            return Err(LayoutError::Room { guard, metadata });
        }
        if guard > 16 && self.block < 4096 {
            return Err(LayoutError::SmallBlock(guard));
        }
        protection.storage.check(protection.guard)
    }

    /// Returns whether the metadata consists only of the protection tuple. With PRACT such metadata
    /// is not transferred.
    pub fn is_tuple_only(&self) -> bool {
        let metadata = usize::from(self.metadata);
        self.protection.is_some_and(|p| p.guard.tuple() == metadata)
    }

    /// Fills in the metadata of a block that was never written: a tuple of all ones, which disables
    /// checks, and zeroes ("NVM Command Set 1.1", 3.3.3.2.1).
    pub fn unwritten(&self, metadata: &mut [u8]) {
        metadata.fill(0);
        if let Some(protection) = self.protection
            && let Some(tuple) = protection.tuple_in_mut(metadata)
        {
            tuple.fill(0xff);
        }
    }
}
