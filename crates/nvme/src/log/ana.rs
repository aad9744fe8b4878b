//! Asymmetric Namespace Access log page (NVMe Base 2.1, 5.1.12.1.13).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_layout};

open_values! {
    /// Asymmetric Namespace Access State (NVMe Base 2.1, 8.1.1.3, 4 bits).
    pub AnaState: u8 {
        OPTIMIZED = 1, "ANA Optimized";
        NON_OPTIMIZED = 2, "ANA Non-Optimized";
        INACCESSIBLE = 3, "ANA Inaccessible";
        PERSISTENT_LOSS = 4, "ANA Persistent Loss";
        CHANGE = 15, "ANA Change";
    }
}

/// Header of the log page, 16 bytes. [`AnaGroup`]s follow, each with its NSIDs (4 bytes each)
/// behind it.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct AnaHeader {
    /// Change Count.
    pub chgcnt: U64,
    /// Number of ANA Group Descriptors.
    pub nagd: U16,
    #[doc(hidden)]
    pub reserved10: [u8; 6],
}

wire_layout!(AnaHeader, 16, chgcnt @ 0, nagd @ 8);

/// Byte 16 of an ANA Group Descriptor.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct AnaGroupState {
    /// Asymmetric Namespace Access State.
    #[bits(4)]
    pub anas: AnaState,
    #[bits(4)]
    __: u8,
}

/// ANA Group Descriptor without its NSIDs, 32 bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct AnaGroup {
    /// ANA Group ID.
    pub agid: U32,
    /// Number of NSID Values.
    pub nnsid: U32,
    /// Change Count of this group.
    pub chgcnt: U64,
    /// Its state.
    pub state: AnaGroupState,
    #[doc(hidden)]
    pub reserved17: [u8; 15],
}

wire_layout!(AnaGroup, 32, agid @ 0, nnsid @ 4, chgcnt @ 8, state @ 16);
