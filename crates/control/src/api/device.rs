//! Devices below.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// At work.
    Live,
    /// Suspended: commands wait.
    Suspended,
    /// Removed, released or broken.
    Gone,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceStatus {
    /// Its URL.
    pub device: String,
    /// How it is.
    pub state: DeviceState,
    /// Controller resets so far.
    pub resets: u64,
}
