//! Primary controller capabilities (CNS 14h) and secondary controllers (CNS
//! 15h): NVMe Base 2.1, 5.1.13.3.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::wire_struct;

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

wire_struct! {
    /// Primary Controller Capabilities (CNS 14h), 4096 bytes.
    pub struct PrimaryControllerCapabilities(4096, zeroed) {
        /// Controller Identifier.
        pub cntlid @ 0: U16,
        /// Port Identifier.
        pub portid @ 2: U16,
        /// Controller Resource Types.
        pub crt @ 4: Crt,
        #[doc(hidden)]
        pub reserved5 @ 5: [u8; 27],
        /// VQ Resources Flexible Total.
        pub vqfrt @ 32: U32,
        /// VQ Resources Flexible Assigned.
        pub vqrfa @ 36: U32,
        /// VQ Resources Flexible Allocated to Primary.
        pub vqrfap @ 40: U16,
        /// VQ Resources Private Total.
        pub vqprt @ 42: U16,
        /// VQ Resources Flexible Secondary Maximum.
        pub vqfrsm @ 44: U16,
        /// VQ Flexible Resource Preferred Granularity.
        pub vqgran @ 46: U16,
        #[doc(hidden)]
        pub reserved48 @ 48: [u8; 16],
        /// VI Resources Flexible Total.
        pub vifrt @ 64: U32,
        /// VI Resources Flexible Assigned.
        pub virfa @ 68: U32,
        /// VI Resources Flexible Allocated to Primary.
        pub virfap @ 72: U16,
        /// VI Resources Private Total.
        pub viprt @ 74: U16,
        /// VI Resources Flexible Secondary Maximum.
        pub vifrsm @ 76: U16,
        /// VI Flexible Resource Preferred Granularity.
        pub vigran @ 78: U16,
        #[doc(hidden)]
        pub reserved80 @ 80: [u8; 4016],
    }
}

wire_struct! {
    /// Entry of the Secondary Controller List, 32 bytes.
    pub struct SecondaryController(32) {
        /// Secondary Controller Identifier.
        pub scid @ 0: U16,
        /// Primary Controller Identifier.
        pub pcid @ 2: U16,
        /// Secondary Controller State: bit 0 is set when the controller is online.
        pub scs @ 4: u8,
        #[doc(hidden)]
        pub reserved5 @ 5: [u8; 3],
        /// Virtual Function Number; 0 when the controller is no SR-IOV virtual function.
        pub vfn @ 8: U16,
        /// Number of VQ Flexible Resources Assigned.
        pub nvq @ 10: U16,
        /// Number of VI Flexible Resources Assigned.
        pub nvi @ 12: U16,
        #[doc(hidden)]
        pub reserved14 @ 14: [u8; 18],
    }
}

wire_struct! {
    /// Secondary Controller List (CNS 15h), 4096 bytes. All zeroes without secondary controllers.
    pub struct SecondaryControllerList(4096, zeroed) {
        /// Number of Identifiers.
        pub numid @ 0: u8,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 31],
        /// Entries in ascending order of SCID, of which the first `numid` are valid.
        pub entries @ 32: [SecondaryController; 127],
    }
}
