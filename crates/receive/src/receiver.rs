//! The receiver process, as the server's threads see it.

use crate::error::StartError;
use crate::kind::Wanted;
use crate::message::{self, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
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
    command: Box<dyn Fn() -> Command + Send + Sync>,
    child: Mutex<Child>,
    control: Mutex<Arc<OwnedFd>>,
    restarting: AtomicBool,
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

/// Standard input is its control socket. It has no other descriptor of this process's: neither
/// output, which somebody may wait for, nor sockets and locks.
fn spawn(command: &dyn Fn() -> Command) -> Result<(Child, Arc<OwnedFd>), StartError> {
    let (ours, theirs) = message::pair().map_err(StartError::Socket)?;
    let mut command = command();
    command.stdin(Stdio::from(theirs));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.current_dir("/");
    let child = command.spawn().map_err(StartError::Spawn)?;
    Ok((child, Arc::new(ours)))
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
        let (child, control) = spawn(&command)?;
        Ok(Receiver(Arc::new(Shared {
            command: Box::new(command),
            child: Mutex::new(child),
            control: Mutex::new(control),
            restarting: AtomicBool::new(false),
        })))
    }

    /// Its number, for those who look at it from outside.
    pub fn id(&self) -> u32 {
        self.0.child.lock().unpoisoned().id()
    }

    /// A new door, to which the receiver process has the other end. Never waits.
    pub(crate) fn open_door(
        &self,
        listener: BorrowedFd<'_>,
        wanted: Wanted,
    ) -> Result<OwnedFd, Errno> {
        let control = self.0.control.lock().unpoisoned().clone();
        let (ours, theirs) = message::pair()?;
        let message = Message {
            kind: message::kind::DOOR,
            value: wanted.to_value(),
            client: 0,
        };
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
        let mut child = self.child.lock().unpoisoned();
        let first = !std::mem::replace(said, true);
        match child.try_wait() {
            Ok(None) => return !self.is_hung_up(),
            Ok(Some(status)) if first => {
                let status = status.to_string();
                tracing::error!(
                    status,
                    "the process that receives descriptors has ended; starting it again"
                );
            }
            _ => {}
        }
        match spawn(&*self.command) {
            Ok((new, control)) => {
                *child = new;
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

    /// It is about to end.
    fn is_hung_up(&self) -> bool {
        let control = self.control.lock().unpoisoned().clone();
        let mut fds = [PollFd::new(&control, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).is_ok()
            && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
    }
}
