//! The server's handle of the receiver process.

use crate::error::StartError;
use crate::kind::AcceptedDescriptors;
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

/// Pause between the end of a receiver process and the start of the next.
const RESTART_DELAY: Duration = Duration::from_millis(100);

/// Handle of the receiver process. Clones refer to the same process, which ends when the last of
/// them is dropped.
#[derive(Clone)]
pub struct Receiver(Arc<ReceiverState>);

struct ReceiverState {
    start: Start,
    running: Mutex<ReceiverProcess>,
    control: Mutex<Arc<OwnedFd>>,
    /// Socket passed to [`Receiver::keep`].
    kept: Mutex<Option<Arc<OwnedFd>>>,
    restarting: AtomicBool,
}

/// Method of starting receiver processes.
enum Start {
    /// Start by this process.
    Here(Box<dyn Fn() -> Command + Send + Sync>),
    By(Arc<Spawner>),
}

/// The present receiver process.
enum ReceiverProcess {
    /// A child of this process.
    Child(Child),
    /// A child of the spawner, by its process ID.
    Other(u32),
}

impl ReceiverProcess {
    fn id(&self) -> u32 {
        match self {
            ReceiverProcess::Child(child) => child.id(),
            ReceiverProcess::Other(id) => *id,
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

impl Start {
    fn start(&self) -> Result<(ReceiverProcess, Arc<OwnedFd>), StartError> {
        let (ours, theirs) = message::pair().map_err(StartError::Socket)?;
        let running = match self {
            Start::Here(command) => {
                ReceiverProcess::Child(spawn(command(), theirs).map_err(StartError::Spawn)?)
            }
            Start::By(spawner) => ReceiverProcess::Other(spawner.ask(theirs.as_fd())?),
        };
        Ok((running, Arc::new(ours)))
    }
}

impl Receiver {
    /// Starts the process. `command` returns a command that calls [`serve`](crate::serve) with its
    /// standard input, and then ends. It is called again if the process ends early.
    ///
    /// # Errors
    /// [`StartError`] when the process or its socket cannot be created.
    pub fn start(
        command: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Result<Receiver, StartError> {
        Self::new(Start::Here(Box::new(command)))
    }

    /// Has the process started, and restarted, by another one.
    ///
    /// # Errors
    /// [`StartError`] when the process or its socket cannot be created.
    pub fn start_by(spawner: Arc<Spawner>) -> Result<Receiver, StartError> {
        Self::new(Start::By(spawner))
    }

    fn new(start: Start) -> Result<Receiver, StartError> {
        let (running, control) = start.start()?;
        Ok(Receiver(Arc::new(ReceiverState {
            start,
            running: Mutex::new(running),
            control: Mutex::new(control),
            kept: Mutex::default(),
            restarting: AtomicBool::new(false),
        })))
    }

    /// Returns the process ID, for observers.
    pub fn id(&self) -> u32 {
        self.0.running.lock().unpoisoned().id()
    }

    /// Declares that another process keeps the clients' sockets for the next server. When this
    /// process ends, they are not shut down unless `kept` is hung up. Only that other process has
    /// the other end of `kept`.
    pub fn keep(&self, kept: OwnedFd) {
        let kept = Arc::new(kept);
        *self.0.kept.lock().unpoisoned() = Some(kept.clone());
        let control = self.0.control.lock().unpoisoned().clone();
        self.0.say_kept(&control, &kept);
    }

    /// Announces an intended end of this process, which ends the clients' connections.
    pub fn shut(&self) {
        if self.0.kept.lock().unpoisoned().take().is_some() {
            let control = self.0.control.lock().unpoisoned().clone();
            let message = Message::plain(message::kind::SHUT);
            let _ = message::send(control.as_fd(), message, &[], &[], SendFlags::DONTWAIT);
        }
    }

    /// Opens a new listener link, with its other end in the receiver process. Never waits.
    pub(crate) fn open_listener(
        &self,
        listener: BorrowedFd<'_>,
        wanted: AcceptedDescriptors,
        ends: bool,
    ) -> Result<OwnedFd, Errno> {
        let control = self.0.control.lock().unpoisoned().clone();
        let (ours, theirs) = message::pair()?;
        let message = Message {
            kind: message::kind::LISTENER,
            value: wanted.to_value() | if ends { message::ENDS } else { 0 },
            client: 0,
        };
        // The receiver process shuts the listening socket down at the end. A socket of another
        // process stays: the service manager has it, too.
        let own = socket_peercred(listener).is_ok_and(|maker| maker.pid == getpid());
        let listener = if own { listener } else { theirs.as_fd() };
        let fds = [theirs.as_fd(), listener];
        let sent = message::send(control.as_fd(), message, &[], &fds, SendFlags::DONTWAIT);
        if let Err(Errno::PIPE | Errno::CONNRESET) = sent {
            self.restart();
        }
        sent.map(|()| ours)
    }

    /// Restarts an ended process, on a thread of its own; concurrent calls restart it once.
    pub(crate) fn restart(&self) {
        if self.0.restarting.swap(true, Ordering::AcqRel) {
            return;
        }
        // The thread, which retries, must not keep the receiver alive.
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
                    std::thread::sleep(RESTART_DELAY);
                }
            });
        if started.is_err() {
            self.0.restarting.store(false, Ordering::Release);
        }
    }
}

impl ReceiverState {
    /// Returns `false` if the start must be retried; an error is logged once.
    fn start_again(&self, said: &mut bool) -> bool {
        let mut running = self.running.lock().unpoisoned();
        let first = !std::mem::replace(said, true);
        let status = match &mut *running {
            ReceiverProcess::Child(child) => match child.try_wait() {
                Ok(None) => return !self.is_hung_up(),
                Ok(Some(status)) => Some(status.to_string()),
                Err(_) => None,
            },
            ReceiverProcess::Other(_) if !self.is_hung_up() => return true,
            ReceiverProcess::Other(_) => None,
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

    /// Sent first, while there is room in the channel.
    fn say_kept(&self, control: &OwnedFd, kept: &OwnedFd) {
        let message = Message::plain(message::kind::KEPT);
        let fds = [kept.as_fd()];
        let _ = message::send(control.as_fd(), message, &[], &fds, SendFlags::DONTWAIT);
    }

    /// Returns whether the process is about to end.
    fn is_hung_up(&self) -> bool {
        let control = self.control.lock().unpoisoned().clone();
        let mut fds = [PollFd::new(&control, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).is_ok()
            && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
    }
}
