//! Disks that a process before this one has served.

use super::configuration::Unavailable;
use super::session::KeeperSession;
use config::disk::DiskSpec;
use keeper::REPLACED;

/// Maximum length of the error text that is sent to the keeper (characters).
const MAX_STATUS: usize = 500;

impl KeeperSession {
    /// Returns whether an earlier process has opened the volumes of this disk, and has not ended in
    /// order.
    pub(crate) fn was_served(&self, disk: &DiskSpec, unavailable: &Unavailable) -> bool {
        // systemd keeps no record of the configuration. A disk that was served has a kept socket.
        if self.was_noted() {
            !unavailable.never_opened.contains(&disk.name())
        } else {
            disk.socket().is_some_and(|path| self.listens_at(path))
        }
    }

    /// Returns whether this process is a new version that replaces the one that served. The old
    /// version continues if this one does not serve its disks.
    pub(crate) fn is_replacement(&self) -> bool {
        self.history().how.as_deref() == Some(REPLACED)
    }

    /// Sends the keeper the reason why this new version cannot serve. The operator of a failed
    /// upgrade reads it when the old version serves again.
    pub(crate) fn tell_failure(&self, error: &anyhow::Error) {
        if let Some(link) = self.link().filter(|_| self.is_replacement()) {
            let why = format!("{error:#}").replace(char::is_control, " ");
            let why: String = why.chars().take(MAX_STATUS).collect();
            // Where that fails, the log has it.
            let _ = link.tell(&format!("STATUS={why}\n"));
        }
    }
}
