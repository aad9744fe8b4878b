//! I/O Command Set specific structures for the NVM command set (CNS 05h and 06h):
//! NVM Command Set 1.1, 4.1.5.

use zerocopy::little_endian::{U16, U32, U64};

use super::Pic;
use crate::macros::wire_struct;

wire_struct! {
    /// NVM command set specific Identify Namespace (CNS 05h, CSI 00h), 4096 bytes.
    pub struct NvmNamespace(4096, zeroed) {
        /// Logical Block Storage Tag Mask.
        pub lbstm @ 0: U64,
        /// Protection Information Capabilities.
        pub pic @ 8: Pic,
        /// Protection Information Format Attribute.
        pub pifa @ 9: u8,
        #[doc(hidden)]
        pub reserved10 @ 10: [u8; 2],
        /// Extended LBA Formats: Storage Tag Size in bits 6:0, Protection
        /// Information Format in bits 8:7.
        pub elbaf @ 12: [U32; 64],
        /// Namespace Preferred Deallocate Granularity Large, in logical blocks.
        pub npdgl @ 268: U32,
        /// Namespace Preferred Read Granularity, in logical blocks.
        pub nprg @ 272: U32,
        /// Namespace Preferred Read Alignment, in logical blocks.
        pub npra @ 276: U32,
        /// Namespace Optimal Read Size, in logical blocks.
        pub nors @ 280: U32,
        /// Namespace Preferred Deallocate Alignment Large, in logical blocks.
        pub npdal @ 284: U32,
        /// LBA Placement Shard Size, in logical blocks.
        pub lbapss @ 288: U32,
        /// Tracked LBA Allocation Granularity.
        pub tlbaag @ 292: U32,
        #[doc(hidden)]
        pub reserved296 @ 296: [u8; 3800],
    }
}

wire_struct! {
    /// NVM command set specific Identify Controller (CNS 06h, CSI 00h), 4096 bytes.
    ///
    /// Size limits are powers of two of pages of CAP.MPSMIN, like MDTS; 0 means no limit.
    pub struct NvmController(4096, zeroed) {
        /// Verify Size Limit.
        pub vsl @ 0: u8,
        /// Write Zeroes Size Limit.
        pub wzsl @ 1: u8,
        /// Write Uncorrectable Size Limit.
        pub wusl @ 2: u8,
        /// Dataset Management Ranges Limit; 0 when not reported.
        pub dmrl @ 3: u8,
        /// Dataset Management Range Size Limit, in logical blocks per range; 0 when not reported.
        pub dmrsl @ 4: U32,
        /// Dataset Management Size Limit, in logical blocks of all ranges together; 0 when not
        /// reported.
        pub dmsl @ 8: U64,
        /// Key Per I/O Capabilities.
        pub kpiocap @ 16: u8,
        /// Write Zeroes With Deallocate Size Limit.
        pub wzdsl @ 17: u8,
        /// Admin Optional Command Support.
        pub aocs @ 18: U16,
        /// Version of the NVM Command Set specification.
        pub ver @ 20: U32,
        /// LBA Migration Queue Format.
        pub lbamqf @ 24: u8,
        #[doc(hidden)]
        pub reserved25 @ 25: [u8; 4071],
    }
}
