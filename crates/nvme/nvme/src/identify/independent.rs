//! I/O Command Set Independent Identify Namespace data structure (CNS 08h and 1Fh):
//! NVMe Base 2.1, 5.1.13.2.8.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::namespace_bits::{Fpi, Nmic, Nsattr, Rescap};
use crate::macros::{wire_layout, zeroed_default};

/// Properties of a namespace that do not depend on the command set, 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IndependentNamespace {
    /// Common Namespace Features.
    pub nsfeat: IndependentNsfeat,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
    pub nmic: Nmic,
    /// Reservation Capabilities.
    pub rescap: Rescap,
    /// Format Progress Indicator.
    pub fpi: Fpi,
    /// ANA Group Identifier.
    pub anagrpid: U32,
    /// Namespace Attributes.
    pub nsattr: Nsattr,
    #[doc(hidden)]
    pub reserved9: u8,
    /// NVM Set Identifier.
    pub nvmsetid: U16,
    /// Endurance Group Identifier.
    pub endgid: U16,
    /// Namespace Status.
    pub nstat: Nstat,
    /// Key Per I/O Status.
    pub kpios: u8,
    /// Maximum Key Tag.
    pub maxkt: U16,
    #[doc(hidden)]
    pub reserved18: [u8; 2],
    /// Reachability Group Identifier.
    pub rgrpid: U32,
    #[doc(hidden)]
    pub reserved24: [u8; 4072],
}

wire_layout!(
    IndependentNamespace, 4096, nsfeat @ 0, nmic @ 1, rescap @ 2, fpi @ 3, anagrpid @ 4, nsattr @ 8, nvmsetid @ 10,
    endgid @ 12, nstat @ 14, kpios @ 15, maxkt @ 16, rgrpid @ 20,
);
zeroed_default!(IndependentNamespace);

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
