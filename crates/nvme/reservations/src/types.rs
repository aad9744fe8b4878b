//! Reservation types, command groups, notifications and refusals.

use nvme::Status;
use nvme::cmd::reservation::Rtype;
use nvme::feature::ReservationNotificationMask;
use nvme::log::ReservationNotificationType;

/// Type of a reservation ("NVMe Base 2.1", 7.5, Reservation Type).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    /// Write Exclusive: only the holder may write; every host may read.
    WriteExclusive = 1,
    /// Exclusive Access: only the holder may read and write.
    ExclusiveAccess = 2,
    /// Registrants may write, every host may read; one registrant holds the reservation.
    WriteExclusiveRegistrantsOnly = 3,
    /// Only registrants may read and write; one of them holds the reservation.
    ExclusiveAccessRegistrantsOnly = 4,
    /// Registrants may write, every host may read; all registrants hold the reservation.
    WriteExclusiveAllRegistrants = 5,
    /// Only registrants may read and write; all of them hold the reservation.
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// All six reservation types.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    /// Returns the reservation type with this number; `None` for a reserved number.
    pub fn of(rtype: Rtype) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.rtype() == rtype)
    }

    /// Returns the number of the reservation type (RTYPE).
    pub const fn rtype(self) -> Rtype {
        Rtype(self as u8)
    }

    /// Returns whether the reservation type also denies reads to hosts without write access.
    pub const fn excludes_reads(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess
                | Self::ExclusiveAccessRegistrantsOnly
                | Self::ExclusiveAccessAllRegistrants
        )
    }

    /// Returns whether all registrants have the rights of the holder under this type.
    pub const fn admits_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Returns whether all registrants hold a reservation of this type.
    pub const fn held_by_all(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }
}

/// A group of commands that conflict with the same reservations ("NVMe Base 2.1", 8.1.22.1, Command
/// Behavior in the Presence of a Reservation). Commands outside both groups never conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandGroup {
    /// Read, Compare, Verify, the source of Copy, Security Receive.
    Read,
    /// Write, Write Zeroes, Write Uncorrectable, Dataset Management, Flush, the destination of
    /// Copy, Format NVM, Sanitize, Namespace Management and Attachment, Security Send.
    Write,
}

/// Access rights that reservations leave to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Whether the host may execute commands that read.
    pub read: bool,
    /// Whether the host may execute commands that write.
    pub write: bool,
}

impl Access {
    /// Access without any restriction.
    pub const FULL: Self = Access {
        read: true,
        write: true,
    };

    /// Returns whether the host may execute commands of the group.
    pub const fn allows(self, group: CommandGroup) -> bool {
        match group {
            CommandGroup::Read => self.read,
            CommandGroup::Write => self.write,
        }
    }
}

/// Reservation notification to the host of a controller ("NVMe Base 2.1", 8.1.22.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Notification {
    /// Another host has removed the registration of the host.
    RegistrationPreempted,
    /// The reservation was released or has changed its type.
    ReservationReleased,
    /// Another host has removed the reservation and all registrants.
    ReservationPreempted,
}

impl Notification {
    /// Returns the notification of a type in the log page; `None` for an empty page or a reserved
    /// type.
    pub fn of(kind: ReservationNotificationType) -> Option<Self> {
        let all = [
            Self::RegistrationPreempted,
            Self::ReservationReleased,
            Self::ReservationPreempted,
        ];
        all.into_iter().find(|one| one.log_page_type() == kind)
    }

    /// Returns the type in the Reservation Notification log page.
    pub const fn log_page_type(self) -> ReservationNotificationType {
        match self {
            Self::RegistrationPreempted => ReservationNotificationType::REGISTRATION_PREEMPTED,
            Self::ReservationReleased => ReservationNotificationType::RESERVATION_RELEASED,
            Self::ReservationPreempted => ReservationNotificationType::RESERVATION_PREEMPTED,
        }
    }

    /// Returns whether the host's Reservation Notification Mask suppresses the notification.
    pub const fn is_masked(self, mask: ReservationNotificationMask) -> bool {
        match self {
            Self::RegistrationPreempted => mask.regpre(),
            Self::ReservationReleased => mask.resrel(),
            Self::ReservationPreempted => mask.respre(),
        }
    }
}

/// Reason why a reservation command is refused without any change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservationRefusal {
    /// The host is not a registrant, its key differs, or another host holds the reservation.
    #[error("the command conflicts with a reservation or registration")]
    Conflict,
    /// A value is reserved, unsupported, or inconsistent with the state.
    #[error("a field has a value that is reserved, not supported, or not that of the state")]
    InvalidField,
    /// The maximum number of hosts is registered ([`MAX_REGISTRANTS`](crate::MAX_REGISTRANTS)).
    #[error("there is no room for another registrant")]
    Full,
}

impl ReservationRefusal {
    /// Returns the status with which the refused command completes.
    pub const fn status(self) -> Status {
        match self {
            Self::Conflict => Status::RESERVATION_CONFLICT.with_dnr(true),
            Self::InvalidField => Status::INVALID_FIELD.with_dnr(true),
            // The standard has no status for it.
            Self::Full => Status::INTERNAL_ERROR.with_dnr(true),
        }
    }
}
