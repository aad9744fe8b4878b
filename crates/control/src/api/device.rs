//! Devices below, and servers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// At work.
    Live,
    /// A server to which a connection is missing: commands wait.
    Connecting,
    /// Suspended: commands wait.
    Suspended,
    /// Removed, released or broken.
    Gone,
}

impl DeviceState {
    /// Returns the name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Connecting => "connecting",
            Self::Suspended => "suspended",
            Self::Gone => "gone",
        }
    }
}

/// One device, or server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceStatus {
    /// Its URL.
    pub device: String,
    /// How it is.
    pub state: DeviceState,
    /// Controller resets so far; of a server: connections that were lost.
    pub resets: u64,
}
