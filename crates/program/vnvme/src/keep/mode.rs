//! Selection of the keeper.

use clap::ValueEnum;
use serde::Deserialize;

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

/// Returns the number of descriptors that systemd keeps for this service, if it is there and keeps
/// any (systemd.exec(5), `$FDSTORE`).
pub fn room_of_systemd() -> Option<usize> {
    let text = std::env::var("FDSTORE").ok()?;
    std::env::var_os("NOTIFY_SOCKET")?;
    text.parse().ok().filter(|most| *most > 0)
}
