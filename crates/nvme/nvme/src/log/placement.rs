//! Log pages of Flexible Data Placement (NVMe Base 2.1, 5.1.12.1.28 to 5.1.12.1.31). Each is for
//! one Endurance Group, which the Log Specific Identifier selects.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_struct};

wire_struct! {
    /// Header of the FDP Configurations log page, 16 bytes, which descriptors follow.
    pub struct FdpConfigurations(16) {
        /// Number of FDP Configurations, zero-based.
        pub numfdpc_z @ 0: U16,
        /// Version of the log page, 0.
        pub ver @ 2: u8,
        #[doc(hidden)]
        pub reserved3 @ 3: u8,
        /// Size of the log page in bytes, including this header.
        pub sze @ 4: U32,
        #[doc(hidden)]
        pub reserved8 @ 8: [u8; 8],
    }
}

/// FDP Attributes (FDPA) of a configuration.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct FdpAttributes {
    /// Reclaim Group Identifier Format: number of upper bits of a Placement Identifier that contain
    /// the Reclaim Group Identifier.
    #[bits(4)]
    pub rgif: u8,
    /// FDP Volatile Write Cache: namespaces have a volatile write cache.
    pub fdpvwc: bool,
    #[bits(2)]
    __: u8,
    /// FDP Configuration Valid.
    pub fdpcv: bool,
}

wire_struct! {
    /// FDP Configuration Descriptor, 64 bytes, without the Reclaim Unit Handle descriptors that
    /// follow.
    pub struct FdpConfiguration(64) {
        /// Descriptor Size in bytes, including the descriptors and data that follow: a multiple of
        /// 8.
        pub dsze @ 0: U16,
        /// FDP Attributes.
        pub fdpa @ 2: FdpAttributes,
        /// Vendor Specific Size.
        pub vss @ 3: u8,
        /// Number of Reclaim Groups.
        pub nrg @ 4: U32,
        /// Number of Reclaim Unit Handles.
        pub nruh @ 8: U16,
        /// Max Placement Identifiers per update of reclaim unit handles, zero-based.
        pub maxpids_z @ 10: U16,
        /// Number of Namespaces Supported.
        pub nns @ 12: U32,
        /// Reclaim Unit Nominal Size in bytes.
        pub runs @ 16: U64,
        /// Estimated Reclaim Unit Time Limit in seconds; 0 when not reported.
        pub erutl @ 24: U32,
        #[doc(hidden)]
        pub reserved28 @ 28: [[u8; 12]; 3],
    }
}

open_values! {
    /// Reclaim Unit Handle Type.
    #[derive(Unaligned)]
    pub ReclaimUnitHandleType: u8 {
        INITIALLY_ISOLATED = 1, "Initially Isolated";
        PERSISTENTLY_ISOLATED = 2, "Persistently Isolated";
    }
}

wire_struct! {
    /// Reclaim Unit Handle Descriptor of a configuration, 4 bytes.
    pub struct ReclaimUnitHandle(4) {
        /// Reclaim Unit Handle Type.
        pub ruht @ 0: ReclaimUnitHandleType,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 3],
    }
}

wire_struct! {
    /// Header of the Reclaim Unit Handle Usage log page, 8 bytes, which descriptors follow.
    pub struct HandleUsageHeader(8) {
        /// Number of Reclaim Unit Handles.
        pub nruh @ 0: U16,
        #[doc(hidden)]
        pub reserved2 @ 2: [u8; 6],
    }
}

open_values! {
    /// Reclaim Unit Handle Attributes.
    #[derive(Unaligned)]
    pub ReclaimUnitHandleAttributes: u8 {
        UNUSED = 0, "not used by a namespace";
        HOST_SPECIFIED = 1, "used by a namespace that was made with a list of handles";
        CONTROLLER_SPECIFIED = 2, "used by a namespace that was made without";
    }
}

wire_struct! {
    /// Reclaim Unit Handle Usage Descriptor, 8 bytes.
    pub struct HandleUsage(8) {
        /// Reclaim Unit Handle Attributes.
        pub ruha @ 0: ReclaimUnitHandleAttributes,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 7],
    }
}

wire_struct! {
    /// FDP Statistics log page, 64 bytes.
    pub struct FdpStatistics(64) {
        /// Host Bytes with Metadata Written.
        pub hbmw @ 0: U128,
        /// Media Bytes with Metadata Written.
        pub mbmw @ 16: U128,
        /// Media Bytes Erased.
        pub mbe @ 32: U128,
        #[doc(hidden)]
        pub reserved48 @ 48: [u8; 16],
    }
}

wire_struct! {
    /// Header of the FDP Events log page, 64 bytes, which the events follow.
    pub struct FdpEventsHeader(64) {
        /// Number of FDP Events that follow, in order of occurrence.
        pub numfdpe @ 0: U32,
        #[doc(hidden)]
        pub reserved4 @ 4: [[u8; 20]; 3],
    }
}

/// Maximum number of events in an FDP Events log page, which has 4096 bytes with its header.
pub const FDP_EVENTS: usize = 63;

open_values! {
    /// FDP Event Type. Types up to 7Fh are host events, higher ones are controller events.
    #[derive(Unaligned)]
    pub FdpEventType: u8 {
        UNIT_NOT_FULLY_WRITTEN = 0x00, "Reclaim Unit Not Fully Written To Capacity";
        UNIT_TIME_LIMIT_EXCEEDED = 0x01, "Reclaim Unit Time Limit Exceeded";
        RESET_MODIFIED_HANDLES = 0x02, "Controller Level Reset Modified Reclaim Unit Handles";
        INVALID_PLACEMENT_IDENTIFIER = 0x03, "Invalid Placement Identifier";
        MEDIA_REALLOCATED = 0x80, "Media Reallocated";
        IMPLICITLY_MODIFIED_HANDLE = 0x81, "Implicitly Modified Reclaim Unit Handle";
    }
}

/// FDP Event Flags.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct FdpEventFlags {
    /// Placement Identifier Valid.
    pub piv: bool,
    /// NSID Valid.
    pub nsidv: bool,
    /// Location Valid: reclaim group and reclaim unit handle are valid.
    pub lv: bool,
    #[bits(5)]
    __: u8,
}

wire_struct! {
    /// An event of the FDP Events log page, 64 bytes.
    pub struct FdpEvent(64) {
        /// FDP Event Type.
        pub fdpet @ 0: FdpEventType,
        /// FDP Event Flags.
        pub fdpef @ 1: FdpEventFlags,
        /// Placement Identifier.
        pub pid @ 2: U16,
        /// Event Timestamp, with the layout of the Timestamp feature.
        pub timestamp @ 4: [u8; 8],
        /// Namespace ID.
        pub nsid @ 12: U32,
        /// Event Type Specific.
        pub specific @ 16: [u8; 16],
        /// Reclaim Group Identifier.
        pub rgid @ 32: U16,
        /// Reclaim Unit Handle Identifier.
        pub ruhid @ 34: U16,
        #[doc(hidden)]
        pub reserved36 @ 36: [u8; 4],
        /// Vendor specific.
        pub vs @ 40: [u8; 24],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_log_bits_encode() {
        let attributes = FdpAttributes::new().with_rgif(2).with_fdpcv(true);
        assert_eq!(attributes.into_bits(), 0x82);
        assert_eq!(FdpAttributes::new().with_fdpvwc(true).into_bits(), 1 << 4);
        let flags = FdpEventFlags::new().with_piv(true).with_lv(true);
        assert_eq!(flags.into_bits(), 5);
        assert_eq!(FdpEventFlags::new().with_nsidv(true).into_bits(), 2);
    }
}
