//! Disks that a process before this one has served.

use super::configuration::{Unavailable, was_noted};
use super::disk::listens_at;
use super::exports::export_listens_at;
use super::pool::kept;
use config::disk::DiskSpec;
use keeper::REPLACED;

/// Maximum length of the error text that is sent to the keeper (characters).
const MAX_STATUS: usize = 500;

/// Whether an earlier process has opened the volumes of this disk, and has not ended in order.
pub fn was_served(disk: &DiskSpec, unavailable: &Unavailable) -> bool {
    // systemd keeps no record of the configuration. A disk that was served has a kept socket.
    let has_socket = |path| listens_at(path) || export_listens_at(path);
    if was_noted() {
        !unavailable.never_opened.contains(&disk.name())
    } else {
        disk.socket().is_some_and(has_socket)
    }
}

/// Returns whether this process is a new version that replaces the one that served. The old version
/// continues if this one does not serve its disks.
pub fn is_replacement() -> bool {
    let facts = kept().map(|kept| kept.facts());
    facts.is_some_and(|facts| facts.how.as_deref() == Some(REPLACED))
}

/// Sends the keeper the reason why this new version cannot serve. The operator of a failed upgrade
/// reads it when the old version serves again.
pub fn tell_failure(error: &anyhow::Error) {
    if !is_replacement() {
        return;
    }
    let why = format!("{error:#}").replace(char::is_control, " ");
    let why: String = why.chars().take(MAX_STATUS).collect();
    if let Some(kept) = kept() {
        // Where that fails, the log has it.
        let _ = kept.link().tell(&format!("STATUS={why}\n"));
    }
}
