//! Features of Flexible Data Placement: NVMe Base 2.1, 5.1.25.1 and 8.1.10.

use bitfield_struct::bitfield;

use crate::log::FdpEventType;
use crate::macros::wire_struct;

/// Value of [`Fid::FLEXIBLE_DATA_PLACEMENT`](super::Fid::FLEXIBLE_DATA_PLACEMENT): dword 12 of Set
/// Features. Dword 11 contains the Endurance Group Identifier in bits 15:0.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FdpMode {
    /// Flexible Data Placement Enable.
    pub fdpe: bool,
    #[bits(7)]
    __: u8,
    /// FDP Configuration Index.
    pub fdpcidx: u8,
    __: u16,
}

/// Dword 11 of [`Fid::FDP_EVENTS`](super::Fid::FDP_EVENTS). Bit 0 of dword 12 is set to enable the
/// events, and clear to disable them.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FdpEventsCdw11 {
    /// Placement Handle.
    pub phndl: u16,
    /// Number of FDP Event Types, which is the length of the data of Set Features in bytes.
    pub noet: u8,
    __: u8,
}

wire_struct! {
    /// Supported FDP Event Descriptor, 2 bytes, in the data of Get Features.
    pub struct FdpEventDescriptor(2) {
        /// FDP Event Type.
        pub fdpet @ 0: FdpEventType,
        /// FDP Event Type Attributes: bit 0 is set when the event is enabled.
        pub fdpeta @ 1: u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_feature_dwords_encode() {
        let mode = FdpMode::new().with_fdpe(true).with_fdpcidx(1);
        assert_eq!(mode.into_bits(), 0x101);
        let cdw11 = FdpEventsCdw11::new().with_phndl(1).with_noet(3);
        assert_eq!(cdw11.into_bits(), 0x3_0001);
    }
}
