//! Events of disks and of the process.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A disk, or a namespace of one, is served from now on.
    Added,
    /// It is served no more.
    Removed,
    /// Something about it was changed.
    Changed,
    /// A client has connected.
    Attached,
    /// The client has gone.
    Detached,
    /// A namespace has another size.
    Resized,
    /// Commands have failed, a disk is unavailable, or something else went wrong.
    Error,
    /// Requests had to wait for the limits, where none had before.
    Limited,
    /// Requests wait until the disk is resumed, because one has failed.
    Stopped,
    /// They go on.
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

/// Something that has happened to a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number in this process, from 1; in a gap are events that this listener has not got.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// What has happened.
    pub kind: EventKind,
    /// The disk's name; empty if it is about the process.
    pub disk: String,
    /// The namespace, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// More about it, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
