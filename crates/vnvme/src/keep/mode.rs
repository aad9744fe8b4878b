//! Selection of the keeper.

use clap::ValueEnum;
use serde::Deserialize;

/// Who keeps what the disks need, for a process that follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeeperMode {
    /// systemd, where it keeps descriptors for this service, else a process of its own; nobody
    /// where that cannot be
    #[default]
    Auto,
    /// A process of its own, which starts the one that serves
    Process,
    /// systemd, in the service's store of descriptors: it starts the process that serves again
    Systemd,
    /// Nobody: a killed process ends its guests' disks
    Off,
}

/// Returns the number of descriptors that systemd keeps for this service, if it is there and keeps
/// any (systemd.exec(5), `$FDSTORE`).
pub fn room_of_systemd() -> Option<usize> {
    let text = std::env::var("FDSTORE").ok()?;
    std::env::var_os("NOTIFY_SOCKET")?;
    text.parse().ok().filter(|most| *most > 0)
}
