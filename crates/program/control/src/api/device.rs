//! Devices below volumes, and servers of network volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// Serving commands.
    Live,
    /// Server without a connection: commands wait.
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

/// State of a device, or of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceStatus {
    /// URL of the device.
    pub device: String,
    /// State of the device.
    pub state: DeviceState,
    /// Controller resets so far; for a server, lost connections.
    pub resets: u64,
}
