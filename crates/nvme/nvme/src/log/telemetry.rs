//! Telemetry log pages (NVMe Base 2.1, 5.1.12.1.8 and 5.1.12.1.9).

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Lid;
use crate::macros::{wire_layout, zeroed_default};

/// Size of a telemetry data block in bytes. Lengths and offsets in Get Log Page are multiples of
/// it.
pub const TELEMETRY_BLOCK: usize = 512;

/// Header of both Telemetry log pages, 512 bytes. Data blocks follow, numbered from 1.
///
/// A data area begins after the last block of the previous area. An empty area has the same last
/// block as the previous area.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TelemetryHeader {
    /// Log Identifier.
    pub lid: Lid,
    #[doc(hidden)]
    pub reserved1: [u8; 4],
    /// IEEE OUI Identifier, least significant byte first.
    pub ieee: [u8; 3],
    /// Last block of data area 1.
    pub da1lb: U16,
    /// Last block of data area 2.
    pub da2lb: U16,
    /// Last block of data area 3.
    pub da3lb: U16,
    #[doc(hidden)]
    pub reserved14: [u8; 2],
    /// Last block of data area 4.
    pub da4lb: U32,
    #[doc(hidden)]
    pub reserved20: [u8; 360],
    /// Scope of the host-initiated page, 1 for the controller. Reserved in the controller-initiated
    /// page.
    pub ths: u8,
    /// Data generation number in the host-initiated page; scope in the controller-initiated page.
    pub thdgn_tcs: u8,
    /// Telemetry Controller-Initiated Data Available: 1 when there is unread data.
    pub tcda: u8,
    /// Telemetry Controller-Initiated Data Generation Number.
    pub tcdgn: u8,
    /// Reason Identifier of the snapshot, vendor specific.
    pub reason: [u8; 128],
}

wire_layout!(
    TelemetryHeader, 512, lid @ 0, ieee @ 5, da1lb @ 8, da2lb @ 10, da3lb @ 12, da4lb @ 16,
    ths @ 380, thdgn_tcs @ 381, tcda @ 382, tcdgn @ 383, reason @ 384,
);
zeroed_default!(TelemetryHeader);
