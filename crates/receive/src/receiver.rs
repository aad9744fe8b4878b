//! The receiver process, as the server's threads see it.

use crate::error::StartError;
use crate::kind::Wanted;
use crate::message::{self, Message};
use crate::spawner::{Spawner, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::socket_peercred;
use rustix::process::getpid;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;

/// Between the end of a receiver process and the start of the next.
const PAUSE: Duration = Duration::from_millis(100);

/// The receiver process. Clones are the same; it ends when the last of them has gone.
#[derive(Clone)]
pub struct Receiver(Arc<Shared>);

struct Shared {
    start: Start,
    running: Mutex<Running>,
    control: Mutex<Arc<OwnedFd>>,
    /// See [`Receiver::keep`].
    kept: Mutex<Option<Arc<OwnedFd>>>,
    restarting: AtomicBool,
}

/// How receiver processes are started.
enum Start {
    /// By this process.
    Here(Box<dyn Fn() -> Command + Send + Sync>),
    By(Spawner),
}

/// The receiver process of now.
enum Running {
    /// A child of this process.
    Child(Child),
    /// The spawner's child, by its number.
    Other(u32),
}

impl Running {
    fn id(&self) -> u32 {
        match self {
            Running::Child(child) => child.id(),
            Running::Other(id) => *id,
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

impl Start {
    fn start(&self) -> Result<(Running, Arc<OwnedFd>), StartError> {
        let (ours, theirs) = message::pair().map_err(StartError::Socket)?;
        let running = match self {
            Start::Here(command) => {
                Running::Child(spawn(command(), theirs).map_err(StartError::Spawn)?)
            }
            Start::By(spawner) => Running::Other(spawner.ask(theirs.as_fd())?),
        };
        Ok((running, Arc::new(ours)))
    }
}

impl Receiver {
    /// Starts the process. `command` makes a command that calls [`serve`](crate::serve) with its
    /// standard input, and ends after that; it is called again if the process ends before.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        command: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Result<Receiver, StartError> {
        Self::new(Start::Here(Box::new(command)))
    }

    /// Has the process started, and started again, by another one.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start_by(spawner: Spawner) -> Result<Receiver, StartError> {
        Self::new(Start::By(spawner))
    }

    fn new(start: Start) -> Result<Receiver, StartError> {
        let (running, control) = start.start()?;
        Ok(Receiver(Arc::new(Shared {
            start,
            running: Mutex::new(running),
            control: Mutex::new(control),
            kept: Mutex::default(),
            restarting: AtomicBool::new(false),
        })))
    }

    /// Its number, for those who look at it from outside.
    pub fn id(&self) -> u32 {
        self.0.running.lock().unpoisoned().id()
    }

    /// The clients' sockets are kept by another process, for the server that follows this one: when
    /// this one ends, they are not shut down, as long as `kept` is not hung up. The other end of it
    /// is the other process's alone.
    pub fn keep(&self, kept: OwnedFd) {
        let kept = Arc::new(kept);
        *self.0.kept.lock().unpoisoned() = Some(kept.clone());
        let control = self.0.control.lock().unpoisoned().clone();
        self.0.say_kept(&control, &kept);
    }

    /// This process ends because it is to, and the clients' connections with it.
    pub fn shut(&self) {
        if self.0.kept.lock().unpoisoned().take().is_some() {
            let control = self.0.control.lock().unpoisoned().clone();
            let message = Message::plain(message::kind::SHUT);
            let _ = message::send(control.as_fd(), message, &[], &[], SendFlags::DONTWAIT);
        }
    }

    /// A new door, to which the receiver process has the other end. Never waits.
    pub(crate) fn open_door(
        &self,
        listener: BorrowedFd<'_>,
        wanted: Wanted,
        ends: bool,
    ) -> Result<OwnedFd, Errno> {
        let control = self.0.control.lock().unpoisoned().clone();
        let (ours, theirs) = message::pair()?;
        let message = Message {
            kind: message::kind::DOOR,
            value: wanted.to_value() | if ends { message::ENDS } else { 0 },
            client: 0,
        };
        // In the end that process shuts the listening socket down. Another's stays: the service
        // manager has it, too.
        let own = socket_peercred(listener).is_ok_and(|maker| maker.pid == getpid());
        let listener = if own { listener } else { theirs.as_fd() };
        let fds = [theirs.as_fd(), listener];
        let sent = message::send(control.as_fd(), message, &[], &fds, SendFlags::DONTWAIT);
        if let Err(Errno::PIPE | Errno::CONNRESET) = sent {
            self.restart();
        }
        sent.map(|()| ours)
    }

    /// The process has ended: starts it again, on a thread of its own, once however many ask.
    pub(crate) fn restart(&self) {
        if self.0.restarting.swap(true, Ordering::AcqRel) {
            return;
        }
        // Not to be kept alive by a thread that tries again and again.
        let shared = Arc::downgrade(&self.0);
        let started = std::thread::Builder::new()
            .name("receiver".into())
            .spawn(move || {
                let mut said = false;
                loop {
                    let Some(shared) = shared.upgrade() else {
                        return;
                    };
                    if shared.start_again(&mut said) {
                        shared.restarting.store(false, Ordering::Release);
                        return;
                    }
                    drop(shared);
                    std::thread::sleep(PAUSE);
                }
            });
        if started.is_err() {
            self.0.restarting.store(false, Ordering::Release);
        }
    }
}

impl Shared {
    /// `false` if that is to be tried again; what is wrong is said once.
    fn start_again(&self, said: &mut bool) -> bool {
        let mut running = self.running.lock().unpoisoned();
        let first = !std::mem::replace(said, true);
        let status = match &mut *running {
            Running::Child(child) => match child.try_wait() {
                Ok(None) => return !self.is_hung_up(),
                Ok(Some(status)) => Some(status.to_string()),
                Err(_) => None,
            },
            Running::Other(_) if !self.is_hung_up() => return true,
            Running::Other(_) => None,
        };
        if first {
            tracing::error!(
                status,
                "the process that receives descriptors has ended; starting it again"
            );
        }
        match self.start.start() {
            Ok((new, control)) => {
                *running = new;
                if let Some(kept) = self.kept.lock().unpoisoned().clone() {
                    self.say_kept(&control, &kept);
                }
                *self.control.lock().unpoisoned() = control;
                true
            }
            Err(error) => {
                if first {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "no descriptors can be received; trying again");
                }
                false
            }
        }
    }

    /// First of all: there is room for it.
    fn say_kept(&self, control: &OwnedFd, kept: &OwnedFd) {
        let message = Message::plain(message::kind::KEPT);
        let fds = [kept.as_fd()];
        let _ = message::send(control.as_fd(), message, &[], &fds, SendFlags::DONTWAIT);
    }

    /// It is about to end.
    fn is_hung_up(&self) -> bool {
        let control = self.control.lock().unpoisoned().clone();
        let mut fds = [PollFd::new(&control, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).is_ok()
            && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
    }
}
