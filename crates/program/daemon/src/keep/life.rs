//! The serving process under a keeper: its helpers distinguish the end of the process from the end
//! of the service, and the process ends where it cannot continue.

use super::session::KeeperSession;
use crate::serve::Serving;
use anyhow::{Context, Result};
use keeper::Link;
use receive::Receiver;
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use sync::readiness;

/// Prefix of the names of threads whose panic ends the process. Each has disks that no other thread
/// can serve, and the next process serves them again.
const ESSENTIAL: &str = "worker-";

/// Prefix of the names of sockets that show a receiver process that there is a keeper.
const LIFE: &str = "vnvme.life-";

/// Progress of the serving process, as far as its keeper and its helpers depend on it.
#[derive(Debug, Default)]
pub struct Life {
    /// Whether the process serves everything that it has to serve.
    serves: AtomicBool,
    /// Whether this process removes the files of kept sockets when it ends. Set as soon as it
    /// serves, or is asked to end; another process follows one that fails before.
    owns_sockets: Arc<AtomicBool>,
    last_pause: OnceLock<Duration>,
    /// Whether the end of the keeper and its stand-bys was logged.
    has_lost_keeper: AtomicBool,
}

/// Returns whether the socket kept under this name still shows a receiver process of an earlier
/// process that there is a keeper. Without the socket, a receiver process that has not ended yet
/// would shut down its clients' sockets.
pub fn is_needed(name: &str, fd: Option<&OwnedFd>) -> bool {
    let Some(socket) = fd.filter(|_| name.starts_with(LIFE)) else {
        return false;
    };
    !readiness(socket, PollFlags::empty()).contains(PollFlags::HUP)
}

impl KeeperSession {
    /// Makes this process remove the files of kept sockets when it ends.
    pub(crate) fn own_sockets(&self) {
        self.life.owns_sockets.store(true, Ordering::Release);
    }

    /// Returns the flag that [`KeeperSession::own_sockets`] sets.
    pub(crate) fn owns_sockets(&self) -> Arc<AtomicBool> {
        self.life.owns_sockets.clone()
    }

    /// Returns whether another process continues with everything that is kept if this one fails
    /// now.
    pub(crate) fn is_followed(&self) -> bool {
        self.is_successor() && !self.life.owns_sockets.load(Ordering::Acquire)
    }

    /// Makes the receiver process leave clients' sockets open when this process ends, as long as
    /// the keeper is there. The keeper alone has one end of a socket pair, which shows that.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub(crate) fn tell_receiver(&self, receiver: &Receiver) -> Result<()> {
        let Some(mut keeper_client) = self.client() else {
            return Ok(());
        };
        // A keeper that is full has room for this one.
        for name in self.names() {
            if !name.starts_with(LIFE) {
                continue;
            }
            match self.take(&name) {
                Some(fd) if is_needed(&name, Some(&fd)) => self.put_back(&name, fd),
                Some(_) => drop(keeper_client.remove(&name)),
                None => {}
            }
        }
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (ours, theirs) = pair.context("socket pair")?;
        let name = format!("{LIFE}{}", std::process::id());
        match keeper_client.store(&name, theirs.as_fd()) {
            Ok(()) => receiver.keep(ours, self.owns_sockets()),
            // A process that does not begin would be the end of all disks.
            Err(error) => tracing::error!(
                %error,
                "no disk will outlive its process: the receiver process cannot be told"
            ),
        }
        Ok(())
    }

    /// Returns the time since the process before this one has ended, if there was one.
    fn pause(&self) -> Option<Duration> {
        let ended = self.history().ended_at?;
        let now = Duration::try_from(clock_gettime(ClockId::Monotonic)).ok()?;
        Some(now.saturating_sub(ended))
    }

    /// Returns how long no client was served before this process, once clients are served again.
    pub(crate) fn last_pause(&self) -> Option<Duration> {
        self.life.last_pause.get().copied()
    }

    /// Returns whether the process serves everything that it has to serve.
    pub(crate) fn serves(&self) -> bool {
        self.life.serves.load(Ordering::Acquire)
    }

    /// Records that clients are served, and logs how the previous process has ended.
    pub(crate) fn say_served(&self, _: &Serving) {
        self.own_sockets();
        self.life.serves.store(true, Ordering::Release);
        if self.is_systemd() && self.is_successor() {
            tracing::warn!("the process that served has ended, and this one goes on");
        }
        let Some(pause) = self.pause() else {
            return;
        };
        let history = self.history();
        let _ = self.life.last_pause.set(pause);
        tracing::warn!(
            pause_ms = pause.as_secs_f64() * 1e3,
            restarts = history.restarts,
            ended = history.how,
            "the process that served has ended, and this one goes on"
        );
    }

    /// Logs once that the keeper and its stand-bys have ended.
    pub(crate) fn look(&self) {
        let has_lost_keeper = &self.life.has_lost_keeper;
        if self.link().is_some_and(Link::is_lost) && !has_lost_keeper.swap(true, Ordering::Relaxed)
        {
            tracing::error!(
                "the keeper and its stand-bys have ended: no disk outlives this process; start \
                 the daemon again when the guests allow it"
            );
        }
    }

    /// Returns whether the keeper and its stand-bys have ended.
    pub(crate) fn has_lost_keeper(&self) -> bool {
        self.life.has_lost_keeper.load(Ordering::Relaxed)
    }

    /// Makes a panic end the whole process, so that the keeper starts the next one.
    pub(crate) fn die_of_panics(&self) {
        if !self.is_kept() {
            return;
        }
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            before(panic);
            let thread = std::thread::current();
            if thread
                .name()
                .is_some_and(|name| name.starts_with(ESSENTIAL))
            {
                tracing::error!("{}: {panic}", thread.name().unwrap_or_default());
                std::process::abort();
            }
        }));
    }
}
