//! Disks that a process before this one has served.

use super::configuration::was_noted;
use super::disk::listens_at;
use super::exports::export_listens_at;
use crate::manage::DiskSpec;

/// Whether an earlier process has opened the volumes of this disk, and has not ended in order.
pub fn was_served(disk: &DiskSpec) -> bool {
    // systemd keeps no record of what is served: the socket of such a disk is kept.
    let has_socket = |path| listens_at(path) || export_listens_at(path);
    was_noted() || disk.socket().is_some_and(has_socket)
}
