//! Endurance Group Information log page (NVMe Base 2.1, 5.1.12.1.10).

use zerocopy::little_endian::{U16, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{wire_layout, zeroed_default};

/// Endurance Group Information log page, 512 bytes. The Log Specific Identifier selects the group.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EnduranceGroup {
    /// Critical Warning.
    pub egcw: u8,
    /// Endurance Group Features.
    pub egfeat: u8,
    #[doc(hidden)]
    pub reserved2: u8,
    /// Available Spare, in percent.
    pub avsp: u8,
    /// Available Spare Threshold, in percent.
    pub avspt: u8,
    /// Percentage Used.
    pub pused: u8,
    /// Domain Identifier.
    pub did: U16,
    #[doc(hidden)]
    pub reserved8: [u8; 24],
    /// Endurance Estimate, in billions of bytes; 0 when not reported.
    pub ee: U128,
    /// Data Units Read, in billions of bytes, rounded up; 0 when not reported.
    pub dur: U128,
    /// Data Units Written, in billions of bytes, rounded up; 0 when not reported.
    pub duw: U128,
    /// Media Units Written, in billions of bytes, rounded up; 0 when not reported.
    pub muw: U128,
    /// Host Read Commands.
    pub hrc: U128,
    /// Host Write Commands.
    pub hwc: U128,
    /// Media and Data Integrity Errors.
    pub mdie: U128,
    /// Number of Error Information Log Entries.
    pub neile: U128,
    /// Total Endurance Group Capacity, in bytes.
    pub tegcap: U128,
    /// Unallocated Endurance Group Capacity, in bytes.
    pub uegcap: U128,
    #[doc(hidden)]
    pub reserved192: [u8; 320],
}

wire_layout!(
    EnduranceGroup, 512, egcw @ 0, avsp @ 3, avspt @ 4, pused @ 5, did @ 6, ee @ 32, dur @ 48, duw @ 64, muw @ 80,
    hrc @ 96, hwc @ 112, mdie @ 128, neile @ 144, tegcap @ 160, uegcap @ 176,
);
zeroed_default!(EnduranceGroup);

impl EnduranceGroup {
    /// Converts bytes to the unit of this log page: billions of bytes, rounded up.
    pub const fn units(bytes: u128) -> u128 {
        bytes.div_ceil(1_000_000_000)
    }
}
