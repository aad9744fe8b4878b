//! The serving process under a keeper: its helpers distinguish the end of the process from the end
//! of the service, and the process ends where it cannot continue.

use super::pool::{is_successor, is_systemd, kept};
use anyhow::{Context, Result};
use keeper::KeeperClient;
use receive::Receiver;
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use sync::readiness;

/// Prefix of the names of threads whose panic ends the process. Each has disks that no other thread
/// can serve, and the next process serves them again.
const ESSENTIAL: &str = "worker-";

static SERVES: AtomicBool = AtomicBool::new(false);

/// Whether this process removes the files of kept sockets when it ends. Set as soon as it serves,
/// or is asked to end; another process follows one that fails before.
static OWNS_SOCKETS: AtomicBool = AtomicBool::new(false);

/// Makes this process remove the files of kept sockets when it ends.
pub fn own_sockets() {
    OWNS_SOCKETS.store(true, Ordering::Release);
}

/// Returns the flag that [`own_sockets`] sets.
pub fn owns_sockets() -> &'static AtomicBool {
    &OWNS_SOCKETS
}

/// Returns whether another process continues with everything that is kept if this one fails now.
pub fn is_followed() -> bool {
    is_successor() && !OWNS_SOCKETS.load(Ordering::Acquire)
}

/// Prefix of the names of sockets that show a receiver process that there is a keeper.
const LIFE: &str = "vnvme.life-";

/// Returns whether the socket kept under this name still shows a receiver process of an earlier
/// process that there is a keeper. Without the socket, a receiver process that has not ended yet
/// would shut down its clients' sockets.
pub fn is_needed(name: &str, fd: Option<&OwnedFd>) -> bool {
    let Some(socket) = fd.filter(|_| name.starts_with(LIFE)) else {
        return false;
    };
    !readiness(socket, PollFlags::empty()).contains(PollFlags::HUP)
}

/// Makes the receiver process leave clients' sockets open when this process ends, as long as the
/// keeper is there. The keeper alone has one end of a socket pair, which shows that.
///
/// # Errors
/// There is no descriptor left.
pub fn tell_receiver(receiver: &Receiver) -> Result<()> {
    let Some(kept) = kept() else {
        return Ok(());
    };
    let mut keeper_client = KeeperClient::new(kept.link());
    // A keeper that is full has room for this one.
    for name in kept.names() {
        if name.starts_with(LIFE)
            && let Some(fd) = kept.take_if(&name, |fd| !is_needed(&name, Some(fd)))
        {
            let _ = keeper_client.remove(&name);
            drop(fd);
        }
    }
    let flags = SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (ours, theirs) = pair.context("socket pair")?;
    let name = format!("{LIFE}{}", std::process::id());
    match keeper_client.store(&name, theirs.as_fd()) {
        Ok(()) => receiver.keep(ours, owns_sockets()),
        // A process that does not begin would be the end of all disks.
        Err(error) => tracing::error!(
            %error,
            "no disk will outlive its process: the receiver process cannot be told"
        ),
    }
    Ok(())
}

/// Returns the time since the process before this one has ended, if there was one.
fn pause() -> Option<Duration> {
    let ended = kept()?.facts().ended_at?;
    let now = Duration::try_from(clock_gettime(ClockId::Monotonic)).ok()?;
    Some(now.saturating_sub(ended))
}

static LAST_PAUSE: OnceLock<Duration> = OnceLock::new();

/// Returns how long no client was served before this process, once clients are served again.
pub fn last_pause() -> Option<Duration> {
    LAST_PAUSE.get().copied()
}

/// Returns whether the process serves everything that it has to serve.
pub fn serves() -> bool {
    SERVES.load(Ordering::Acquire)
}

/// Records that clients are served, and logs how the previous process has ended.
pub fn say_served() {
    own_sockets();
    SERVES.store(true, Ordering::Release);
    if is_systemd() && is_successor() {
        tracing::warn!("the process that served has ended, and this one goes on");
    }
    let (Some(kept), Some(pause)) = (kept(), pause()) else {
        return;
    };
    let facts = kept.facts();
    let _ = LAST_PAUSE.set(pause);
    tracing::warn!(
        pause_ms = pause.as_secs_f64() * 1e3,
        restarts = facts.restarts,
        ended = facts.how,
        "the process that served has ended, and this one goes on"
    );
}

static LOST: AtomicBool = AtomicBool::new(false);

/// Logs once that the keeper and its stand-bys have ended.
pub fn look() {
    if kept().is_some_and(|kept| kept.link().is_lost()) && !LOST.swap(true, Ordering::Relaxed) {
        tracing::error!(
            "the keeper and its stand-bys have ended: no disk outlives this process; start the \
             daemon again when the guests allow it"
        );
    }
}

/// Returns whether the keeper and its stand-bys have ended.
pub fn has_lost_keeper() -> bool {
    LOST.load(Ordering::Relaxed)
}

/// Makes a panic end the whole process, so that the keeper starts the next one.
pub fn die_of_panics() {
    if kept().is_none() {
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
