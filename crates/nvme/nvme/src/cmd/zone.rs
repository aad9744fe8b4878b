//! Command dwords of the Zoned Namespace command set, and the data of Zone Management Receive
//! (Zoned Namespace Command Set 1.1, 3.4).
//!
//! Zone Append uses dword 12 of Write ([`super::io::RwCdw12`]), and has the zone's first LBA in the
//! starting LBA field.

use bitfield_struct::bitfield;
use zerocopy::little_endian::U64;

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Zone Send Action (8 bits).
    pub Zsa: u8 {
        CLOSE = 0x01, "Close Zone";
        FINISH = 0x02, "Finish Zone";
        OPEN = 0x03, "Open Zone";
        RESET = 0x04, "Reset Zone";
        OFFLINE = 0x05, "Offline Zone";
        SET_DESCRIPTOR_EXTENSION = 0x10, "Set Zone Descriptor Extension";
        FLUSH_ZRWA = 0x11, "Flush Explicit ZRWA Range";
    }
}

open_values! {
    /// Zone Receive Action (8 bits).
    pub Zra: u8 {
        REPORT = 0x00, "Report Zones";
        EXTENDED_REPORT = 0x01, "Extended Report Zones";
    }
}

/// Dword 13 of Zone Management Send. [`crate::Command::slba`] selects the zone; for
/// [`Zsa::FLUSH_ZRWA`] it is the last block to flush.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SendCdw13 {
    /// Zone Send Action.
    #[bits(8)]
    pub zsa: Zsa,
    /// Select All: the action applies to all zones in a suitable state.
    pub select_all: bool,
    /// Zone Send Action Specific Option. For Open Zone: allocate a Zone Random Write Area (ZRWAA).
    pub zsaso: bool,
    #[bits(22)]
    __: u32,
}

/// Dword 13 of Zone Management Receive; dword 12 is the number of dwords, zero-based.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReceiveCdw13 {
    /// Zone Receive Action.
    #[bits(8)]
    pub zra: Zra,
    /// Zone Receive Action Specific Field: state of the zones to report.
    pub zrasf: u8,
    /// Partial Report: the Number of Zones field counts only the descriptors that fit into the
    /// buffer.
    pub partial: bool,
    #[bits(15)]
    __: u32,
}

wire_struct! {
    /// Header of a zone report, 64 bytes, which zone descriptors follow.
    pub struct ReportHeader(64) {
        /// Number of Zones in the report.
        pub zones @ 0: U64,
        #[doc(hidden)]
        pub reserved8 @ 8: [[u8; 28]; 2],
    }
}

wire_struct! {
    /// Zone descriptor of a zone report, 64 bytes.
    pub struct ZoneDescriptor(64) {
        /// Zone Type; 2h is Sequential Write Required.
        pub zt @ 0: u8,
        /// Zone State in bits 7:4.
        pub zs @ 1: u8,
        /// Zone Attributes.
        pub za @ 2: u8,
        /// Zone Attributes Information.
        pub zai @ 3: u8,
        #[doc(hidden)]
        pub reserved4 @ 4: [u8; 4],
        /// Zone Capacity, in logical blocks.
        pub zcap @ 8: U64,
        /// Zone Start Logical Block Address.
        pub zslba @ 16: U64,
        /// Write Pointer.
        pub wp @ 24: U64,
        #[doc(hidden)]
        pub reserved32 @ 32: [u8; 32],
    }
}

impl ZoneDescriptor {
    /// Bit of Zone Attributes: the zone has a Zone Random Write Area (ZRWAV).
    pub const ZRWAV: u8 = 1 << 3;

    /// Zone Type of a zone that has to be written sequentially.
    pub const SEQUENTIAL_WRITE_REQUIRED: u8 = 2;

    /// Returns the Zone State.
    pub const fn state(&self) -> u8 {
        self.zs >> 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zone_dword_13_encodes() {
        let send = SendCdw13::new().with_zsa(Zsa::RESET).with_select_all(true);
        assert_eq!(send.into_bits(), 0x104);
        let open = SendCdw13::new().with_zsa(Zsa::OPEN).with_zsaso(true);
        assert_eq!(open.into_bits(), 0x203);
        let receive = ReceiveCdw13::new().with_zrasf(5).with_partial(true);
        assert_eq!(receive.into_bits(), 0x1_0500);
    }
}
