//! Zone states, actions, report filters and refusals.

use nvme::Status;

/// Zone state ("NVMe Zoned Namespace Command Set 1.1", 2.1.1.2), with its number in a zone
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ZoneState {
    /// The zone has no written blocks since its reset.
    Empty = 0x1,
    /// The zone was opened by a write.
    ImplicitlyOpen = 0x2,
    /// The zone was opened by Zone Management Send.
    ExplicitlyOpen = 0x3,
    /// The zone is partly written, and not open.
    Closed = 0x4,
    /// The zone accepts no writes, but its data can be read.
    ReadOnly = 0xd,
    /// The zone cannot be written until it is reset.
    Full = 0xe,
    /// The zone cannot be read or written.
    Offline = 0xf,
}

impl ZoneState {
    /// All zone states that the standard defines.
    pub const ALL: [Self; 7] = [
        Self::Empty,
        Self::ImplicitlyOpen,
        Self::ExplicitlyOpen,
        Self::Closed,
        Self::ReadOnly,
        Self::Full,
        Self::Offline,
    ];

    /// Returns the zone state with this number; `None` for a reserved number.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.number() == number)
    }

    /// Returns the number of the zone state, as in a zone descriptor.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns whether a zone in this state counts as open.
    pub const fn is_open(self) -> bool {
        matches!(self, Self::ImplicitlyOpen | Self::ExplicitlyOpen)
    }

    /// Returns whether a zone in this state counts as active.
    pub const fn is_active(self) -> bool {
        self.is_open() || matches!(self, Self::Closed)
    }

    /// Returns whether the write pointer of a zone in this state is valid.
    pub const fn has_write_pointer(self) -> bool {
        self.is_active() || matches!(self, Self::Empty)
    }
}

/// Actions of Zone Management Send, except reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Close Zone.
    Close,
    /// Finish Zone.
    Finish,
    /// Open Zone.
    Open,
    /// Offline Zone.
    Offline,
}

/// Selects the zones that Zone Management Receive reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// All zones.
    All,
    /// Zones in this state.
    In(ZoneState),
}

impl Filter {
    /// Returns the filter with this number ("NVMe Zoned Namespace Command Set 1.1", 3.4.2, Zone
    /// Receive Action Specific Field); `None` for a reserved one.
    pub const fn of(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::All,
            1 => Self::In(ZoneState::Empty),
            2 => Self::In(ZoneState::ImplicitlyOpen),
            3 => Self::In(ZoneState::ExplicitlyOpen),
            4 => Self::In(ZoneState::Closed),
            5 => Self::In(ZoneState::Full),
            6 => Self::In(ZoneState::ReadOnly),
            7 => Self::In(ZoneState::Offline),
            _ => return None,
        })
    }

    pub(crate) fn takes(self, state: ZoneState) -> bool {
        match self {
            Self::All => true,
            Self::In(wanted) => wanted == state,
        }
    }
}

/// Reason why a command for a zoned namespace is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ZoneRefusal {
    /// The blocks are outside the namespace.
    #[error("blocks outside the namespace")]
    OutOfRange,
    /// The command names a zone by a block that is not the zone's first.
    #[error("the address is not the first block of a zone")]
    NotAtStart,
    /// The command exceeds the zone's capacity or crosses its boundary.
    #[error("the write crosses the end of its zone")]
    Boundary,
    /// The zone is full.
    #[error("the zone is full")]
    Full,
    /// The zone accepts no writes.
    #[error("the zone can only be read")]
    ReadOnly,
    /// The zone is offline.
    #[error("the zone is offline")]
    Offline,
    /// The write does not begin at the write pointer, or exceeds the Zone Random Write Area and the
    /// blocks that an implicit flush can commit.
    #[error(
        "the write does not begin at the zone's write pointer, or within its random write area"
    )]
    InvalidWrite,
    /// The maximum number of active zones is reached.
    #[error("too many zones are active")]
    TooManyActive,
    /// The maximum number of open zones is reached.
    #[error("too many zones are open")]
    TooManyOpen,
    /// The state of the zone does not allow the action.
    #[error("the zone's state does not allow that")]
    InvalidTransition,
    /// The zone has no Zone Random Write Area or cannot get one, or the blocks are outside of it;
    /// or an append to a zone that has one.
    #[error("the zone's random write area does not allow that")]
    InvalidOperation,
    /// The maximum number of Zone Random Write Areas is reached.
    #[error("too many zones have a random write area")]
    ZrwaResources,
    /// The number of flushed blocks is not a multiple of the flush granularity.
    #[error("the flushed range is not a multiple of the granularity")]
    Granularity,
    /// The zone is being reset; the host may retry the command.
    #[error("the zone is being reset")]
    Resetting,
}

impl ZoneRefusal {
    /// Returns the status with which the refused command completes.
    pub const fn status(self) -> Status {
        let status = match self {
            Self::OutOfRange => Status::LBA_OUT_OF_RANGE,
            Self::NotAtStart | Self::Granularity => Status::INVALID_FIELD,
            Self::Boundary => Status::ZONED_BOUNDARY_ERROR,
            Self::Full => Status::ZONE_IS_FULL,
            Self::ReadOnly => Status::ZONE_IS_READ_ONLY,
            Self::Offline => Status::ZONE_IS_OFFLINE,
            Self::InvalidWrite => Status::ZONE_INVALID_WRITE,
            Self::TooManyActive => Status::TOO_MANY_ACTIVE_ZONES,
            Self::TooManyOpen => Status::TOO_MANY_OPEN_ZONES,
            Self::InvalidTransition => Status::INVALID_ZONE_STATE_TRANSITION,
            Self::InvalidOperation => Status::INVALID_ZONE_OPERATION_REQUEST,
            Self::ZrwaResources => Status::ZRWA_RESOURCES_UNAVAILABLE,
            Self::Resetting => return Status::COMMAND_INTERRUPTED,
        };
        status.with_dnr(true)
    }
}
