//! Primary controller capabilities (CNS 14h) and secondary controllers (CNS
//! 15h): NVMe Base 2.1, 5.1.13.3.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{wire_layout, zeroed_default};

/// CRT, Controller Resource Types.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Crt {
    /// Support of VQ (queue) resources.
    pub vqrs: bool,
    /// Support of VI (interrupt) resources.
    pub virs: bool,
    #[bits(6)]
    __: u8,
}

/// Primary Controller Capabilities (CNS 14h), 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PrimaryControllerCapabilities {
    /// Controller Identifier.
    pub cntlid: U16,
    /// Port Identifier.
    pub portid: U16,
    /// Controller Resource Types.
    pub crt: Crt,
    #[doc(hidden)]
    pub reserved5: [u8; 27],
    /// VQ Resources Flexible Total.
    pub vqfrt: U32,
    /// VQ Resources Flexible Assigned.
    pub vqrfa: U32,
    /// VQ Resources Flexible Allocated to Primary.
    pub vqrfap: U16,
    /// VQ Resources Private Total.
    pub vqprt: U16,
    /// VQ Resources Flexible Secondary Maximum.
    pub vqfrsm: U16,
    /// VQ Flexible Resource Preferred Granularity.
    pub vqgran: U16,
    #[doc(hidden)]
    pub reserved48: [u8; 16],
    /// VI Resources Flexible Total.
    pub vifrt: U32,
    /// VI Resources Flexible Assigned.
    pub virfa: U32,
    /// VI Resources Flexible Allocated to Primary.
    pub virfap: U16,
    /// VI Resources Private Total.
    pub viprt: U16,
    /// VI Resources Flexible Secondary Maximum.
    pub vifrsm: U16,
    /// VI Flexible Resource Preferred Granularity.
    pub vigran: U16,
    #[doc(hidden)]
    pub reserved80: [u8; 4016],
}

wire_layout!(
    PrimaryControllerCapabilities, 4096, cntlid @ 0, portid @ 2, crt @ 4, vqfrt @ 32, vqrfa @ 36, vqrfap @ 40,
    vqprt @ 42, vqfrsm @ 44, vqgran @ 46, vifrt @ 64, virfa @ 68, virfap @ 72, viprt @ 74, vifrsm @ 76, vigran @ 78,
);

/// Entry of the Secondary Controller List, 32 bytes.
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
pub struct SecondaryController {
    /// Secondary Controller Identifier.
    pub scid: U16,
    /// Primary Controller Identifier.
    pub pcid: U16,
    /// Secondary Controller State: bit 0 is set when the controller is online.
    pub scs: u8,
    #[doc(hidden)]
    pub reserved5: [u8; 3],
    /// Virtual Function Number; 0 when the controller is no SR-IOV virtual function.
    pub vfn: U16,
    /// Number of VQ Flexible Resources Assigned.
    pub nvq: U16,
    /// Number of VI Flexible Resources Assigned.
    pub nvi: U16,
    #[doc(hidden)]
    pub reserved14: [u8; 18],
}

wire_layout!(SecondaryController, 32, scid @ 0, pcid @ 2, scs @ 4, vfn @ 8, nvq @ 10, nvi @ 12);

/// Secondary Controller List (CNS 15h), 4096 bytes. All zeroes without secondary controllers.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SecondaryControllerList {
    /// Number of Identifiers.
    pub numid: u8,
    #[doc(hidden)]
    pub reserved1: [u8; 31],
    /// Entries in ascending order of SCID, of which the first `numid` are valid.
    pub entries: [SecondaryController; 127],
}

wire_layout!(SecondaryControllerList, 4096, numid @ 0, entries @ 32);
zeroed_default!(PrimaryControllerCapabilities, SecondaryControllerList);
