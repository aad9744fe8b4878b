//! Events of disks and of the process.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A disk or namespace was added.
    Added,
    /// A disk or namespace was removed.
    Removed,
    /// A disk or namespace was changed.
    Changed,
    /// A client has connected.
    Attached,
    /// The client has disconnected.
    Detached,
    /// The size of a namespace has changed.
    Resized,
    /// Commands have failed, a disk is unavailable, or something else went wrong.
    Error,
    /// Limits began to delay requests.
    Limited,
    /// A failed request has stopped the disk: requests wait until it is resumed.
    Stopped,
    /// The disk was resumed.
    Resumed,
}

impl EventKind {
    /// Returns the name in events.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
            Self::Attached => "attached",
            Self::Detached => "detached",
            Self::Resized => "resized",
            Self::Error => "error",
            Self::Limited => "limited",
            Self::Stopped => "stopped",
            Self::Resumed => "resumed",
        }
    }
}

/// Event of a disk or of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Number of the event in this process, from 1. A gap means events that this listener has lost.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// Kind of the event.
    pub kind: EventKind,
    /// Name of the disk; empty for an event of the process.
    pub disk: String,
    /// Namespace ID, for an event of a namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Details, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
