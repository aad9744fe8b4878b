//! Asymmetric Namespace Access log page (NVMe Base 2.1, 5.1.12.1.13).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_struct};

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

wire_struct! {
    /// Header of the log page, 16 bytes. [`AnaGroup`]s follow, each with its NSIDs (4 bytes each)
    /// behind it.
    pub struct AnaHeader(16) {
        /// Change Count.
        pub chgcnt @ 0: U64,
        /// Number of ANA Group Descriptors.
        pub nagd @ 8: U16,
        #[doc(hidden)]
        pub reserved10 @ 10: [u8; 6],
    }
}

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

wire_struct! {
    /// ANA Group Descriptor without its NSIDs, 32 bytes.
    pub struct AnaGroup(32) {
        /// ANA Group ID.
        pub agid @ 0: U32,
        /// Number of NSID Values.
        pub nnsid @ 4: U32,
        /// Change Count of this group.
        pub chgcnt @ 8: U64,
        /// Its state.
        pub state @ 16: AnaGroupState,
        #[doc(hidden)]
        pub reserved17 @ 17: [u8; 15],
    }
}
