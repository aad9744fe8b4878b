//! Events ("NVMe Base 2.1", 5.1.12.1.31), and which of them a handle records.

use nvme::log::FdpEventType as Type;

/// Events that hosts may enable, in ascending order. Only [`Type::UNIT_NOT_FULLY_WRITTEN`] and
/// [`Type::INVALID_PLACEMENT_IDENTIFIER`] occur here. The remaining ones never do: there is no time
/// limit, no reset changes a handle, and nothing moves data.
pub const SUPPORTED_EVENTS: [Type; 6] = [
    Type::UNIT_NOT_FULLY_WRITTEN,
    Type::UNIT_TIME_LIMIT_EXCEEDED,
    Type::RESET_MODIFIED_HANDLES,
    Type::INVALID_PLACEMENT_IDENTIFIER,
    Type::MEDIA_REALLOCATED,
    Type::IMPLICITLY_MODIFIED_HANDLE,
];

/// A set of [`SUPPORTED_EVENTS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventSet(pub(crate) u64);

impl EventSet {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns the set with another type added; `None`: the type is not supported.
    pub fn with(self, ty: Type) -> Option<Self> {
        let at = SUPPORTED_EVENTS.iter().position(|known| *known == ty)?;
        Some(Self(self.0 | 1 << at))
    }

    /// Returns whether the set contains the type.
    pub fn contains(self, ty: Type) -> bool {
        Self::NONE
            .with(ty)
            .is_some_and(|one| self.0 & one.0 == one.0)
    }
}

/// An event of the placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Type of the event.
    pub ty: Type,
    /// The Placement Identifier that the host gave.
    pub identifier: u16,
    /// Reclaim unit handle of the event.
    pub handle: u16,
    /// NSID of the namespace.
    pub nsid: u32,
    /// Milliseconds of the wall clock.
    pub at: u64,
}
