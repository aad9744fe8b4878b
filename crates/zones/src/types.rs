//! The words of zones: states, actions, refusals.

use nvme::Status;

/// A zone's state ("NVMe Zoned Namespace Command Set 1.1", 2.1.1.2), under its number in a zone
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum State {
    /// Nothing was written to it since it was reset.
    Empty = 0x1,
    /// A write has opened it.
    ImplicitlyOpen = 0x2,
    /// The host has opened it.
    ExplicitlyOpen = 0x3,
    /// It is written in part, and not open.
    Closed = 0x4,
    /// It takes no writes, but those that have gone can be read.
    ReadOnly = 0xd,
    /// Nothing can be written any more, until it is reset.
    Full = 0xe,
    /// It cannot even be read.
    Offline = 0xf,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Empty,
        Self::ImplicitlyOpen,
        Self::ExplicitlyOpen,
        Self::Closed,
        Self::ReadOnly,
        Self::Full,
        Self::Offline,
    ];

    /// The state under its number; none for a reserved one.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.number() == number)
    }

    /// Its number.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// It counts as open.
    pub const fn is_open(self) -> bool {
        matches!(self, Self::ImplicitlyOpen | Self::ExplicitlyOpen)
    }

    /// It counts as active.
    pub const fn is_active(self) -> bool {
        self.is_open() || matches!(self, Self::Closed)
    }

    /// The write pointer means something.
    pub const fn has_write_pointer(self) -> bool {
        self.is_active() || matches!(self, Self::Empty)
    }
}

/// What Zone Management Send does to a zone, but for its reset.
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

/// Which zones a report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// All.
    All,
    /// Those in this state.
    In(State),
}

impl Filter {
    /// By its number ("NVMe Zoned Namespace Command Set 1.1", 3.4.2, Zone Receive Action Specific
    /// Field); none for a reserved one.
    pub const fn of(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::All,
            1 => Self::In(State::Empty),
            2 => Self::In(State::ImplicitlyOpen),
            3 => Self::In(State::ExplicitlyOpen),
            4 => Self::In(State::Closed),
            5 => Self::In(State::Full),
            6 => Self::In(State::ReadOnly),
            7 => Self::In(State::Offline),
            _ => return None,
        })
    }

    pub(crate) fn takes(self, state: State) -> bool {
        match self {
            Self::All => true,
            Self::In(wanted) => wanted == state,
        }
    }
}

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// It is about blocks that are not there.
    #[error("blocks that are not there")]
    OutOfRange,
    /// A zone is not named by its first block.
    #[error("a zone is named by its first block")]
    NotAtStart,
    /// It goes beyond the zone's capacity.
    #[error("it goes beyond the end of its zone")]
    Boundary,
    /// The zone is full.
    #[error("the zone is full")]
    Full,
    /// The zone takes no writes.
    #[error("the zone can only be read")]
    ReadOnly,
    /// The zone is gone.
    #[error("the zone is offline")]
    Offline,
    /// It does not begin at the write pointer, or leaves the Zone Random Write Area and what is
    /// flushed for it.
    #[error("it does not begin at the zone's write pointer, or not within reach of it")]
    InvalidWrite,
    /// So many zones are active that this one cannot be.
    #[error("too many zones are active")]
    TooManyActive,
    /// So many zones are open that this one cannot be.
    #[error("too many zones are open")]
    TooManyOpen,
    /// A zone in this state cannot do that.
    #[error("the zone's state does not allow that")]
    InvalidTransition,
    /// What is about a Zone Random Write Area, of a zone that has none or cannot get one, or about
    /// blocks outside of it; or an append to a zone that has one.
    #[error("the zone's random write area does not allow that")]
    InvalidOperation,
    /// So many zones have a Zone Random Write Area that this one cannot get one.
    #[error("too many zones have a random write area")]
    ZrwaResources,
    /// It would move the write pointer by other than the flush granularity.
    #[error("what is flushed is no multiple of the granularity")]
    Granularity,
    /// The zone is being reset: the command may come again.
    #[error("the zone is being reset")]
    Resetting,
}

impl Refusal {
    /// What the command ends with.
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
