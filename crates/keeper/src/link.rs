//! The way to the keeper.

use crate::{packet, text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::{Unpoisoned, readiness};

/// Kind of keeper that holds this process's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// The process of this number, which has started this one. Another process may have become the
    /// keeper since ([`Link::keeper`]).
    Process(u32),
    /// systemd, which holds the descriptors in the service's descriptor store.
    Systemd,
}

/// Connection to the keeper, usable from any thread. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Link(Arc<LinkState>);

#[derive(Debug)]
struct LinkState {
    socket: OwnedFd,
    keeping: Keeping,
    /// Process ID of the keeper, which changes when a stand-by becomes the keeper; 0 for systemd.
    keeper: AtomicU32,
    most: usize,
    /// Number of disks, each of which gets a share of the descriptors that the keeper can hold.
    disks: AtomicUsize,
    /// Names of all descriptors that the keeper may hold now.
    names: Mutex<Names>,
    /// Lock for one upgrade request at a time: the keeper process's answers do not name their
    /// requester.
    upgrade: Mutex<()>,
}

/// Maximum number of kept descriptors of one disk, as many as its state memory can note.
const MAX_SHARE: usize = 4096 + 64;
/// Least share that is reserved. With less, no disk could be kept: the first ones have the room.
const MIN_SHARE: usize = 16;

/// Names of kept descriptors, and their number for each disk.
#[derive(Debug, Default)]
struct Names {
    all: BTreeSet<String>,
    by_disk: BTreeMap<String, usize>,
}

/// Returns the disk of the descriptor with this name ([`Ledger`](crate::Ledger)); `None` for a
/// descriptor of the process.
fn disk_of(name: &str) -> Option<&str> {
    let (disk, _) = name.split_once('.')?;
    let number = disk.strip_prefix('d')?;
    number.parse::<u32>().is_ok().then_some(disk)
}

impl Names {
    fn new(kept: impl IntoIterator<Item = String>) -> Self {
        let mut names = Self::default();
        for name in kept {
            names.insert(&name);
        }
        names
    }

    fn insert(&mut self, name: &str) {
        if self.all.insert(name.to_owned())
            && let Some(disk) = disk_of(name)
        {
            *self.by_disk.entry(disk.to_owned()).or_default() += 1;
        }
    }

    fn leave(&mut self, name: &str) {
        if self.all.remove(name)
            && let Some(disk) = disk_of(name)
            && let Some(count) = self.by_disk.get_mut(disk)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.by_disk.remove(disk);
            }
        }
    }

    /// Enters a name, if there is room for it beside the shares of other disks.
    fn enter(&mut self, name: &str, most: usize, disks: usize) -> bool {
        let is_free = match disk_of(name) {
            Some(disk) => self.all.len() + self.reserved(disk, most, disks) < most,
            None => self.all.len() < most,
        };
        if is_free {
            self.insert(name);
        }
        is_free
    }

    /// Returns the number of descriptors that stay reserved for other disks while `disk` keeps one
    /// more.
    fn reserved(&self, disk: &str, most: usize, disks: usize) -> usize {
        // An eighth is the process's own.
        let share = (most - most / 8) / disks.max(1);
        if share < MIN_SHARE {
            return 0;
        }
        let share = share.min(MAX_SHARE);
        let own = self.by_disk.get(disk).copied();
        if own.unwrap_or(0) < share {
            return 0;
        }
        let others = self.by_disk.iter().filter(|(other, _)| *other != disk);
        let left: usize = others.map(|(_, count)| share.saturating_sub(*count)).sum();
        let known = self.by_disk.len() + usize::from(own.is_none());
        left + disks.saturating_sub(known) * share
    }
}

/// Reason why an upgrade was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpgradeError {
    /// With systemd as the keeper, an upgrade is a restart of the service.
    #[error("systemd is the keeper: systemctl restart is the upgrade")]
    Systemd,
    /// The keeper process has refused the upgrade, for this reason.
    #[error("{0}")]
    Refused(String),
    /// The keeper process has not answered within this time, and has not ended this process.
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
        Self(Arc::new(LinkState {
            socket,
            keeping,
            keeper: AtomicU32::new(match keeping {
                Keeping::Process(pid) => pid,
                Keeping::Systemd => 0,
            }),
            most,
            disks: AtomicUsize::new(1),
            names: Mutex::new(Names::new(kept)),
            upgrade: Mutex::new(()),
        }))
    }

    /// Returns the names of all descriptors that the keeper may have by now, without removed ones.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.names.lock().unpoisoned();
        names.all.iter().cloned().collect()
    }

    /// Sets the number of disks among which the keeper's capacity is divided, so that the clients
    /// of one disk cannot use all of it.
    pub fn expect_disks(&self, count: usize) {
        self.0.disks.store(count.max(1), Ordering::Relaxed);
    }

    /// Reserves a place for the descriptor of this name, if there is one left, or it has one.
    pub(crate) fn enter(&self, name: &str) -> bool {
        let mut names = self.0.names.lock().unpoisoned();
        let disks = self.0.disks.load(Ordering::Relaxed);
        names.all.contains(name) || names.enter(name, self.0.most, disks)
    }

    /// Releases the room of a descriptor, after its removal was sent to the keeper.
    pub(crate) fn leave(&self, name: &str) {
        self.0.names.lock().unpoisoned().leave(name);
    }

    /// Returns the kind of keeper that the connection leads to.
    pub fn keeping(&self) -> Keeping {
        self.0.keeping
    }

    /// Returns the present process ID of the keeper; `None` for systemd.
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

    /// Returns whether the keeper process and all of its stand-bys have ended.
    pub fn is_lost(&self) -> bool {
        let is_closed = || readiness(&self.0.socket, PollFlags::empty()).contains(PollFlags::HUP);
        self.keeping() != Keeping::Systemd && is_closed()
    }

    /// Stores the keeper's process ID, if the message contains one.
    fn note_keeper(&self, text: &[u8]) {
        let text = String::from_utf8_lossy(text);
        let pid = text.strip_prefix(text::KEEPER);
        if let Some(pid) = pid.and_then(|pid| pid.trim_end().parse().ok())
            && self.keeping() != Keeping::Systemd
        {
            self.0.keeper.store(pid, Ordering::Relaxed);
        }
    }

    /// Returns the number of descriptors that the keeper may hold now.
    pub fn kept(&self) -> usize {
        self.0.names.lock().unpoisoned().all.len()
    }

    /// Returns the maximum number of descriptors that the keeper can hold.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn descriptors_of_one_disk_leave_the_shares_of_others_free() {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let (ours, _theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let link = Link::new(ours, Keeping::Systemd, 100, ["d1.1".to_owned()]);
        link.expect_disks(3);
        let fill = |disk: &str| {
            (1..200)
                .filter(|n| link.enter(&format!("{disk}.{n}")))
                .count()
        };
        // The shares are (100 - 12) / 3 = 29.
        assert_eq!(fill("d1"), 100 - 2 * 29);
        assert!(!link.enter("d1.s"));
        assert!(link.enter("d1.1"), "it has a place");
        assert_eq!((fill("d2"), fill("d3")), (29, 29));
        assert_eq!(link.kept(), link.most());
        assert!(!link.enter("vnvme.c1"));
        // A disk that is removed leaves its places to all.
        (1..200).for_each(|n| link.leave(&format!("d2.{n}")));
        assert!(link.enter("vnvme.c1"));
        // Too many disks for shares: the first ones have the room.
        link.expect_disks(50);
        assert_eq!(fill("d4"), 100 - 42 - 29 - 1);
        assert_eq!(disk_of("vnvme.m7"), None);
        assert_eq!(disk_of("disk.1"), None);
    }
}
