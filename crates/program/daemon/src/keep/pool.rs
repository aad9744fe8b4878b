//! Kept descriptors that this process has got at its start, until their owners take them.

use super::disk::settled;
use crate::serve::notify;
use anyhow::{Context, Result, ensure};
use keeper::{Handover, KeeperClient, Keeping, Link, RestartHistory, is_name, may_be_kept};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock};
use sync::Unpoisoned;

/// Set for a process that a keeper has started: its standard input is the keeper's socket.
pub const KEPT: &str = "VNVME_KEPT";
/// Value of the environment variable for a process that ends with its keeper.
pub(super) const WITH_KEEPER: &str = "with the keeper";

static ALL: OnceLock<KeptDescriptors> = OnceLock::new();
/// Descriptors that systemd has kept for the service, until it is known whether this process uses
/// them.
static SYSTEMD_DESCRIPTORS: Mutex<Vec<(String, OwnedFd)>> = Mutex::new(Vec::new());

/// Descriptors that a keeper holds for this process, by name.
#[derive(Debug)]
pub struct KeptDescriptors {
    link: Link,
    facts: RestartHistory,
    /// Whether any descriptor was kept when this process began.
    had_any: bool,
    descriptors: Mutex<BTreeMap<String, OwnedFd>>,
}

impl KeptDescriptors {
    /// Returns the connection to the keeper.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Returns how the process before this one ended.
    pub fn facts(&self) -> &RestartHistory {
        &self.facts
    }

    /// Takes the descriptor kept under this name.
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        self.descriptors.lock().unpoisoned().remove(name)
    }

    /// Takes the descriptor kept under this name, if `is_so` accepts it.
    pub fn take_if(&self, name: &str, is_so: impl FnOnce(&OwnedFd) -> bool) -> Option<OwnedFd> {
        let mut descriptors = self.descriptors.lock().unpoisoned();
        descriptors.get(name).filter(|fd| is_so(fd))?;
        descriptors.remove(name)
    }

    /// Returns an unused descriptor to the pool, under the name it was taken from.
    pub fn put_back(&self, name: &str, fd: OwnedFd) {
        let mut descriptors = self.descriptors.lock().unpoisoned();
        descriptors.insert(name.to_owned(), fd);
    }

    /// Returns the names of all kept descriptors that were not taken.
    pub fn names(&self) -> Vec<String> {
        self.descriptors
            .lock()
            .unpoisoned()
            .keys()
            .cloned()
            .collect()
    }
}

/// Returns the descriptors kept for this process, if there is a keeper.
pub fn kept() -> Option<&'static KeptDescriptors> {
    ALL.get()
}

/// Returns whether this process has a keeper.
pub fn is_kept() -> bool {
    kept().is_some()
}

/// Returns the process ID of the keeper process, if there is one.
pub fn pid() -> Option<u32> {
    kept()?.link.keeper()
}

/// Returns whether systemd is the keeper. Each process then reads its configuration again, and the
/// number of earlier processes is unknown.
pub fn is_systemd() -> bool {
    kept().is_some_and(|kept| kept.link.keeping() == Keeping::Systemd)
}

/// Returns whether this process continues one that did not end in an orderly way.
pub fn is_successor() -> bool {
    kept().is_some_and(|kept| kept.facts.restarts > 0 || kept.had_any)
}

/// Takes the descriptors that the keeper of this process holds, and those that a service manager
/// has opened for the keeper. The first call in `main`.
///
/// # Errors
/// A sentence for the user.
pub fn arrive() -> Result<Vec<(String, OwnedFd)>> {
    let given = inherit::take_named();
    if std::env::var_os(KEPT).is_none() {
        let (kept, given) = given.into_iter().partition(|(name, _)| is_ours(name));
        *SYSTEMD_DESCRIPTORS.lock().unpoisoned() = kept;
        return Ok(given);
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
    let Handover {
        link,
        kept,
        given,
        facts,
    } = arrival;
    let _ = ALL.set(KeptDescriptors {
        link,
        facts,
        had_any: !kept.is_empty(),
        descriptors: Mutex::new(kept.into_iter().collect()),
    });
    Ok(given)
}

/// Reserves room in the keeper for the descriptors of `count` disks with clients.
pub fn expect_disks(count: usize) {
    if let Some(kept) = kept() {
        kept.link.expect_disks(count);
    }
}

/// Has this process outlive its keeper: guests go on, and the stand-by is the keeper.
///
/// # Errors
/// The system refuses that.
pub fn outlive_keeper() -> Result<()> {
    let ends_with_keeper = std::env::var(KEPT).is_ok_and(|value| value == WITH_KEEPER);
    if pid().is_some() && !ends_with_keeper {
        set_parent_process_death_signal(None).context("prctl")?;
    }
    Ok(())
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

fn taken_of_systemd() -> Vec<(String, OwnedFd)> {
    std::mem::take(&mut *SYSTEMD_DESCRIPTORS.lock().unpoisoned())
}

/// Makes systemd the keeper, for at most `most` descriptors. This process takes all that systemd
/// has kept.
///
/// # Errors
/// systemd cannot be reached.
pub(super) fn take_systemd(most: usize) -> Result<()> {
    let socket = notify::socket().context("systemd cannot be reached (NOTIFY_SOCKET)")?;
    let kept = taken_of_systemd();
    let names = kept.iter().map(|(name, _)| name.clone());
    let link = Link::new(socket.into(), Keeping::Systemd, most, names);
    // systemd takes whatever a process gives it.
    let (kept, strange): (Vec<_>, Vec<_>) = kept.into_iter().partition(|(_, fd)| may_be_kept(fd));
    let mut keeper_client = KeeperClient::new(&link);
    for (name, _) in &strange {
        let _ = keeper_client.remove(name);
    }
    sync::discard(strange);
    let _ = ALL.set(KeptDescriptors {
        link,
        facts: RestartHistory::default(),
        had_any: !kept.is_empty(),
        descriptors: Mutex::new(kept.into_iter().collect()),
    });
    Ok(())
}

/// Stops using systemd as the keeper: its descriptors are closed, and their clients are
/// disconnected.
pub(super) fn leave_systemd() {
    let kept = taken_of_systemd();
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

/// The process ends, and nobody is to go on: systemd, which stays, keeps nothing of it.
pub fn end() {
    if let Some(kept) = kept().filter(|_| is_systemd()) {
        forget_all(&kept.link);
    }
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
