//! Disks that a process before this one has served.

use super::configuration::{Unavailable, was_noted};
use super::disk::listens_at;
use super::exports::export_listens_at;
use super::pool::kept;
use crate::manage::DiskSpec;
use keeper::REPLACED;

/// Characters that the keeper is told at most of what is wrong.
const MAX_STATUS: usize = 500;

/// Whether an earlier process has opened the volumes of this disk, and has not ended in order.
pub fn was_served(disk: &DiskSpec, unavailable: &Unavailable) -> bool {
    // systemd keeps no record of what is served: the socket of such a disk is kept.
    let has_socket = |path| listens_at(path) || export_listens_at(path);
    match was_noted() {
        true => !unavailable.never_opened.contains(&disk.name()),
        false => disk.socket().is_some_and(has_socket),
    }
}

/// Whether this process is of another version, which is tried in the place of the one that served:
/// that one goes on if this one does not serve its disks.
pub fn is_replacement() -> bool {
    let facts = kept().map(|kept| kept.facts());
    facts.is_some_and(|facts| facts.how.as_deref() == Some(REPLACED))
}

/// Tells the keeper why this process cannot serve: the operator of an upgrade asks what became of
/// it when the version before serves again.
pub fn tell_failure(error: &anyhow::Error) {
    let why = format!("{error:#}").replace(char::is_control, " ");
    let why: String = why.chars().take(MAX_STATUS).collect();
    if let Some(kept) = kept() {
        // Where that fails, the log has it.
        let _ = kept.link().tell(&format!("STATUS={why}\n"));
    }
}
