//! The server's handle of the receiver process.

use crate::error::StartError;
use crate::kind::AcceptedDescriptors;
use crate::message::{self, Message};
use crate::spawner::{Spawner, spawn};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::socket_peercred;
use rustix::process::getpid;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use sync::{Unpoisoned, readiness};

/// Pause between the end of a receiver process and the start of the next one.
const RESTART_DELAY: Duration = Duration::from_millis(100);

/// Minimum time between two receiver processes that replace one which does not answer: on a busy
/// machine none of them may answer for a while.
const REPLACED_REST: Duration = Duration::from_secs(1);

/// Maximum number of replaced receiver processes that have not ended.
const MAX_REPLACED: usize = 4;

/// Handle of the receiver process. Clones refer to the same process, which ends when the last of
/// them is dropped.
#[derive(Clone)]
pub struct Receiver(Arc<ReceiverState>);

struct ReceiverState {
    start: Start,
    running: Mutex<ReceiverProcess>,
    control: Mutex<Control>,
    /// Processes that were replaced, and have not ended. Locked while a process is started.
    replaced: Mutex<Vec<(ReceiverProcess, Control)>>,
    /// Time of the last replacement.
    last_replaced: Mutex<Option<Instant>>,
    /// Socket passed to [`Receiver::keep`].
    kept: Mutex<Option<Arc<OwnedFd>>>,
    /// Flag passed to [`Receiver::keep`].
    is_owner: OnceLock<Arc<AtomicBool>>,
    restarting: AtomicBool,
}

/// Socket to the present receiver process.
#[derive(Clone)]
struct Control {
    /// Number of the process.
    generation: u64,
    socket: Arc<OwnedFd>,
}

/// Method of starting receiver processes.
enum Start {
    /// This process starts them, with the command that the function returns.
    Here(Box<dyn Fn() -> Command + Send + Sync>),
    By(Arc<Spawner>),
}

/// Receiver process that runs at present.
enum ReceiverProcess {
    /// Child process of this process.
    Child(Child),
    /// Child process of the spawner, by its process ID.
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
        let (running, socket) = start.start()?;
        Ok(Receiver(Arc::new(ReceiverState {
            start,
            running: Mutex::new(running),
            control: Mutex::new(Control {
                generation: 0,
                socket,
            }),
            replaced: Mutex::default(),
            last_replaced: Mutex::default(),
            kept: Mutex::default(),
            is_owner: OnceLock::new(),
            restarting: AtomicBool::new(false),
        })))
    }

    /// Returns the process ID of the receiver process.
    pub fn id(&self) -> u32 {
        self.0.running.lock().unpoisoned().id()
    }

    /// Declares that another process keeps the clients' sockets for the next server. When this
    /// process ends, they are not shut down unless `kept` is hung up. Only that other process has
    /// the other end of `kept`.
    ///
    /// The end of an [`Intake`](crate::Intake) shuts its sockets down only once `is_owner` is set:
    /// a process that fails before it serves leaves them to the next server.
    pub fn keep(&self, kept: OwnedFd, is_owner: Arc<AtomicBool>) {
        let _ = self.0.is_owner.set(is_owner);
        let kept = Arc::new(kept);
        *self.0.kept.lock().unpoisoned() = Some(kept.clone());
        let control = self.0.control.lock().unpoisoned().clone();
        self.0.say_kept(&control.socket, &kept);
    }

    /// Returns the flag that was passed to [`Receiver::keep`].
    pub(crate) fn is_owner(&self) -> Option<Arc<AtomicBool>> {
        self.0.is_owner.get().cloned()
    }

    /// Tells the receiver process that this process ends on purpose, which disconnects the clients.
    pub fn shut(&self) {
        if self.0.kept.lock().unpoisoned().take().is_some() {
            let control = self.0.control.lock().unpoisoned().clone();
            let message = Message::plain(message::kind::SHUT);
            let _ = message::send(
                control.socket.as_fd(),
                message,
                &[],
                &[],
                SendFlags::DONTWAIT,
            );
        }
    }

    /// Opens a new listener link, with its other end in the receiver process. Returns the number of
    /// that process, too. Never waits.
    pub(crate) fn open_listener(
        &self,
        listener: BorrowedFd<'_>,
        wanted: AcceptedDescriptors,
        ends: bool,
    ) -> Result<(u64, OwnedFd), Errno> {
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
        let sent = message::send(
            control.socket.as_fd(),
            message,
            &[],
            &fds,
            SendFlags::DONTWAIT,
        );
        if let Err(Errno::PIPE | Errno::CONNRESET) = sent {
            self.restart();
        }
        sent.map(|()| (control.generation, ours))
    }

    /// Restarts an ended process, on a thread of its own; concurrent calls restart it once.
    pub(crate) fn restart(&self) {
        self.begin(|shared, said| shared.start_again(said));
    }

    /// Starts a process beside the one of this generation, which does not answer, on a thread of
    /// its own. Returns whether there is a later one. Never waits.
    pub(crate) fn replace(&self, generation: u64) -> bool {
        if self.0.control.lock().unpoisoned().generation > generation {
            return true;
        }
        let mut last = self.0.last_replaced.lock().unpoisoned();
        if last.is_some_and(|last| last.elapsed() < REPLACED_REST) {
            return false;
        }
        *last = Some(Instant::now());
        drop(last);
        self.begin(move |shared, _| {
            shared.start_beside(generation);
            true
        });
        false
    }

    /// Calls `start` on a thread of its own until it returns `true`, unless such a thread runs.
    fn begin(&self, mut start: impl FnMut(&ReceiverState, &mut bool) -> bool + Send + 'static) {
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
                    if start(&shared, &mut said) {
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
        let first = !std::mem::replace(said, true);
        let control = self.control.lock().unpoisoned().clone();
        let status = match &mut *self.running.lock().unpoisoned() {
            ReceiverProcess::Child(child) => match child.try_wait() {
                Ok(None) => return !is_hung_up(&control.socket),
                Ok(Some(status)) => Some(status.to_string()),
                Err(_) => None,
            },
            ReceiverProcess::Other(_) if !is_hung_up(&control.socket) => return true,
            ReceiverProcess::Other(_) => None,
        };
        if first {
            tracing::error!(
                status,
                "the process that receives descriptors has ended; starting it again"
            );
        }
        match self.start_next(|_| ()) {
            Ok(_) => true,
            Err(error) => {
                if first {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "no descriptors can be received; trying again");
                }
                false
            }
        }
    }

    /// Starts a process beside one that does not answer, which ends when it runs again.
    fn start_beside(&self, generation: u64) {
        let mut replaced = self.replaced.lock().unpoisoned();
        replaced.retain_mut(|(process, control)| {
            let ended = is_hung_up(&control.socket);
            if let ReceiverProcess::Child(child) = process {
                let _ = child.try_wait();
            }
            !ended
        });
        if self.control.lock().unpoisoned().generation != generation
            || replaced.len() >= MAX_REPLACED
        {
            return;
        }
        // Sent before any link is closed, which the process would take for the server's end.
        let retire = |before: &Control| {
            let message = Message::plain(message::kind::RETIRE);
            let socket = before.socket.as_fd();
            let _ = message::send(socket, message, &[], &[], SendFlags::DONTWAIT);
        };
        match self.start_next(retire) {
            Ok((process, control)) => {
                let id = process.id();
                tracing::warn!(
                    process = id,
                    "the process that receives descriptors does not answer; another one is started"
                );
                replaced.push((process, control));
            }
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, "no other process that receives descriptors");
            }
        }
    }

    /// Starts the next process. Calls `leave` with the one before, and returns that.
    fn start_next(
        &self,
        leave: impl Fn(&Control),
    ) -> Result<(ReceiverProcess, Control), StartError> {
        let (process, socket) = self.start.start()?;
        if let Some(kept) = self.kept.lock().unpoisoned().clone() {
            self.say_kept(&socket, &kept);
        }
        let before = std::mem::replace(&mut *self.running.lock().unpoisoned(), process);
        let mut control = self.control.lock().unpoisoned();
        leave(&control);
        let generation = control.generation + 1;
        let next = Control { generation, socket };
        Ok((before, std::mem::replace(&mut *control, next)))
    }

    /// Sent first, while there is room in the channel.
    fn say_kept(&self, control: &OwnedFd, kept: &OwnedFd) {
        let message = Message::plain(message::kind::KEPT);
        let fds = [kept.as_fd()];
        let _ = message::send(control.as_fd(), message, &[], &fds, SendFlags::DONTWAIT);
    }
}

/// Returns whether the process at the other end is about to end.
fn is_hung_up(control: &OwnedFd) -> bool {
    readiness(control, PollFlags::empty()).contains(PollFlags::HUP)
}
