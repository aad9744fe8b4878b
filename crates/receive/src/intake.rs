//! Reading of the clients of one listening socket.

use crate::door::Door;
use crate::kind::Wanted;
use crate::plain::PlainSocket;
use crate::receiver::Receiver;
use crate::socket::Socket;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown, sockopt};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Maximum number of clients of one listening socket that may be leaving at the same time: the
/// receiver process has not closed their sockets yet. Each may hang there with a thread and its
/// descriptors.
const MAX_LEAVING: usize = 8;

/// Maximum number of leaving clients of a protocol without descriptors. It serves many clients at a
/// time, and a client that sends descriptors all the same must not block the remaining ones.
const MAX_LEAVING_PLAIN: usize = 64;

/// Pause before the receiver process is looked for again after its end.
const RETRY: Duration = Duration::from_millis(100);

/// Reader of the clients of one listening socket: in place, or by the receiver process.
///
/// With the receiver process, its owner waits for [`Intake::fd`] to become readable, calls
/// [`Intake::ready`] then, and reads from the client's socket if that [waits](Socket::is_waiting).
#[derive(Debug)]
pub struct Intake(Way);

#[derive(Debug)]
enum Way {
    InPlace { max_fds: usize },
    Receiver(Process),
}

#[derive(Debug)]
struct Process {
    receiver: Receiver,
    max_leaving: usize,
    /// See [`Intake::ending_with_process`].
    ends: bool,
    door: Arc<Mutex<Door>>,
    channel: Option<Arc<OwnedFd>>,
    /// Time of the next attempt to reach the receiver process.
    retry: Option<Instant>,
}

impl Intake {
    /// Creates a reader for trusted clients: see [`Socket::in_place`].
    pub fn in_place(max_fds: usize) -> Intake {
        Intake(Way::InPlace { max_fds })
    }

    /// Creates a reader for untrusted clients. [Connect](Intake::connect) it before the first
    /// client is accepted.
    pub fn new(receiver: &Receiver, wanted: Wanted) -> Intake {
        Intake(Way::Receiver(Process {
            receiver: receiver.clone(),
            max_leaving: match wanted.max_fds {
                0 => MAX_LEAVING_PLAIN,
                _ => MAX_LEAVING,
            },
            ends: false,
            door: Arc::new(Mutex::new(Door::new(wanted))),
            channel: None,
            retry: None,
        }))
    }

    /// Marks clients that reconnect after the end of the process. The receiver process then shuts
    /// their sockets down, even if sockets of other doors are [kept](crate::Receiver::keep).
    #[must_use]
    pub fn ending_with_process(mut self) -> Self {
        if let Way::Receiver(process) = &mut self.0 {
            process.ends = true;
        }
        self
    }

    /// Gives the receiver process a duplicate of the listening socket, and the present clients'
    /// sockets. When this process has ended, it shuts them down; but not a listening socket that
    /// another process created and may continue to use. To be called first, and when
    /// [`Intake::deadline`] has passed. Returns `true` if [`Intake::fd`] has changed, and must be
    /// watched.
    ///
    /// # Errors
    /// The kernel's error when the receiver process has not started or restarted yet, or no
    /// descriptor is left. The next attempt is due at the deadline.
    pub fn connect(&mut self, listener: BorrowedFd<'_>) -> Result<bool, Errno> {
        let Way::Receiver(process) = &mut self.0 else {
            return Ok(false);
        };
        if process.channel.is_some() {
            return Ok(false);
        }
        let mut door = process.door.lock().unpoisoned();
        process.retry = Some(Instant::now() + RETRY);
        let opened = process
            .receiver
            .open_door(listener, door.wanted(), process.ends);
        let channel = Arc::new(opened?);
        process.retry = None;
        process.channel = Some(channel.clone());
        door.open(channel);
        Ok(true)
    }

    /// Returns the descriptor that becomes readable when [`Intake::ready`] must be called; `None`
    /// while there is nothing to wait for.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Way::Receiver(process) => process.channel.as_ref().map(|channel| channel.as_fd()),
            Way::InPlace { .. } => None,
        }
    }

    /// Handles the receiver process's messages: answers to waiting clients, and closed sockets.
    /// When the process has ended, [`Intake::fd`] is closed, and [`Intake::connect`] is due.
    pub fn ready(&mut self) {
        if let Way::Receiver(process) = &mut self.0 {
            let mut door = process.door.lock().unpoisoned();
            if !door.dispatch() || !door.is_open() {
                process.channel = None;
                process.retry = Some(Instant::now());
                process.receiver.restart();
            }
        }
    }

    /// Returns when [`Intake::connect`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.0 {
            Way::Receiver(process) => process.retry,
            Way::InPlace { .. } => None,
        }
    }

    /// Returns whether too many disconnected clients of the listening socket have descriptors that
    /// cannot be closed. No further one may be accepted before [`Intake::fd`] becomes readable.
    pub fn is_crowded(&self) -> bool {
        match &self.0 {
            Way::Receiver(process) => {
                process.door.lock().unpoisoned().leaving() >= process.max_leaving
            }
            Way::InPlace { .. } => false,
        }
    }

    /// Wraps the socket of a client to be served. With the receiver process: one at a time.
    pub fn admit(&mut self, socket: OwnedFd) -> Socket {
        match &self.0 {
            Way::InPlace { max_fds } => Socket::in_place(socket, *max_fds),
            Way::Receiver(process) => {
                // Otherwise a read would drop an out-of-band byte with its descriptors. The call
                // cannot fail on a Unix socket.
                let _ = sockopt::set_socket_oobinline(&socket, true);
                Socket::received(socket, &process.door)
            }
        }
    }

    /// Wraps the socket of a client of a protocol without descriptors. There may be many at a time.
    pub fn admit_plain<S: AsFd + Send + 'static>(&mut self, socket: S) -> PlainSocket<S> {
        match &self.0 {
            Way::InPlace { .. } => PlainSocket::in_place(socket),
            Way::Receiver(process) => {
                // Out-of-band bytes are handled as in `admit`.
                let _ = sockopt::set_socket_oobinline(&socket, true);
                PlainSocket::received(socket, &process.door)
            }
        }
    }

    /// Closes the socket of a client that is not served.
    pub fn dismiss(&mut self, socket: OwnedFd) {
        let _ = shutdown(&socket, Shutdown::Both);
        if let Way::Receiver(process) = &self.0
            && let Some(socket) = process.door.lock().unpoisoned().dismiss(socket)
        {
            sync::discard(socket);
        }
    }
}
