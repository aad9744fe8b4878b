//! What is kept when this process starts, until its owner takes it.

use anyhow::{Context, Result, ensure};
use keeper::{Arrival, Facts, Keeping, Link};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock};
use sync::Unpoisoned;

/// Set for a process that a keeper has started: its standard input is the keeper's socket.
pub const KEPT: &str = "VNVME_KEPT";

static ALL: OnceLock<Kept> = OnceLock::new();

/// What a keeper keeps for this process.
#[derive(Debug)]
pub struct Kept {
    link: Link,
    facts: Facts,
    /// Something was kept when this process began.
    had_any: bool,
    descriptors: Mutex<BTreeMap<String, OwnedFd>>,
}

impl Kept {
    /// The way to the keeper.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// What became of the process before this one.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Takes what is kept under this name.
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        self.descriptors.lock().unpoisoned().remove(name)
    }

    /// Names of all that nobody has taken.
    pub fn names(&self) -> Vec<String> {
        self.descriptors
            .lock()
            .unpoisoned()
            .keys()
            .cloned()
            .collect()
    }
}

/// What is kept for this process, if a keeper is there.
pub fn kept() -> Option<&'static Kept> {
    ALL.get()
}

/// A keeper is there.
pub fn is_kept() -> bool {
    kept().is_some()
}

/// The keeper process's number.
pub fn pid() -> Option<u32> {
    match kept()?.link.keeping() {
        Keeping::Process(pid) => Some(pid),
        Keeping::Systemd => None,
    }
}

/// Another process has served before this one, and has not ended in order.
pub fn is_successor() -> bool {
    kept().is_some_and(|kept| kept.facts.restarts > 0 || kept.had_any)
}

/// First of all in `main`: takes what the keeper that has started this process keeps, and what a
/// service manager has opened for the keeper.
///
/// # Errors
/// A sentence for the user.
pub fn arrive() -> Result<Vec<(String, OwnedFd)>> {
    let given = inherit::take_named();
    if std::env::var_os(KEPT).is_none() {
        return Ok(given);
    }
    // Should the keeper be killed, this process ends as if it had been.
    set_parent_process_death_signal(Some(Signal::KILL)).context("prctl")?;
    let channel = std::io::stdin().as_fd().try_clone_to_owned();
    let arrival = Arrival::receive(channel.context("keeper")?).context("keeper")?;
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    ensure!(
        matches!(arrival.link.keeping(), Keeping::Process(keeper) if Some(keeper) == parent),
        "the keeper process has ended"
    );
    // Nobody else is to get the keeper's socket.
    let null = open("/dev/null", OFlags::RDONLY, Mode::empty()).context("/dev/null")?;
    rustix::stdio::dup2_stdin(null).context("standard input")?;
    let Arrival {
        link,
        kept,
        given,
        facts,
    } = arrival;
    let _ = ALL.set(Kept {
        link,
        facts,
        had_any: !kept.is_empty(),
        descriptors: Mutex::new(kept.into_iter().collect()),
    });
    Ok(given)
}
