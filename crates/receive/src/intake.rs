//! How the clients of one listening socket are read.

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

/// Clients of one listening socket that may be leaving at the same time: the receiver process
/// has not closed their sockets yet. Each may hang there with a thread and its descriptors.
const MAX_LEAVING: usize = 8;

/// The same of a protocol without descriptors, which serves many clients at a time: one that sends
/// some all the same is not to keep the others out.
const MAX_LEAVING_PLAIN: usize = 64;

/// Until a receiver process that has ended is looked for again.
const RETRY: Duration = Duration::from_millis(100);

/// How the clients of one listening socket are read: in place, or by the receiver process.
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
    /// When to look for the receiver process again.
    retry: Option<Instant>,
}

impl Intake {
    /// For clients that are trusted: see [`Socket::in_place`].
    pub fn in_place(max_fds: usize) -> Intake {
        Intake(Way::InPlace { max_fds })
    }

    /// For clients that are not. Before the first of them is accepted the intake is to be
    /// [connected](Intake::connect).
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

    /// Clients of this listening socket connect again when the process has ended: the receiver
    /// process shuts their sockets down then, also where those of others are
    /// [kept](crate::Receiver::keep).
    #[must_use]
    pub fn ending_with_process(mut self) -> Self {
        if let Way::Receiver(process) = &mut self.0 {
            process.ends = true;
        }
        self
    }

    /// Makes the receiver process hold a duplicate of the listening socket, and the sockets of the
    /// clients that are there. When this process has ended, it shuts them down; but not a listening
    /// socket that another process made, which may go on with it. To be called first, and when
    /// [`Intake::deadline`] has passed. `true` if [`Intake::fd`] is another one: it is to be waited
    /// for.
    ///
    /// # Errors
    /// The receiver process is not there yet, or again; or no descriptor is left. It is tried again
    /// at the deadline.
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

    /// Becomes readable when [`Intake::ready`] is to be called; none while there is nothing to wait
    /// for.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Way::Receiver(process) => process.channel.as_ref().map(|channel| channel.as_fd()),
            Way::InPlace { .. } => None,
        }
    }

    /// Takes in what the receiver process says: answers to clients that wait, and which sockets it
    /// has closed. When it has ended, [`Intake::fd`] is closed, and [`Intake::connect`] is due.
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

    /// When [`Intake::connect`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.0 {
            Way::Receiver(process) => process.retry,
            Way::InPlace { .. } => None,
        }
    }

    /// Too many clients of the listening socket have gone whose descriptors cannot be closed: no
    /// further one is to be accepted before [`Intake::fd`] becomes readable.
    pub fn is_crowded(&self) -> bool {
        match &self.0 {
            Way::Receiver(process) => {
                process.door.lock().unpoisoned().leaving() >= process.max_leaving
            }
            Way::InPlace { .. } => false,
        }
    }

    /// The socket of a client that is to be served. With the receiver process: one at a time.
    pub fn admit(&mut self, socket: OwnedFd) -> Socket {
        match &self.0 {
            Way::InPlace { max_fds } => Socket::in_place(socket, *max_fds),
            Way::Receiver(process) => {
                // Else a read would drop a byte that was sent out of band, with its descriptors.
                // It is a Unix socket, so this does not fail.
                let _ = sockopt::set_socket_oobinline(&socket, true);
                Socket::received(socket, &process.door)
            }
        }
    }

    /// The socket of a client whose protocol has no descriptors. There may be many at a time.
    pub fn admit_plain<S: AsFd + Send + 'static>(&mut self, socket: S) -> PlainSocket<S> {
        match &self.0 {
            Way::InPlace { .. } => PlainSocket::in_place(socket),
            Way::Receiver(process) => {
                // As in `admit`.
                let _ = sockopt::set_socket_oobinline(&socket, true);
                PlainSocket::received(socket, &process.door)
            }
        }
    }

    /// Closes the socket of a client that is not to be served.
    pub fn dismiss(&mut self, socket: OwnedFd) {
        let _ = shutdown(&socket, Shutdown::Both);
        if let Way::Receiver(process) = &self.0
            && let Some(socket) = process.door.lock().unpoisoned().dismiss(socket)
        {
            sync::discard(socket);
        }
    }
}
