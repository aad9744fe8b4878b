//! The way to the keeper.

use crate::{packet, text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// The keeper of this process's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// The process of this number, which has started this one. Another process may have become the
    /// keeper since ([`Link::keeper`]).
    Process(u32),
    /// systemd, in its store of this service's descriptors.
    Systemd,
}

/// The way to the keeper, for any number of threads: clones are the same.
#[derive(Clone, Debug)]
pub struct Link(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: OwnedFd,
    keeping: Keeping,
    /// Process ID of the keeper, which another process may become; 0 for systemd.
    keeper: AtomicU32,
    most: usize,
    /// Names of the descriptors that the keeper may have by now.
    names: Mutex<BTreeSet<String>>,
    /// Lock for one upgrade request at a time: the keeper process's answers do not name their
    /// requester.
    upgrade: Mutex<()>,
}

/// Why there is no upgrade.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpgradeError {
    /// systemd has a service's process replaced by a restart of the service.
    #[error("systemd is the keeper: systemctl restart is the upgrade")]
    Systemd,
    /// The keeper process has refused.
    #[error("{0}")]
    Refused(String),
    /// The keeper process does not answer, and has not ended this process.
    #[error("the keeper process has not answered within {} s", .0.as_secs())]
    Late(Duration),
    /// The keeper process cannot be reached.
    #[error("the keeper process cannot be reached: {0}")]
    Unreachable(Errno),
}

/// Longest wait for the keeper process: it gives a new program some seconds to report the formats
/// that it reads.
const UPGRADE_LIMIT: Duration = Duration::from_secs(20);

impl Link {
    /// Over a socket that is connected to the keeper, which keeps `most` descriptors and has those
    /// of these names already.
    pub fn new(
        socket: OwnedFd,
        keeping: Keeping,
        most: usize,
        kept: impl IntoIterator<Item = String>,
    ) -> Self {
        Self(Arc::new(Shared {
            socket,
            keeping,
            keeper: AtomicU32::new(match keeping {
                Keeping::Process(pid) => pid,
                Keeping::Systemd => 0,
            }),
            most,
            names: Mutex::new(kept.into_iter().collect()),
            upgrade: Mutex::new(()),
        }))
    }

    /// Returns the names of all descriptors that the keeper may have by now, without removed ones.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.names.lock().unpoisoned();
        names.iter().cloned().collect()
    }

    /// Reserves a place for the descriptor of this name, if there is one left, or it has one.
    pub(crate) fn enter(&self, name: &str) -> bool {
        let mut names = self.0.names.lock().unpoisoned();
        if !names.contains(name) {
            if names.len() >= self.0.most {
                return false;
            }
            names.insert(name.to_owned());
        }
        true
    }

    /// Releases the place of a descriptor after its removal has been sent.
    pub(crate) fn leave(&self, name: &str) {
        self.0.names.lock().unpoisoned().remove(name);
    }

    /// Returns the kind of keeper.
    pub fn keeping(&self) -> Keeping {
        self.0.keeping
    }

    /// Returns the process ID of the keeper by now; `None` for systemd.
    pub fn keeper(&self) -> Option<u32> {
        // An upgrade that is under way reads the messages.
        if let Ok(_one) = self.0.upgrade.try_lock() {
            while let Ok(Some(packet)) = packet::receive(self.0.socket.as_fd(), RecvFlags::DONTWAIT)
            {
                self.note_keeper(&packet.text);
            }
        }
        match self.0.keeper.load(Ordering::Relaxed) {
            0 => None,
            pid => Some(pid),
        }
    }

    /// Notes the keeper's process ID, if a message has it.
    fn note_keeper(&self, text: &[u8]) {
        let text = String::from_utf8_lossy(text);
        let pid = text.strip_prefix(text::KEEPER);
        if let Some(pid) = pid.and_then(|pid| pid.trim_end().parse().ok())
            && self.keeping() != Keeping::Systemd
        {
            self.0.keeper.store(pid, Ordering::Relaxed);
        }
    }

    /// Descriptors that are kept, of all that have been sent.
    pub fn kept(&self) -> usize {
        self.0.names.lock().unpoisoned().len()
    }

    /// Most that may be.
    pub fn most(&self) -> usize {
        self.0.most
    }

    /// Sends lines of sd_notify(3) to a service manager. Never waits.
    ///
    /// # Errors
    /// The message cannot be sent now.
    pub fn tell(&self, lines: &str) -> Result<(), Errno> {
        self.send(lines, None)
    }

    /// Replaces this process by the program now installed at its path. Waits, and returns only
    /// where that is refused, for else this process is ended.
    ///
    /// # Errors
    /// Always: why not.
    pub fn upgrade(&self) -> Result<Infallible, UpgradeError> {
        if self.keeping() == Keeping::Systemd {
            return Err(UpgradeError::Systemd);
        }
        let _one = self.0.upgrade.lock().unpoisoned();
        let socket = self.0.socket.as_fd();
        // Discards an answer that arrived too late for its requester.
        while let Ok(Some(packet)) = packet::receive(socket, RecvFlags::DONTWAIT) {
            self.note_keeper(&packet.text);
        }
        self.send(text::UPGRADE, None)
            .map_err(UpgradeError::Unreachable)?;
        let limit = Instant::now() + UPGRADE_LIMIT;
        loop {
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(UpgradeError::Late(UPGRADE_LIMIT));
            }
            let timeout = Timespec::try_from(left).unwrap_or_default();
            let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(UpgradeError::Unreachable(errno)),
            }
            match packet::receive(socket, RecvFlags::DONTWAIT) {
                Ok(Some(answer)) => {
                    self.note_keeper(&answer.text);
                    let text = String::from_utf8_lossy(&answer.text);
                    if let Some(why) = text.strip_prefix(text::NO_UPGRADE) {
                        return Err(UpgradeError::Refused(why.trim_end().to_owned()));
                    }
                }
                Ok(None) => return Err(UpgradeError::Unreachable(Errno::PIPE)),
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(UpgradeError::Unreachable(errno)),
            }
        }
    }

    pub(crate) fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        packet::send(self.0.socket.as_fd(), text, fd.as_slice())
    }
}
