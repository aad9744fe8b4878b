//! Reservation Notification log page (NVMe Base 2.1, 5.1.12.1.32).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_layout, zeroed_default};

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

/// Reservation Notification log page, 64 bytes: the oldest unread notification, or all zeroes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReservationNotification {
    /// Log Page Count: sequence number of the notification, starting at 1.
    pub lpc: U64,
    /// Reservation Notification Log Page Type.
    pub rnlpt: ReservationNotificationType,
    /// Number of Available Log Pages in addition to this one; 255 for 255 or more.
    pub nalp: u8,
    #[doc(hidden)]
    pub reserved10: [u8; 2],
    /// Namespace ID.
    pub nsid: U32,
    #[doc(hidden)]
    pub reserved16: [u8; 48],
}

wire_layout!(ReservationNotification, 64, lpc @ 0, rnlpt @ 8, nalp @ 9, nsid @ 12);
zeroed_default!(ReservationNotification);
