//! Reservation Notification log page (NVMe Base 2.1, 5.1.12.1.32).

use zerocopy::Unaligned;
use zerocopy::little_endian::{U32, U64};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Reservation Notification Log Page Type.
    #[derive(Unaligned)]
    pub ReservationNotificationType: u8 {
        EMPTY = 0, "Empty Log Page";
        REGISTRATION_PREEMPTED = 1, "Registration Preempted";
        RESERVATION_RELEASED = 2, "Reservation Released";
        RESERVATION_PREEMPTED = 3, "Reservation Preempted";
    }
}

wire_struct! {
    /// Reservation Notification log page, 64 bytes: the oldest unread notification, or all zeroes.
    pub struct ReservationNotification(64, zeroed) {
        /// Log Page Count: sequence number of the notification, starting at 1.
        pub lpc @ 0: U64,
        /// Reservation Notification Log Page Type.
        pub rnlpt @ 8: ReservationNotificationType,
        /// Number of Available Log Pages in addition to this one; 255 for 255 or more.
        pub nalp @ 9: u8,
        #[doc(hidden)]
        pub reserved10 @ 10: [u8; 2],
        /// Namespace ID.
        pub nsid @ 12: U32,
        #[doc(hidden)]
        pub reserved16 @ 16: [u8; 48],
    }
}
