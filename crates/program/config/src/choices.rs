//! Options with a fixed set of words as values.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Migration of a controller's queues between several workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spread {
    /// Queues migrate from busy workers to idle ones
    #[default]
    Auto,
    /// Queues stay on their controller's worker
    Off,
    /// Queues migrate all the time, for tests
    #[value(hide = true)]
    Stir,
}

/// Whether the process gives up the rights that serving does not need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxMode {
    /// Give up rights, as far as the kernel supports it
    #[default]
    On,
    /// Keep all rights; logged as a warning
    Off,
}

/// Path of a namespace's commands to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PathChoice {
    /// Translate commands and pass them on, queue to queue.
    Direct,
    /// Execute commands through the volume.
    Generic,
}

impl From<PathChoice> for control::api::PathChoice {
    fn from(choice: PathChoice) -> Self {
        match choice {
            PathChoice::Direct => Self::Direct,
            PathChoice::Generic => Self::Generic,
        }
    }
}

/// Holder of the sockets and guest memory of the disks while the serving process restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeeperMode {
    /// systemd if the service has a descriptor store, otherwise a separate process; off where
    /// neither is possible
    #[default]
    Auto,
    /// A separate process, which also restarts the serving one
    Process,
    /// systemd's descriptor store of the service; systemd restarts the process
    Systemd,
    /// No holder: a killed process ends its guests' disks
    Off,
}

/// Rule by which default identifiers are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdentityRule {
    /// The volume's own identifier, or this machine's ID with the volume's path; random for volumes
    /// in memory
    #[default]
    Machine,
    /// The volume's path, which another host may serve, too, or the size of a volume in memory
    Path,
}
