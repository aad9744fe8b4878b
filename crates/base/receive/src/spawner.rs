//! A process that starts receiver processes, for a server that may not start any itself: one in a
//! sandbox, which it enters after this process was started.
//!
//! The spawner receives nothing from clients. The server sends a control socket for each receiver
//! process, and gets the process ID. A thread waits for the end of each child. A compromised server
//! gets no more processes from the spawner than [`MAX_CHILDREN`].
//!
//! The program may define further requests ([`Spawner::request`]), each answered with a descriptor.
//! Each has a thread of its own, so that one that hangs in a file system delays no other.

use crate::error::StartError;
use crate::message::{self, Incoming, MAX_REQUEST, MESSAGE_LEN, Message, kind};
use crate::server::ServeError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of receiver processes at a time. One serves; the remaining ones are ending, and
/// may hang.
const MAX_CHILDREN: usize = 16;

/// Maximum number of requests that are carried out at a time.
const MAX_REQUESTS: usize = 16;

/// Time that the server waits for the answer to a request.
const REQUEST_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

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
        let answer = next(self.requests.as_fd(), None).map_err(failed)?;
        let answer = answer.ok_or(failed(Errno::PIPE))?.message;
        match answer.kind {
            kind::STARTED => Ok(answer.value),
            _ => Err(failed(failure(answer))),
        }
    }

    /// Has a request carried out that the program defines ([`start_receivers`]); returns the
    /// descriptor of the answer.
    ///
    /// # Errors
    /// The error of the request. `MSGSIZE` when `bytes` are longer than the path of a socket;
    /// `TIMEDOUT` when there is no answer within ten seconds.
    pub fn request(&self, value: u32, bytes: &[u8]) -> Result<OwnedFd, Errno> {
        if bytes.len() > MAX_REQUEST {
            return Err(Errno::MSGSIZE);
        }
        let (ours, theirs) = message::pair()?;
        let request = Message {
            kind: kind::REQUEST,
            value,
            client: 0,
        };
        let fds = [theirs.as_fd()];
        let flags = SendFlags::empty();
        message::send(self.requests.as_fd(), request, bytes, &fds, flags)?;
        drop(theirs);
        let answer = next(ours.as_fd(), Some(&REQUEST_TIMEOUT))?.ok_or(Errno::PIPE)?;
        match (answer.message.kind, answer.fds.into_iter().next()) {
            (kind::FULFILLED, Some(descriptor)) => Ok(descriptor),
            _ => Err(failure(answer.message)),
        }
    }
}

/// Returns the error number of a failed request.
fn failure(answer: Message) -> Errno {
    match i32::try_from(answer.value) {
        Ok(errno @ 1..) => Errno::from_raw_os_error(errno),
        _ => Errno::PROTO,
    }
}

/// Waits for the next message. `None` when the other end is closed.
fn next(channel: BorrowedFd<'_>, limit: Option<&Timespec>) -> Result<Option<Incoming>, Errno> {
    loop {
        match message::receive::<{ MESSAGE_LEN + MAX_REQUEST }>(channel) {
            Err(Errno::AGAIN) => {}
            received => return received,
        }
        let mut fds = [PollFd::from_borrowed_fd(channel, PollFlags::IN)];
        match poll(&mut fds, limit) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Carries a request out on a thread of its own, and sends the answer.
fn carry_out<R>(request: Incoming, running: &Arc<AtomicUsize>, carry_out: &Arc<R>)
where
    R: Fn(u32, &[u8]) -> Result<OwnedFd, Errno> + Send + Sync + 'static,
{
    let Incoming {
        message,
        bytes,
        fds,
        ..
    } = request;
    // Without a socket for the answer there is nobody to answer.
    let Some(answer_to) = fds.into_iter().next() else {
        return;
    };
    if running.load(Ordering::Relaxed) >= MAX_REQUESTS {
        answer(answer_to.as_fd(), &Err(Errno::AGAIN));
        return;
    }
    running.fetch_add(1, Ordering::Relaxed);
    let (counted, carry_out) = (running.clone(), carry_out.clone());
    let thread = std::thread::Builder::new().name("request".into());
    let thread = thread.spawn(move || {
        answer(answer_to.as_fd(), &carry_out(message.value, &bytes));
        counted.fetch_sub(1, Ordering::Relaxed);
    });
    // The closed socket is the answer.
    if thread.is_err() {
        running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sends the answer to a request. The server may have gone.
fn answer(to: BorrowedFd<'_>, result: &Result<OwnedFd, Errno>) {
    let (kind, value, fds) = match result {
        Ok(descriptor) => (kind::FULFILLED, 0, vec![descriptor.as_fd()]),
        Err(errno) => (kind::FAILED, errno.raw_os_error().unsigned_abs(), vec![]),
    };
    let answer = Message {
        kind,
        value,
        client: 0,
    };
    let _ = message::send(to, answer, &[], &fds, SendFlags::DONTWAIT);
}

/// Starts receiver processes for the server at the other end of `requests`, until that closes its
/// end. `command` returns a command that calls [`serve`](crate::serve) with its standard input.
/// `request` carries out a request that the program defines, by value and bytes (untrusted).
///
/// # Errors
/// [`ServeError`] when a system call fails.
pub fn start_receivers(
    requests: BorrowedFd<'_>,
    command: impl Fn() -> Command,
    request: impl Fn(u32, &[u8]) -> Result<OwnedFd, Errno> + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let system = |call| move |errno| ServeError::System { call, errno };
    let (living, running) = (Arc::new(AtomicUsize::new(0)), Arc::default());
    let request = Arc::new(request);
    while let Some(incoming) = next(requests, None).map_err(system("recvmsg"))? {
        if incoming.message.kind == kind::REQUEST {
            carry_out(incoming, &running, &request);
            continue;
        }
        let started = match incoming.fds.into_iter().next() {
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
