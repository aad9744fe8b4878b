//! A slice of a namespace, and its guest-visible geometry.

use driver::{Device, Namespace};

/// Reason why a slice of a device's namespace is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// The slice has no blocks.
    #[error("a slice needs at least one block")]
    Empty,
    /// The slice exceeds its namespace.
    #[error("blocks {first_lba} to {first_lba}+{blocks} are not all among the namespace's {size}")]
    OutOfRange {
        /// LBA of the slice's first block.
        first_lba: u64,
        /// Number of blocks of the slice.
        blocks: u64,
        /// Number of blocks of the device's namespace.
        size: u64,
    },
}

/// Consecutive blocks of one namespace of a device. Checked against the namespace when created, so
/// that a block of the slice is always a block of the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    nsid: u32,
    first_lba: u64,
    blocks: u64,
    block_shift: u8,
    read_only: bool,
}

/// Properties of a slice that the guest sees as a namespace, from the device's present state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the slice in blocks (NSZE).
    pub blocks: u64,
    /// Logical block size as a power of two in bytes (LBADS).
    pub block_shift: u8,
    /// Maximum data size of one command of the device in bytes. Larger commands of the guest are
    /// split.
    pub max_transfer: u64,
    /// Whether writes to the slice are refused.
    pub read_only: bool,
    /// Whether the device has a volatile write cache.
    pub volatile_cache: bool,
    /// Whether deallocated blocks read as zeroes.
    pub zeroes_after_deallocate: bool,
    /// Preferred granularity of deallocation in blocks; 0 if none is stated.
    pub deallocate_granularity: u32,
    /// Whether the device supports Compare.
    pub compare: bool,
    /// Whether the device supports Dataset Management.
    pub dataset_management: bool,
    /// Whether the device supports Write Zeroes.
    pub write_zeroes: bool,
    /// Whether the device supports Verify.
    pub verify: bool,
}

impl Slice {
    /// Creates a slice of `blocks` blocks of a namespace from `first_lba` on.
    ///
    /// # Errors
    /// [`SliceError::Empty`] for 0 blocks; [`SliceError::OutOfRange`] beyond the end of the
    /// namespace.
    pub fn new(
        namespace: &Namespace,
        first_lba: u64,
        blocks: u64,
        read_only: bool,
    ) -> Result<Self, SliceError> {
        if blocks == 0 {
            return Err(SliceError::Empty);
        }
        let size = namespace.blocks;
        if first_lba.checked_add(blocks).is_none_or(|end| end > size) {
            return Err(SliceError::OutOfRange {
                first_lba,
                blocks,
                size,
            });
        }
        Ok(Self {
            nsid: namespace.nsid,
            first_lba,
            blocks,
            block_shift: namespace.block_shift,
            read_only: read_only || namespace.write_protected,
        })
    }

    /// Creates a slice of a whole namespace.
    ///
    /// # Errors
    /// [`SliceError::Empty`] for a namespace that no longer exists.
    pub fn whole(namespace: &Namespace, read_only: bool) -> Result<Self, SliceError> {
        Self::new(namespace, 0, namespace.blocks, read_only)
    }

    /// Returns the ID of the device's namespace that contains the slice.
    #[inline]
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Returns the first block of the slice within the namespace.
    pub fn first_lba(&self) -> u64 {
        self.first_lba
    }

    /// Returns the number of blocks of the slice.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the logical block size of the slice, as a power of two in bytes.
    #[inline]
    pub fn block_shift(&self) -> u8 {
        self.block_shift
    }

    /// Returns whether writes to the slice are refused.
    #[inline]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Converts block `lba` of the slice to a block of the namespace; `None` when the slice does
    /// not contain the `blocks` blocks from there on.
    #[inline]
    pub fn lba(&self, lba: u64, blocks: u64) -> Option<u64> {
        let end = lba.checked_add(blocks)?;
        (end <= self.blocks).then(|| self.first_lba + lba)
    }

    /// Returns whether two slices have blocks in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.nsid == other.nsid
            && self.first_lba < other.first_lba + other.blocks
            && other.first_lba < self.first_lba + self.blocks
    }

    /// Returns the guest-visible geometry, from the namespace's current properties.
    pub fn geometry(&self, device: &Device) -> Geometry {
        let limits = device.limits();
        let namespace = device.namespace(self.nsid).ok();
        Geometry {
            blocks: self.blocks,
            block_shift: self.block_shift,
            max_transfer: limits.max_transfer,
            read_only: self.read_only,
            volatile_cache: limits.volatile_cache,
            zeroes_after_deallocate: namespace.is_some_and(|ns| ns.zeroes_after_deallocate),
            deallocate_granularity: namespace.map_or(0, |ns| ns.deallocate_granularity),
            compare: limits.compare,
            dataset_management: limits.dataset_management,
            write_zeroes: limits.write_zeroes,
            verify: limits.verify,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(blocks: u64) -> Namespace {
        Namespace {
            nsid: 1,
            block_shift: 9,
            blocks,
            zeroes_after_deallocate: false,
            write_protected: false,
            deallocate_granularity: 0,
            eui64: [0; 8],
            nguid: [0; 16],
            atomicity: driver::Atomicity::default(),
        }
    }

    #[test]
    fn slice_is_bounded_by_namespace() {
        let ns = namespace(100);
        assert!(Slice::new(&ns, 0, 100, false).is_ok());
        assert!(Slice::new(&ns, 99, 1, false).is_ok());
        assert_eq!(Slice::new(&ns, 5, 0, false), Err(SliceError::Empty));
        for (first, blocks) in [(0, 101), (100, 1), (1, 100), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(
                Slice::new(&ns, first, blocks, false).is_err(),
                "{first} {blocks}"
            );
        }
        let mut protected = ns;
        protected.write_protected = true;
        assert!(Slice::whole(&protected, false).is_ok_and(|slice| slice.read_only()));
    }

    #[test]
    fn slice_blocks_count_from_first() {
        let slice = Slice::new(&namespace(u64::MAX), u64::MAX - 100, 100, false).unwrap();
        assert_eq!(slice.lba(0, 1), Some(u64::MAX - 100));
        assert_eq!(slice.lba(99, 1), Some(u64::MAX - 1));
        assert_eq!(slice.lba(0, 100), Some(u64::MAX - 100));
        for (lba, blocks) in [
            (99, 2),
            (100, 1),
            (0, 101),
            (u64::MAX, 1),
            (u64::MAX, 65536),
        ] {
            assert_eq!(slice.lba(lba, blocks), None, "{lba} {blocks}");
        }
    }

    #[test]
    fn adjacent_slices_do_not_overlap() {
        let ns = namespace(100);
        let at = |first, blocks| Slice::new(&ns, first, blocks, false).unwrap();
        assert!(!at(0, 50).overlaps(&at(50, 50)) && !at(50, 50).overlaps(&at(0, 50)));
        assert!(at(0, 51).overlaps(&at(50, 50)) && at(50, 1).overlaps(&at(0, 100)));
    }
}
