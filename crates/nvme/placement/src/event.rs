//! Placement events ("NVMe Base 2.1", 5.1.12.1.31), and the set of them that a handle records.

use nvme::log::FdpEventType as Type;

/// Events that hosts may enable, in ascending order. Only [`Type::UNIT_NOT_FULLY_WRITTEN`] and
/// [`Type::INVALID_PLACEMENT_IDENTIFIER`] actually occur: there is no time limit, no reset changes
/// a handle, and no data is moved.
pub const SUPPORTED_EVENTS: [Type; 6] = [
    Type::UNIT_NOT_FULLY_WRITTEN,
    Type::UNIT_TIME_LIMIT_EXCEEDED,
    Type::RESET_MODIFIED_HANDLES,
    Type::INVALID_PLACEMENT_IDENTIFIER,
    Type::MEDIA_REALLOCATED,
    Type::IMPLICITLY_MODIFIED_HANDLE,
];

/// Set of event types out of [`SUPPORTED_EVENTS`], as a bit mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventSet(pub(crate) u64);

impl EventSet {
    /// Set without any event type.
    pub const NONE: Self = Self(0);

    /// Returns the set with another type added; `None` when the type is not supported.
    pub fn with(self, ty: Type) -> Option<Self> {
        let at = SUPPORTED_EVENTS.iter().position(|known| *known == ty)?;
        Some(Self(self.0 | 1 << at))
    }

    /// Returns whether the set contains the event type.
    pub fn contains(self, ty: Type) -> bool {
        Self::NONE
            .with(ty)
            .is_some_and(|one| self.0 & one.0 == one.0)
    }
}

/// FDP event that a placement handle has recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Type of the event.
    pub ty: Type,
    /// Placement Identifier of the host's command that has caused the event.
    pub identifier: u16,
    /// Number of the reclaim unit handle that the event concerns.
    pub handle: u16,
    /// NSID of the namespace that the event concerns.
    pub nsid: u32,
    /// Wall-clock time of the event in milliseconds since 1970.
    pub at: u64,
}
