//! Telemetry log pages (NVMe Base 2.1, 5.1.12.1.8 and 5.1.12.1.9).

use zerocopy::little_endian::{U16, U32};

use super::Lid;
use crate::macros::wire_struct;

/// Size of a telemetry data block in bytes. Lengths and offsets in Get Log Page are multiples of
/// it.
pub const TELEMETRY_BLOCK: usize = 512;

wire_struct! {
    /// Header of both Telemetry log pages, 512 bytes. Data blocks follow, numbered from 1.
    ///
    /// A data area begins after the last block of the previous area. An empty area has the same
    /// last block as the previous area.
    pub struct TelemetryHeader(512, zeroed) {
        /// Log Identifier.
        pub lid @ 0: Lid,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 4],
        /// IEEE OUI Identifier, least significant byte first.
        pub ieee @ 5: [u8; 3],
        /// Last block of data area 1.
        pub da1lb @ 8: U16,
        /// Last block of data area 2.
        pub da2lb @ 10: U16,
        /// Last block of data area 3.
        pub da3lb @ 12: U16,
        #[doc(hidden)]
        pub reserved14 @ 14: [u8; 2],
        /// Last block of data area 4.
        pub da4lb @ 16: U32,
        #[doc(hidden)]
        pub reserved20 @ 20: [u8; 360],
        /// Scope of the host-initiated page, 1 for the controller. Reserved in the
        /// controller-initiated page.
        pub ths @ 380: u8,
        /// Data generation number in the host-initiated page; scope in the controller-initiated
        /// page.
        pub thdgn_tcs @ 381: u8,
        /// Telemetry Controller-Initiated Data Available: 1 when there is unread data.
        pub tcda @ 382: u8,
        /// Telemetry Controller-Initiated Data Generation Number.
        pub tcdgn @ 383: u8,
        /// Reason Identifier of the snapshot, vendor specific.
        pub reason @ 384: [u8; 128],
    }
}
