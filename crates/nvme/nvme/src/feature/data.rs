//! Data structures of features with values larger than a dword (NVMe Base 2.1, 5.1.25.1).

use bitfield_struct::bitfield;
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_struct};

wire_struct! {
    /// Data of [`Fid::TIMESTAMP`](super::Fid::TIMESTAMP), 8 bytes (NVMe Base 2.1, 5.1.25.1.7).
    pub struct Timestamp(8) {
        /// Milliseconds since 1 January 1970 00:00 UTC: 48 bits, little endian.
        pub ts @ 0: [u8; 6],
        /// Synch and origin, only in data of Get Features.
        pub attributes @ 6: TimestampAttributes,
        #[doc(hidden)]
        pub reserved7 @ 7: u8,
    }
}

impl Timestamp {
    /// Creates a timestamp from the lower 48 bits of `milliseconds`.
    pub const fn new(milliseconds: u64, attributes: TimestampAttributes) -> Self {
        let [a, b, c, d, e, f, _, _] = milliseconds.to_le_bytes();
        Self {
            ts: [a, b, c, d, e, f],
            attributes,
            reserved7: 0,
        }
    }

    /// Returns the milliseconds since 1 January 1970 00:00 UTC.
    pub const fn milliseconds(&self) -> u64 {
        let [a, b, c, d, e, f] = self.ts;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }
}

/// Attributes of a timestamp (byte 6): synch and origin.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct TimestampAttributes {
    /// Synch: the count may have stopped for some time since the timestamp was set.
    pub synch: bool,
    /// Timestamp Origin.
    #[bits(3)]
    pub origin: TimestampOrigin,
    #[bits(4)]
    __: u8,
}

open_values! {
    /// Timestamp Origin: event since which the timestamp counts (3 bits).
    pub TimestampOrigin: u8 {
        RESET = 0, "Cleared to 0h by a Controller Level Reset";
        SET_FEATURES = 1, "Set by a Set Features command";
    }
}

wire_struct! {
    /// Data of [`Fid::HOST_BEHAVIOR_SUPPORT`](super::Fid::HOST_BEHAVIOR_SUPPORT), 512 bytes
    /// (NVMe Base 2.1, 5.1.25.1.14).
    pub struct HostBehavior(512, zeroed) {
        /// Advanced Command Retry Enable: 1 when the host supports Command Interrupted and Command
        /// Retry Delay.
        pub acre @ 0: u8,
        /// Extended Telemetry Data Area 4 Supported.
        pub etdas @ 1: u8,
        /// LBA Format Extension Enable.
        pub lbafee @ 2: u8,
        /// Host Dispersed Namespace Support.
        pub hdisns @ 3: u8,
        /// Copy Descriptor Formats Enable.
        pub cdfe @ 4: U16,
        #[doc(hidden)]
        pub reserved6 @ 6: [u8; 506],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamp_round_trips() {
        let attributes = TimestampAttributes::new().with_origin(TimestampOrigin::SET_FEATURES);
        let timestamp = Timestamp::new(0x1234_5678_9abc, attributes);
        assert_eq!(
            timestamp.as_bytes(),
            [0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, 0x02, 0]
        );
        assert_eq!(timestamp.milliseconds(), 0x1234_5678_9abc);
        assert_eq!(
            Timestamp::new(u64::MAX, attributes).milliseconds(),
            (1 << 48) - 1
        );
    }
}
