//! Layout of a namespace's blocks: data, metadata and protection information.

use crate::{Guard, Protection, StorageTag};

/// Blocks with metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of data in a block.
    pub block: u32,
    /// Bytes of metadata of a block (MS): 8, 16 or 64.
    pub metadata: u16,
    /// Hosts have the metadata behind each block's data (extended LBAs), not in a buffer of its
    /// own.
    pub extended: bool,
    /// The metadata contains protection information.
    pub protection: Option<Protection>,
}

/// Error in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The size of blocks.
    #[error("blocks of {0} bytes have no metadata: 512 and 4096 are allowed")]
    Block(u32),
    /// The size of metadata.
    #[error("{0} bytes of metadata: 8, 16 and 64 are allowed")]
    Metadata(u16),
    /// The tuple is larger than the metadata.
    #[error("a guard of {guard} bits is in a tuple of 16 bytes, and the metadata has {metadata}")]
    Room {
        /// Bits of the guard.
        guard: u8,
        /// Bytes of the metadata.
        metadata: u16,
    },
    /// The larger guards are of large blocks.
    #[error("a guard of {0} bits is for blocks of 4096 bytes")]
    SmallBlock(u8),
    /// The size of the storage tag.
    #[error("a storage tag of {bits} bits: a guard of {guard} bits has one of {least} to {most}")]
    StorageTag {
        /// Bits of the storage tag.
        bits: u8,
        /// Bits of the guard.
        guard: u8,
        /// The fewest bits.
        least: u8,
        /// The most bits.
        most: u8,
    },
    /// The mask of the storage tag has bits that the tag has not.
    #[error("a mask of {mask:#x} for a storage tag of {bits} bits")]
    StorageMask {
        /// The mask.
        mask: u64,
        /// Bits of the storage tag.
        bits: u8,
    },
}

impl StorageTag {
    /// Checks whether tuples with that guard can have it.
    ///
    /// # Errors
    /// [`LayoutError::StorageTag`], [`LayoutError::StorageMask`].
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
    /// See [`LayoutError`]. Guards of 32 and 64 bits need blocks of 4096 bytes ("NVM Command Set
    /// 1.1", 5.3.1).
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

    /// Returns whether the metadata is only the tuple, which is not transferred if the host sets
    /// PRACT.
    pub fn is_tuple_only(&self) -> bool {
        let metadata = usize::from(self.metadata);
        self.protection.is_some_and(|p| p.guard.tuple() == metadata)
    }

    /// Fills in the metadata of a block that was never written: a tuple of ones, which is not
    /// checked, and zeroes ("NVM Command Set 1.1", 3.3.3.2.1).
    pub fn unwritten(&self, metadata: &mut [u8]) {
        metadata.fill(0);
        if let Some(protection) = self.protection
            && let Some(tuple) = protection.tuple_in_mut(metadata)
        {
            tuple.fill(0xff);
        }
    }
}
