//! I/O Command Set Independent Identify Namespace data structure (CNS 08h and 1Fh):
//! NVMe Base 2.1, 5.1.13.2.8.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::namespace_bits::{Fpi, Nmic, Nsattr, Rescap};
use crate::macros::wire_struct;

wire_struct! {
    /// Properties of a namespace that do not depend on the command set, 4096 bytes.
    pub struct IndependentNamespace(4096, zeroed) {
        /// Common Namespace Features.
        pub nsfeat @ 0: IndependentNsfeat,
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        pub nmic @ 1: Nmic,
        /// Reservation Capabilities.
        pub rescap @ 2: Rescap,
        /// Format Progress Indicator.
        pub fpi @ 3: Fpi,
        /// ANA Group Identifier.
        pub anagrpid @ 4: U32,
        /// Namespace Attributes.
        pub nsattr @ 8: Nsattr,
        #[doc(hidden)]
        pub reserved9 @ 9: u8,
        /// NVM Set Identifier.
        pub nvmsetid @ 10: U16,
        /// Endurance Group Identifier.
        pub endgid @ 12: U16,
        /// Namespace Status.
        pub nstat @ 14: Nstat,
        /// Key Per I/O Status.
        pub kpios @ 15: u8,
        /// Maximum Key Tag.
        pub maxkt @ 16: U16,
        #[doc(hidden)]
        pub reserved18 @ 18: [u8; 2],
        /// Reachability Group Identifier.
        pub rgrpid @ 20: U32,
        #[doc(hidden)]
        pub reserved24 @ 24: [u8; 4072],
    }
}

/// NSFEAT field of the command set independent structure: Common Namespace Features.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IndependentNsfeat {
    #[bits(3)]
    __: u8,
    /// Unique Identifiers are never Reused: NGUID and EUI64 values are not used again.
    pub uidreuse: bool,
    /// Rotational Media.
    pub rmedia: bool,
    /// Volatile Write Cache Not Present for this namespace.
    pub vwcnp: bool,
    #[bits(2)]
    __: u8,
}

/// NSTAT, Namespace Status.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Nstat {
    /// Namespace Ready, which is meaningful if CC.CRIME is set.
    pub nrdy: bool,
    #[bits(7)]
    __: u8,
}
