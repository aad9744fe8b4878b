//! I/O Command Set specific structures for the Zoned Namespace command set (CNS 05h and 06h):
//! Zoned Namespace Command Set 1.1, 4.1.5.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{wire_layout, wire_struct, zeroed_default};

/// OZCS, Optional Zoned Command Support.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Ozcs {
    /// Read Across Zone Boundaries.
    pub razb: bool,
    /// Zone Random Write Area Supported.
    pub zrwasup: bool,
    #[bits(14)]
    __: u16,
}

/// ZRWACAP, Zone Random Write Area Capability.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Zrwacap {
    /// Explicit ZRWA Flush Operations Supported.
    pub expflushsup: bool,
    #[bits(7)]
    __: u8,
}

wire_struct! {
    /// LBA Format Extension of a zoned namespace, 16 bytes.
    pub struct ZonedLbaFormat(16) {
        /// Zone Size, in logical blocks.
        pub zsze @ 0: U64,
        /// Zone Descriptor Extension Size, in units of 64 bytes.
        pub zdes @ 8: u8,
        #[doc(hidden)]
        pub reserved9 @ 9: [u8; 7],
    }
}

/// Zoned Namespace command set specific Identify Namespace (CNS 05h, CSI 02h), 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ZonedNamespace {
    /// Zone Operation Characteristics.
    pub zoc: U16,
    /// Optional Zoned Command Support.
    pub ozcs: Ozcs,
    /// Maximum Active Resources, zero-based; all ones for no limit.
    pub mar_z: U32,
    /// Maximum Open Resources, zero-based; all ones for no limit.
    pub mor_z: U32,
    /// Reset Recommended Limit.
    pub rrl: U32,
    /// Finish Recommended Limit.
    pub frl: U32,
    /// Reset Recommended Limits 1 to 3.
    pub rrl_more: [U32; 3],
    /// Finish Recommended Limits 1 to 3.
    pub frl_more: [U32; 3],
    /// Number of Zone Random Write Area Resources, zero-based.
    pub numzrwa_z: U32,
    /// Zone Random Write Area Flush Granularity, in logical blocks.
    pub zrwafg: U16,
    /// Zone Random Write Area Size, in logical blocks.
    pub zrwasz: U16,
    /// Zone Random Write Area Capability.
    pub zrwacap: Zrwacap,
    #[doc(hidden)]
    pub reserved53: [u8; 2763],
    /// LBA Format Extensions, one for each LBA format.
    pub lbafe: [ZonedLbaFormat; 64],
    /// Vendor specific.
    pub vs: [u8; 256],
}

wire_layout!(
    ZonedNamespace, 4096, zoc @ 0, ozcs @ 2, mar_z @ 4, mor_z @ 8, rrl @ 12, frl @ 16,
    numzrwa_z @ 44, zrwafg @ 48, zrwasz @ 50, zrwacap @ 52, lbafe @ 2816, vs @ 3840,
);

wire_struct! {
    /// Zoned Namespace command set specific Identify Controller (CNS 06h, CSI 02h), 4096 bytes.
    pub struct ZonedController(4096, zeroed) {
        /// Zone Append Size Limit: a power of two of pages of CAP.MPSMIN, like MDTS; 0 for the
        /// limit of MDTS.
        pub zasl @ 0: u8,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 4095],
    }
}

zeroed_default!(ZonedNamespace);
