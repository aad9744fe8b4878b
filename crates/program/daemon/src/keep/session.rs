//! Session of a process with its keeper: everything that the previous process has left, until its
//! owners take it, and the state of what this process keeps. One value, made at the start of the
//! program and passed to all who need it.

use super::attempts::Attempts;
use super::configuration::ConfigurationRecord;
use super::disk::{Disks, settled};
use super::life::Life;
use super::memory::MemoryNames;
use crate::confine::inherited::Inherited;
use crate::confine::path_check::PathAnswers;
use crate::serve::notify;
use anyhow::{Context, Result, ensure};
use keeper::{
    Handover, KeepError, KeeperClient, Keeping, Link, RestartHistory, is_name, may_be_kept,
};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};
use sync::Unpoisoned;

/// Set for a process that a keeper has started: its standard input is the keeper's socket.
pub const KEPT: &str = "VNVME_KEPT";
/// Value of the environment variable for a process that ends with its keeper.
pub(super) const WITH_KEEPER: &str = "with the keeper";

/// Session of this process with its keeper. The default is that of a process without a keeper,
/// which finds and keeps nothing.
#[derive(Debug, Default)]
pub struct KeeperSession {
    /// Connection to the keeper; `None` without one.
    link: Option<Link>,
    history: RestartHistory,
    /// Whether any descriptor was kept when this process began.
    had_any: bool,
    /// Kept descriptors that no owner has taken, by name.
    descriptors: Mutex<BTreeMap<String, OwnedFd>>,
    /// Descriptors that systemd has kept for the service, until it is known whether this process
    /// uses them.
    of_systemd: Vec<(String, OwnedFd)>,
    /// Sockets that a service manager has opened for this process.
    pub(crate) inherited: Arc<Inherited>,
    /// Answers of files to the checks of this process.
    pub(crate) answers: Arc<PathAnswers>,
    /// Disks that the previous process has left, found at the first use.
    pub(super) disks: OnceLock<Mutex<Disks>>,
    pub(super) configuration: ConfigurationRecord,
    pub(super) attempts: Option<Mutex<Attempts>>,
    pub(super) memory_names: MemoryNames,
    pub(super) life: Life,
}

impl KeeperSession {
    /// Takes the descriptors that the keeper of this process holds, and those that a service
    /// manager has opened. The first call in `main`.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn arrive() -> Result<Self> {
        let given = inherit::take_named();
        if std::env::var_os(KEPT).is_none() {
            let (of_systemd, given) = given.into_iter().partition(|(name, _)| is_ours(name));
            return Ok(Self {
                of_systemd,
                inherited: Arc::new(Inherited::new(given)),
                ..Self::default()
            });
        }
        // Until this process serves, it ends with its keeper: the next keeper starts another one.
        set_parent_process_death_signal(Some(Signal::KILL)).context("prctl")?;
        let channel = std::io::stdin().as_fd().try_clone_to_owned();
        let arrival = Handover::receive(channel.context("keeper")?).context("keeper")?;
        let parent = getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
        ensure!(
            matches!(arrival.link.keeping(), Keeping::Process(keeper) if Some(keeper) == parent),
            "the keeper process has ended"
        );
        // No other code may use the keeper's socket.
        let null = open("/dev/null", OFlags::RDONLY, Mode::empty()).context("/dev/null")?;
        rustix::stdio::dup2_stdin(null).context("standard input")?;
        crash::begin();
        let mut session = Self {
            history: arrival.facts,
            inherited: Arc::new(Inherited::new(arrival.given)),
            ..Self::default()
        };
        session.enter(arrival.link, arrival.kept);
        Ok(session)
    }

    /// Begins the session with a keeper that holds these descriptors.
    fn enter(&mut self, link: Link, kept: Vec<(String, OwnedFd)>) {
        self.link = Some(link);
        self.had_any = !kept.is_empty();
        self.descriptors = Mutex::new(kept.into_iter().collect());
    }

    /// Makes systemd the keeper, for at most `most` descriptors. This process takes all that
    /// systemd has kept.
    ///
    /// # Errors
    /// systemd cannot be reached.
    pub(super) fn take_systemd(&mut self, most: usize) -> Result<()> {
        let socket = notify::socket().context("systemd cannot be reached (NOTIFY_SOCKET)")?;
        let kept = std::mem::take(&mut self.of_systemd);
        let names = kept.iter().map(|(name, _)| name.clone());
        let link = Link::new(socket.into(), Keeping::Systemd, most, names);
        // systemd takes whatever a process gives it.
        let (kept, strange): (Vec<_>, Vec<_>) =
            kept.into_iter().partition(|(_, fd)| may_be_kept(fd));
        self.enter(link, kept);
        strange.iter().for_each(|(name, _)| self.remove(name));
        sync::discard(strange);
        Ok(())
    }

    /// Stops using systemd as the keeper: its descriptors are closed, and their clients are
    /// disconnected.
    pub(super) fn leave_systemd(&mut self) {
        let kept = std::mem::take(&mut self.of_systemd);
        if kept.is_empty() {
            return;
        }
        tracing::warn!("what systemd has kept is not used: its clients are disconnected");
        if let Some(socket) = notify::socket() {
            let names = kept.iter().map(|(name, _)| name.clone());
            forget_all(&Link::new(
                socket.into(),
                Keeping::Systemd,
                usize::MAX,
                names,
            ));
        }
        sync::discard(kept);
    }

    /// Returns whether this process has a keeper.
    pub fn is_kept(&self) -> bool {
        self.link.is_some()
    }

    /// Returns the connection to the keeper, if there is one.
    pub(crate) fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// Returns a client of the keeper, if there is one.
    pub(crate) fn client(&self) -> Option<KeeperClient> {
        self.link().map(KeeperClient::new)
    }

    /// Returns how the processes before this one ended.
    pub(crate) fn history(&self) -> &RestartHistory {
        &self.history
    }

    /// Returns the process ID of the keeper process, if there is one.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.link()?.keeper()
    }

    /// Returns whether systemd is the keeper. Each process then reads its configuration again, and
    /// the number of earlier processes is unknown.
    pub(crate) fn is_systemd(&self) -> bool {
        self.link()
            .is_some_and(|link| link.keeping() == Keeping::Systemd)
    }

    /// Returns a client of the keeper process; `None` without a keeper, and with systemd.
    pub(super) fn process_client(&self) -> Option<KeeperClient> {
        self.client().filter(|_| !self.is_systemd())
    }

    /// Returns whether this process continues one that did not end in an orderly way.
    pub(crate) fn is_successor(&self) -> bool {
        self.is_kept() && (self.history.restarts > 0 || self.had_any)
    }

    /// Takes the descriptor kept under this name.
    pub(super) fn take(&self, name: &str) -> Option<OwnedFd> {
        self.descriptors.lock().unpoisoned().remove(name)
    }

    /// Returns an unused descriptor, under the name it was taken from.
    pub(super) fn put_back(&self, name: &str, fd: OwnedFd) {
        let mut descriptors = self.descriptors.lock().unpoisoned();
        descriptors.insert(name.to_owned(), fd);
    }

    /// Returns the names of all kept descriptors that were not taken.
    pub(super) fn names(&self) -> Vec<String> {
        let descriptors = self.descriptors.lock().unpoisoned();
        descriptors.keys().cloned().collect()
    }

    /// Passes a descriptor to the keeper, and waits until it is kept. Without a keeper nothing is.
    ///
    /// # Errors
    /// The keeper keeps nothing more.
    pub(super) fn store(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), KeepError> {
        let Some(mut keeper_client) = self.client() else {
            return Ok(());
        };
        keeper_client.store(name, fd)?;
        settled(&mut keeper_client)
    }

    /// Asks the keeper to close the descriptor of this name. If that fails, the next process finds
    /// the descriptor and removes it.
    pub(super) fn remove(&self, name: &str) {
        if let Some(mut keeper_client) = self.client() {
            let _ = keeper_client.remove(name);
        }
    }

    /// Makes the keeper close the descriptor of this name, and waits for it.
    pub(super) fn remove_now(&self, name: &str) {
        if let Some(mut keeper_client) = self.client() {
            let _ = keeper_client.remove(name);
            let _ = settled(&mut keeper_client);
        }
    }

    /// Reserves room in the keeper for the descriptors of `count` disks with clients.
    pub(crate) fn expect_disks(&self, count: usize) {
        if let Some(link) = self.link() {
            link.expect_disks(count);
        }
    }

    /// Has this process outlive its keeper: guests go on, and the stand-by is the keeper.
    ///
    /// # Errors
    /// The system refuses that.
    pub(crate) fn outlive_keeper(&self) -> Result<()> {
        let ends_with_keeper = std::env::var(KEPT).is_ok_and(|value| value == WITH_KEEPER);
        if self.pid().is_some() && !ends_with_keeper {
            set_parent_process_death_signal(None).context("prctl")?;
        }
        Ok(())
    }

    /// The process ends, and nobody is to go on: systemd, which stays, keeps nothing of it.
    pub(crate) fn end(&self) {
        if let Some(link) = self.link().filter(|_| self.is_systemd()) {
            forget_all(link);
        }
    }
}

/// Returns whether a descriptor of this name was kept by this program, and is no socket that a
/// service manager has opened for it.
fn is_ours(name: &str) -> bool {
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let of_disk = |name: &str| {
        let (disk, rest) = name.strip_prefix('d')?.split_once('.')?;
        Some(is_number(disk) && (rest == "s" || is_number(rest)))
    };
    let of_process = |name: &str| {
        let rest = name.strip_prefix("vnvme.")?;
        let kinds = [
            "blk-",
            "control.",
            "questions.",
            "metrics.",
            "life-",
            "k",
            "m",
            "n",
            "r",
        ];
        let rest = kinds.into_iter().find_map(|kind| rest.strip_prefix(kind))?;
        let is_code = |byte: u8| byte.is_ascii_hexdigit() || byte == b'.';
        Some(!rest.is_empty() && rest.bytes().all(is_code))
    };
    is_name(name) && of_disk(name).or_else(|| of_process(name)).unwrap_or(false)
}

fn forget_all(link: &Link) {
    let mut keeper_client = KeeperClient::new(link);
    for name in link.names() {
        let _ = keeper_client.remove(&name);
    }
    if let Err(error) = settled(&mut keeper_client) {
        tracing::warn!(%error, "systemd keeps what nobody needs");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_descriptor_names_differ_from_socket_units() {
        for name in [
            "d1.s",
            "d77.12",
            "vnvme.control.123",
            "vnvme.life-7",
            "vnvme.m00ffa1",
            "vnvme.k00ffa1",
            "vnvme.n00ffa1.12.3",
            "vnvme.blk-00ffa1.12",
            "vnvme.r0",
        ] {
            assert!(is_ours(name), "{name}");
        }
        for name in [
            "vnvme",
            "vnvme.socket",
            "vnvme.metrics.socket",
            "vnvme.control",
            "vnvme.main",
            "vnvme.blk-root",
            "d.s",
            "d1.x",
            "d1",
            "dx.1",
            "disk.s",
            "connection",
            "",
            "d1.s.1",
            "d1:s",
            "lasting.served",
        ] {
            assert!(!is_ours(name), "{name}");
        }
    }
}
