//! A process that starts receiver processes, for a server that may not start any itself: one in a
//! sandbox, which it enters after this process was started.
//!
//! The spawner receives nothing from clients. The server sends a control socket for each receiver
//! process, and gets the process ID. A thread waits for the end of each child. A compromised server
//! gets no more processes from the spawner than [`MAX_CHILDREN`].

use crate::error::StartError;
use crate::message::{self, MESSAGE_LEN, Message, kind};
use crate::server::ServeError;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of receiver processes at a time. One serves; the remaining ones are ending, and
/// may hang.
const MAX_CHILDREN: usize = 16;

/// The server's handle of the spawner.
#[derive(Debug)]
pub struct Spawner {
    requests: OwnedFd,
}

/// Starts a process with a socket as its standard input. It has no further descriptor of this
/// process: neither output, which a reader may wait for, nor sockets and locks.
pub(crate) fn spawn(mut command: Command, input: OwnedFd) -> std::io::Result<Child> {
    command.stdin(Stdio::from(input));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.current_dir("/");
    command.spawn()
}

impl Spawner {
    /// Starts the process: `command` must call [`start_receivers`] with its standard input, and
    /// then end. It ends when this value is dropped.
    ///
    /// # Errors
    /// [`StartError`] when the process or its socket cannot be created.
    pub fn start(command: Command) -> Result<Spawner, StartError> {
        let (requests, theirs) = message::pair().map_err(StartError::Socket)?;
        spawn(command, theirs).map_err(StartError::Spawn)?;
        Ok(Spawner { requests })
    }

    /// Lets the spawner start a receiver process with this control socket. Returns the process ID.
    pub(crate) fn ask(&self, control: BorrowedFd<'_>) -> Result<u32, StartError> {
        let failed = |errno: Errno| StartError::Spawn(errno.into());
        let request = Message {
            kind: kind::START,
            value: 0,
            client: 0,
        };
        let fds = [control];
        message::send(
            self.requests.as_fd(),
            request,
            &[],
            &fds,
            SendFlags::empty(),
        )
        .map_err(failed)?;
        let Some((answer, _)) = next(self.requests.as_fd()).map_err(failed)? else {
            return Err(failed(Errno::PIPE));
        };
        match (answer.kind, i32::try_from(answer.value)) {
            (kind::STARTED, _) => Ok(answer.value),
            (_, Ok(errno @ 1..)) => Err(failed(Errno::from_raw_os_error(errno))),
            _ => Err(failed(Errno::PROTO)),
        }
    }
}

/// Waits for the next message; returns it with its first descriptor. `None` when the other end is
/// closed.
fn next(channel: BorrowedFd<'_>) -> Result<Option<(Message, Option<OwnedFd>)>, Errno> {
    loop {
        match message::receive::<MESSAGE_LEN>(channel) {
            Ok(incoming) => {
                return Ok(incoming.map(|it| (it.message, it.fds.into_iter().next())));
            }
            Err(Errno::AGAIN) => {}
            Err(errno) => return Err(errno),
        }
        match poll(
            &mut [PollFd::from_borrowed_fd(channel, PollFlags::IN)],
            None,
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Starts receiver processes for the server at the other end of `requests`, until that closes its
/// end. `command` returns a command that calls [`serve`](crate::serve) with its standard input.
///
/// # Errors
/// [`ServeError`] when a system call fails.
pub fn start_receivers(
    requests: BorrowedFd<'_>,
    command: impl Fn() -> Command,
) -> Result<(), ServeError> {
    let system = |call| move |errno| ServeError::System { call, errno };
    let living = Arc::new(AtomicUsize::new(0));
    while let Some((_, control)) = next(requests).map_err(system("recvmsg"))? {
        let started = match control {
            Some(_) if living.load(Ordering::Relaxed) >= MAX_CHILDREN => Err(Errno::AGAIN.into()),
            Some(control) => spawn(command(), control),
            // This process may not open a further descriptor.
            None => Err(Errno::MFILE.into()),
        };
        let (kind, value) = match &started {
            Ok(child) => (kind::STARTED, child.id()),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                (kind::FAILED, errno.unsigned_abs())
            }
        };
        if let Ok(mut child) = started {
            living.fetch_add(1, Ordering::Relaxed);
            let living = living.clone();
            // If no thread can be created, a zombie remains until this process ends.
            let waiting = std::thread::Builder::new().name("wait".into());
            let _ = waiting.spawn(move || {
                let _ = child.wait();
                living.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let answer = Message {
            kind,
            value,
            client: 0,
        };
        message::send(requests, answer, &[], &[], SendFlags::empty()).map_err(system("sendmsg"))?;
    }
    Ok(())
}
