//! Notifications to the service manager that started this process (sd_notify(3),
//! sd_watchdog_enabled(3)).

use crate::confine::Unconfined;
use crate::keep::KeeperSession;
use crate::serve::Serving;
use anyhow::{Context, Result};
use keeper::{Keeping, Link};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Environment variable with the path of the service manager's notification socket.
const NAME: &str = "NOTIFY_SOCKET";
/// Environment variables of systemd's watchdog: the interval in microseconds, and the ID of the
/// process that must send notifications.
const WATCHDOG: &str = "WATCHDOG_USEC";
const WATCHDOG_PROCESS: &str = "WATCHDOG_PID";
/// Number of watchdog notifications in each interval that the service manager expects one in.
const TIMES: u32 = 3;

/// Connection to the service manager, opened before the sandbox blocks access to paths.
pub struct ServiceManager {
    link: Arc<ServiceLink>,
    watchdog: Option<Watchdog>,
}

/// Handle to notify the service manager from any thread.
pub struct ServiceLink {
    way: Option<NotifyTransport>,
    phase: Mutex<Phase>,
}

/// Channel on which notifications for the service manager are sent.
enum NotifyTransport {
    Socket(UnixDatagram),
    /// The keeper process, which has started this one and forwards notifications.
    Keeper(Link),
}

/// Phase of the service that the service manager was last told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Serving,
    Ending,
}

/// Guard of a reload of the configuration; dropping it reports that the reload is done.
pub struct Reloading<'a>(&'a ServiceLink);

/// Times at which the service manager's watchdog is notified.
struct Watchdog {
    interval: Duration,
    next: Instant,
}

impl ServiceManager {
    /// Connects to the service manager that the environment names. A failure is logged; the manager
    /// notices missing notifications itself.
    pub fn from_environment(_outside: &Unconfined, keeper: &KeeperSession) -> Self {
        let keeper = keeper
            .link()
            .filter(|link| matches!(link.keeping(), Keeping::Process(_)));
        let way = match keeper {
            Some(link) => Some(NotifyTransport::Keeper(link.clone())),
            None => socket().map(NotifyTransport::Socket),
        };
        let text = |name| variable(name).and_then(|text| text.into_string().ok());
        let interval = interval(text(WATCHDOG).as_deref(), text(WATCHDOG_PROCESS).as_deref());
        let watchdog = interval.filter(|_| way.is_some()).map(|interval| {
            let next = Instant::now();
            Watchdog { interval, next }
        });
        let link = Arc::new(ServiceLink::new(way));
        Self { link, watchdog }
    }

    /// Returns the link by which other threads send notifications.
    pub fn link(&self) -> &Arc<ServiceLink> {
        &self.link
    }

    /// Tells the service manager that clients are served from now on.
    pub fn ready(&self, _: &Serving) {
        let mut phase = self.link.phase.lock().unpoisoned();
        *phase = Phase::Serving;
        self.link.tell("READY=1\n");
    }

    /// Tells the service manager that an orderly shutdown has begun.
    pub fn stopping(&self) {
        let mut phase = self.link.phase.lock().unpoisoned();
        *phase = Phase::Ending;
        self.link.tell("STOPPING=1\n");
    }

    /// Notifies the watchdog, if a notification is due and the process works. If all workers are
    /// stuck, none is sent.
    pub fn alive(&mut self, is_alive: impl FnOnce(Duration) -> bool) {
        let now = Instant::now();
        let Some(watchdog) = self.watchdog.as_mut().filter(|dog| now >= dog.next) else {
            return;
        };
        watchdog.next = now + watchdog.interval / TIMES;
        if is_alive(watchdog.interval) {
            self.link.tell("WATCHDOG=1\n");
        }
    }
}

impl ServiceLink {
    fn new(way: Option<NotifyTransport>) -> Self {
        let phase = Mutex::new(Phase::Starting);
        Self { way, phase }
    }

    /// Reports that the configuration is being reloaded; dropping the guard reports the end,
    /// whatever the result. Nothing is sent before clients are served, or after the shutdown has
    /// begun.
    pub fn reloading(&self) -> Reloading<'_> {
        // The time identifies a reload that the service manager has requested.
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.tell_serving(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\n"));
        Reloading(self)
    }

    fn tell_serving(&self, text: &str) {
        let phase = self.phase.lock().unpoisoned();
        if *phase == Phase::Serving {
            self.tell(text);
        }
    }

    fn tell(&self, text: &str) {
        let sent = match &self.way {
            Some(NotifyTransport::Socket(socket)) => socket.send(text.as_bytes()).map(drop),
            Some(NotifyTransport::Keeper(link)) => link.tell(text).map_err(Into::into),
            None => Ok(()),
        };
        if let Err(error) = sent {
            tracing::warn!(%error, "{NAME}");
        }
    }
}

impl Drop for Reloading<'_> {
    fn drop(&mut self) {
        self.0.tell_serving("READY=1\n");
    }
}

/// Returns the interval of the service manager's watchdog; `None` if it does not watch this
/// process.
fn interval(micros: Option<&str>, process: Option<&str>) -> Option<Duration> {
    let own = std::process::id().to_string();
    if process.is_some_and(|process| process != own) {
        return None;
    }
    let micros = micros?.parse().ok().filter(|micros| *micros > 0);
    micros.map(Duration::from_micros)
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|text: &OsString| !text.is_empty())
}

/// Returns a connection to the service manager that the environment names. `None` without one, or
/// if the connection fails, which is logged.
pub fn socket() -> Option<UnixDatagram> {
    let name = variable(NAME)?;
    match connect(&name) {
        Ok(socket) => Some(socket),
        Err(error) => {
            tracing::warn!(socket = ?name, error = format_args!("{error:#}"), "{NAME}");
            None
        }
    }
}

/// Connects to the service manager's socket, which is a path, or "@" and an abstract name.
fn connect(name: &OsStr) -> Result<UnixDatagram> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    };
    let socket = UnixDatagram::unbound().context("socket")?;
    socket
        .connect_addr(&address.context("address")?)
        .context("connect")?;
    socket.set_nonblocking(true).context("socket")?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchdog_of_own_process_only_is_obeyed() {
        let own = std::process::id().to_string();
        let second = Some(Duration::from_secs(1));
        for (micros, process, wanted) in [
            (Some("1000000"), None, second),
            (Some("1000000"), Some(&*own), second),
            (Some("1000000"), Some("1"), None),
            (Some("1000000"), Some("me"), None),
            (Some("0"), None, None),
            (Some("-5"), None, None),
            (Some("soon"), None, None),
            (None, None, None),
        ] {
            assert_eq!(interval(micros, process), wanted, "{micros:?} {process:?}");
        }
    }

    #[test]
    fn watchdog_is_notified_in_time_only_when_alive() {
        let (manager, socket) = UnixDatagram::pair().unwrap();
        manager.set_nonblocking(true).unwrap();
        let mut told = ServiceManager {
            link: Arc::new(ServiceLink::new(Some(NotifyTransport::Socket(socket)))),
            watchdog: Some(Watchdog {
                interval: Duration::from_secs(3600),
                next: Instant::now(),
            }),
        };
        let received = || {
            let mut text = [0; 64];
            let len = manager.recv(&mut text).ok()?;
            Some(String::from_utf8_lossy(&text[..len]).into_owned())
        };
        told.alive(|interval| interval == Duration::from_secs(3600));
        assert_eq!(received().as_deref(), Some("WATCHDOG=1\n"));
        told.alive(|_| panic!("it is not time yet"));
        assert_eq!(received(), None);
        told.watchdog.as_mut().unwrap().next = Instant::now();
        told.alive(|_| false);
        assert_eq!(received(), None, "it is not alive");
        // A reload is notified while clients are served.
        drop(told.link().reloading());
        assert_eq!(received(), None, "the start is not done");
        told.ready(&Serving(()));
        assert_eq!(received().as_deref(), Some("READY=1\n"));
        let reloading = told.link().reloading();
        let message = received().unwrap();
        assert!(message.starts_with("RELOADING=1\nMONOTONIC_USEC="));
        drop(reloading);
        assert_eq!(received().as_deref(), Some("READY=1\n"));
        let reloading = told.link().reloading();
        received().unwrap();
        told.stopping();
        assert_eq!(received().as_deref(), Some("STOPPING=1\n"));
        drop(reloading);
        assert_eq!(received(), None, "it ends");
    }
}
