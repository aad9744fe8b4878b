//! Who keeps.

use clap::ValueEnum;
use serde::Deserialize;

/// Who keeps what the disks need, for a process that follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeeperMode {
    /// A process of its own, which starts the one that serves
    Process,
    /// Nobody: a killed process ends its guests' disks
    #[default]
    Off,
}
