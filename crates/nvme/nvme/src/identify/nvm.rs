//! I/O Command Set specific structures for the NVM command set (CNS 05h and 06h):
//! NVM Command Set 1.1, 4.1.5.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Pic;
use crate::macros::{wire_layout, zeroed_default};

/// NVM command set specific Identify Namespace (CNS 05h, CSI 00h), 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NvmNamespace {
    /// Logical Block Storage Tag Mask.
    pub lbstm: U64,
    /// Protection Information Capabilities.
    pub pic: Pic,
    /// Protection Information Format Attribute.
    pub pifa: u8,
    #[doc(hidden)]
    pub reserved10: [u8; 2],
    /// Extended LBA Formats: Storage Tag Size in bits 6:0, Protection
    /// Information Format in bits 8:7.
    pub elbaf: [U32; 64],
    /// Namespace Preferred Deallocate Granularity Large, in logical blocks.
    pub npdgl: U32,
    /// Namespace Preferred Read Granularity, in logical blocks.
    pub nprg: U32,
    /// Namespace Preferred Read Alignment, in logical blocks.
    pub npra: U32,
    /// Namespace Optimal Read Size, in logical blocks.
    pub nors: U32,
    /// Namespace Preferred Deallocate Alignment Large, in logical blocks.
    pub npdal: U32,
    /// LBA Placement Shard Size, in logical blocks.
    pub lbapss: U32,
    /// Tracked LBA Allocation Granularity.
    pub tlbaag: U32,
    #[doc(hidden)]
    pub reserved296: [u8; 3800],
}

wire_layout!(
    NvmNamespace, 4096, lbstm @ 0, pic @ 8, pifa @ 9, elbaf @ 12, npdgl @ 268, nprg @ 272, npra @ 276, nors @ 280,
    npdal @ 284, lbapss @ 288, tlbaag @ 292,
);

/// NVM command set specific Identify Controller (CNS 06h, CSI 00h), 4096 bytes.
///
/// Size limits are powers of two of pages of CAP.MPSMIN, like MDTS; 0 means no limit.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NvmController {
    /// Verify Size Limit.
    pub vsl: u8,
    /// Write Zeroes Size Limit.
    pub wzsl: u8,
    /// Write Uncorrectable Size Limit.
    pub wusl: u8,
    /// Dataset Management Ranges Limit; 0 when not reported.
    pub dmrl: u8,
    /// Dataset Management Range Size Limit, in logical blocks per range; 0 when not reported.
    pub dmrsl: U32,
    /// Dataset Management Size Limit, in logical blocks of all ranges together; 0 when not
    /// reported.
    pub dmsl: U64,
    /// Key Per I/O Capabilities.
    pub kpiocap: u8,
    /// Write Zeroes With Deallocate Size Limit.
    pub wzdsl: u8,
    /// Admin Optional Command Support.
    pub aocs: U16,
    /// Version of the NVM Command Set specification.
    pub ver: U32,
    /// LBA Migration Queue Format.
    pub lbamqf: u8,
    #[doc(hidden)]
    pub reserved25: [u8; 4071],
}

wire_layout!(
    NvmController, 4096, vsl @ 0, wzsl @ 1, wusl @ 2, dmrl @ 3, dmrsl @ 4, dmsl @ 8, kpiocap @ 16, wzdsl @ 17,
    aocs @ 18, ver @ 20, lbamqf @ 24,
);
zeroed_default!(NvmNamespace, NvmController);
