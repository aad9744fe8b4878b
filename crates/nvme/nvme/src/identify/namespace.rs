//! Identify Namespace data structure of the NVM command set (CNS 00h and 11h): NVM
//! Command Set 1.1, 4.1.5.1.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::namespace_bits::{Dlfeat, Dpc, Dps, Flbas, Fpi, Mc, Nmic, Nsattr, Nsfeat, Rescap};
use crate::macros::wire_struct;

wire_struct! {
    /// Properties of a namespace of the NVM command set, 4096 bytes; all zeroes for an inactive
    /// NSID. Sizes are in logical blocks unless stated otherwise.
    pub struct IdentifyNamespace(4096, zeroed) {
        /// Namespace Size.
        pub nsze @ 0: U64,
        /// Namespace Capacity: maximum number of blocks that can be allocated.
        pub ncap @ 8: U64,
        /// Namespace Utilization: number of blocks currently allocated.
        pub nuse @ 16: U64,
        /// Namespace Features.
        pub nsfeat @ 24: Nsfeat,
        /// Number of LBA Formats, zero-based.
        pub nlbaf_z @ 25: u8,
        /// Formatted LBA Size; see [`Self::formatted`].
        pub flbas @ 26: Flbas,
        /// Metadata Capabilities.
        pub mc @ 27: Mc,
        /// End-to-end Data Protection Capabilities.
        pub dpc @ 28: Dpc,
        /// End-to-end Data Protection Type Settings.
        pub dps @ 29: Dps,
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        pub nmic @ 30: Nmic,
        /// Reservation Capabilities.
        pub rescap @ 31: Rescap,
        /// Format Progress Indicator.
        pub fpi @ 32: Fpi,
        /// Deallocate Logical Block Features.
        pub dlfeat @ 33: Dlfeat,
        /// Namespace Atomic Write Unit Normal, zero-based.
        pub nawun_z @ 34: U16,
        /// Namespace Atomic Write Unit Power Fail, zero-based.
        pub nawupf_z @ 36: U16,
        /// Namespace Atomic Compare and Write Unit, zero-based.
        pub nacwu_z @ 38: U16,
        /// Namespace Atomic Boundary Size Normal, zero-based; 0 for no boundary.
        pub nabsn_z @ 40: U16,
        /// Namespace Atomic Boundary Offset.
        pub nabo @ 42: U16,
        /// Namespace Atomic Boundary Size Power Fail, zero-based; 0 for no boundary.
        pub nabspf_z @ 44: U16,
        /// Namespace Optimal I/O Boundary; 0 for none.
        pub noiob @ 46: U16,
        /// NVM Capacity, in bytes.
        pub nvmcap @ 48: U128,
        /// Namespace Preferred Write Granularity, zero-based.
        pub npwg_z @ 64: U16,
        /// Namespace Preferred Write Alignment, zero-based.
        pub npwa_z @ 66: U16,
        /// Namespace Preferred Deallocate Granularity, zero-based.
        pub npdg_z @ 68: U16,
        /// Namespace Preferred Deallocate Alignment, zero-based.
        pub npda_z @ 70: U16,
        /// Namespace Optimal Write Size, zero-based.
        pub nows_z @ 72: U16,
        /// Maximum Single Source Range Length of Copy.
        pub mssrl @ 74: U16,
        /// Maximum Copy Length: blocks of one Copy command.
        pub mcl @ 76: U32,
        /// Maximum Source Range Count of Copy, zero-based.
        pub msrc_z @ 80: u8,
        /// Key Per I/O Status.
        pub kpios @ 81: u8,
        /// Number of Unique Attribute LBA Formats.
        pub nulbaf @ 82: u8,
        #[doc(hidden)]
        pub reserved83 @ 83: u8,
        /// Key Per I/O Data Access Alignment and Granularity.
        pub kpiodaag @ 84: U32,
        #[doc(hidden)]
        pub reserved88 @ 88: [u8; 4],
        /// ANA Group Identifier.
        pub anagrpid @ 92: U32,
        #[doc(hidden)]
        pub reserved96 @ 96: [u8; 3],
        /// Namespace Attributes.
        pub nsattr @ 99: Nsattr,
        /// NVM Set Identifier.
        pub nvmsetid @ 100: U16,
        /// Endurance Group Identifier.
        pub endgid @ 102: U16,
        /// Namespace Globally Unique Identifier, big endian; all zeroes for none.
        pub nguid @ 104: [u8; 16],
        /// IEEE Extended Unique Identifier, big endian; all zeroes for none.
        pub eui64 @ 120: [u8; 8],
        /// LBA Formats, of which `nlbaf_z + 1` (and `nulbaf` more) are valid.
        pub lbaf @ 128: [LbaFormat; 64],
        /// Vendor specific.
        pub vs @ 384: [u8; 3712],
    }
}

impl IdentifyNamespace {
    /// Returns the number of valid formats in `lbaf`, including those with unique attributes: 1 to
    /// 64.
    pub fn format_count(&self) -> usize {
        (usize::from(self.nlbaf_z) + 1 + usize::from(self.nulbaf)).min(self.lbaf.len())
    }

    /// Returns the format in use; `None` when FLBAS refers to a format that does not exist.
    pub fn formatted(&self) -> Option<LbaFormat> {
        // The upper index bits are ignored with 16 formats or fewer.
        let index = if self.format_count() > 16 {
            self.flbas.index()
        } else {
            self.flbas.fidxl()
        };
        let formats = self.lbaf.get(..self.format_count())?;
        formats.get(usize::from(index)).copied()
    }
}

wire_struct! {
    /// LBA Format, 4 bytes (NVM Command Set 1.1, 4.1.5.1).
    pub struct LbaFormat(4) {
        /// Metadata Size, in bytes.
        pub ms @ 0: U16,
        /// LBA Data Size in bytes as a power of two; 0 when the format is not available.
        pub lbads @ 2: u8,
        /// Relative Performance.
        pub rp @ 3: RelativePerformance,
    }
}

/// Relative Performance of an LBA format.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct RelativePerformance {
    /// Relative Performance: 0 best, 1 better, 2 good, 3 degraded.
    #[bits(2)]
    pub rp: u8,
    #[bits(6)]
    __: u8,
}

impl LbaFormat {
    /// Creates a format with blocks of `1 << lbads` bytes, without metadata, of best performance.
    pub const fn new(lbads: u8) -> Self {
        Self {
            ms: U16::ZERO,
            lbads,
            rp: RelativePerformance::new(),
        }
    }

    /// Returns the number of data bytes per block, 512 to 2 GiB; `None` for a size outside this
    /// range.
    pub const fn block_size(&self) -> Option<u32> {
        match self.lbads {
            9..=31 => Some(1 << self.lbads),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identify_namespace_fields_have_standard_offsets() {
        let mut namespace = IdentifyNamespace {
            nsze: 0x0102.into(),
            nguid: [0xab; 16],
            eui64: [0xcd; 8],
            ..Default::default()
        };
        namespace.lbaf[1] = LbaFormat::new(12);
        let page = namespace.as_bytes();
        assert_eq!(page[..2], [2, 1]);
        assert_eq!(page[104..120], [0xab; 16]);
        assert_eq!(page[120..128], [0xcd; 8]);
        assert_eq!(page[132..136], [0, 0, 12, 0]);
        assert_eq!(IdentifyNamespace::read_from_bytes(page).unwrap(), namespace);
    }

    #[test]
    fn formatted_checks_index() {
        let mut namespace = IdentifyNamespace::default();
        namespace.lbaf[0] = LbaFormat::new(9);
        namespace.lbaf[20] = LbaFormat::new(12);
        assert_eq!(namespace.formatted(), Some(LbaFormat::new(9)));
        namespace.flbas = Flbas::for_format(1);
        assert_eq!(namespace.formatted(), None);
        // Upper bits count only with more than 16 formats.
        namespace.flbas = Flbas::for_format(0x10);
        assert_eq!(namespace.formatted(), Some(LbaFormat::new(9)));
        namespace.nlbaf_z = 15;
        assert_eq!(namespace.formatted(), Some(LbaFormat::new(9)));
        namespace.nlbaf_z = 63;
        namespace.flbas = Flbas::for_format(20);
        assert_eq!(namespace.formatted(), Some(LbaFormat::new(12)));
        namespace.nlbaf_z = 255;
        namespace.nulbaf = 255;
        assert_eq!(namespace.format_count(), 64);
        assert_eq!(namespace.formatted(), Some(LbaFormat::new(12)));
    }

    #[test]
    fn invalid_block_size_is_refused() {
        assert_eq!(LbaFormat::new(9).block_size(), Some(512));
        assert_eq!(LbaFormat::new(31).block_size(), Some(1 << 31));
        for lbads in [0, 8, 32, 64, 255] {
            assert_eq!(LbaFormat::new(lbads).block_size(), None);
        }
    }
}
