//! Reading of the clients of one listening socket.

use crate::kind::AcceptedDescriptors;
use crate::listener_link::ListenerLink;
use crate::plain::PlainSocket;
use crate::receiver::Receiver;
use crate::socket::Socket;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown, sockopt};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Pause before the connection to the next receiver process is tried.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);

/// Interval of checks on another receiver process that is being started.
const REPLACING: Duration = Duration::from_millis(20);

/// Reader of the clients of one listening socket: in place, or by the receiver process.
///
/// With the receiver process, its owner waits for [`Intake::fd`] to become readable, calls
/// [`Intake::ready`] then, and reads from the client's socket if that [waits](Socket::is_waiting).
#[derive(Debug)]
pub struct Intake(IntakeMode);

#[derive(Debug)]
enum IntakeMode {
    InPlace { max_fds: usize },
    Receiver(Process),
}

#[derive(Debug)]
struct Process {
    receiver: Receiver,
    max_leaving: usize,
    /// See [`Intake::ending_with_process`].
    ends: bool,
    link: Arc<Mutex<ListenerLink>>,
    channel: Option<Arc<OwnedFd>>,
    /// The receiver process at the channel's other end.
    generation: u64,
    /// Time at which the channel was opened.
    opened: Instant,
    /// The receiver process does not answer: see [`ListenerLink`].
    late: Arc<AtomicBool>,
    /// Time of the next attempt to reach the receiver process.
    retry: Option<Instant>,
}

impl Intake {
    /// Creates a reader for trusted clients: see [`Socket::in_place`].
    pub fn in_place(max_fds: usize) -> Intake {
        Intake(IntakeMode::InPlace { max_fds })
    }

    /// Creates a reader for untrusted clients. [Connect](Intake::connect) it before the first
    /// client is accepted.
    pub fn new(receiver: &Receiver, wanted: AcceptedDescriptors) -> Intake {
        let link = ListenerLink::new(wanted, receiver.is_owner());
        Intake(IntakeMode::Receiver(Process {
            receiver: receiver.clone(),
            max_leaving: match wanted.max_fds {
                0 => MAX_LEAVING_PLAIN,
                _ => MAX_LEAVING,
            },
            ends: false,
            late: link.late(),
            link: Arc::new(Mutex::new(link)),
            channel: None,
            generation: 0,
            opened: Instant::now(),
            retry: None,
        }))
    }

    /// Marks clients that reconnect after the end of the process. The receiver process then shuts
    /// their sockets down, even if sockets of other listeners are [kept](crate::Receiver::keep).
    #[must_use]
    pub fn ending_with_process(mut self) -> Self {
        if let IntakeMode::Receiver(process) = &mut self.0 {
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
    /// A receiver process that does not answer is replaced: another one is started, and serves this
    /// listening socket when it is there. The first one is not judged, and ends when it runs again.
    ///
    /// # Errors
    /// The kernel's error when the receiver process has not started or restarted yet, or no
    /// descriptor is left. The next attempt is due at the deadline.
    pub fn connect(&mut self, listener: BorrowedFd<'_>) -> Result<bool, Errno> {
        let IntakeMode::Receiver(process) = &mut self.0 else {
            return Ok(false);
        };
        if process.channel.is_some() {
            if !process.late.load(Ordering::Relaxed) {
                process.retry = None;
                return Ok(false);
            }
            if !process.receiver.replace(process.generation) {
                process.retry = Some(Instant::now() + REPLACING);
                return Ok(false);
            }
        }
        let mut link = process.link.lock().unpoisoned();
        process.retry = Some(Instant::now() + RECONNECT_DELAY);
        let opened = process
            .receiver
            .open_listener(listener, link.wanted(), process.ends);
        let (generation, channel) = opened?;
        let channel = Arc::new(channel);
        process.generation = generation;
        process.opened = Instant::now();
        process.retry = None;
        process.channel = Some(channel.clone());
        link.open(channel);
        Ok(true)
    }

    /// Returns the descriptor that becomes readable when [`Intake::ready`] must be called; `None`
    /// while there is nothing to wait for.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            IntakeMode::Receiver(process) => {
                process.channel.as_ref().map(|channel| channel.as_fd())
            }
            IntakeMode::InPlace { .. } => None,
        }
    }

    /// Handles the receiver process's messages: answers to waiting clients, and closed sockets.
    /// When the process has ended, [`Intake::fd`] is closed, and [`Intake::connect`] is due.
    pub fn ready(&mut self) {
        if let IntakeMode::Receiver(process) = &mut self.0 {
            let mut link = process.link.lock().unpoisoned();
            if !link.dispatch() || !link.is_open() {
                process.channel = None;
                process.retry = Some(Instant::now());
                process.receiver.restart();
            }
        }
    }

    /// Returns the time at which [`Intake::connect`] has to be called next.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.0 {
            IntakeMode::Receiver(process) => {
                let is_late = || process.late.load(Ordering::Relaxed);
                // At once: a time that has passed.
                process
                    .retry
                    .or_else(|| is_late().then_some(process.opened))
            }
            IntakeMode::InPlace { .. } => None,
        }
    }

    /// Returns whether too many disconnected clients of the listening socket have descriptors that
    /// cannot be closed. No further one may be accepted before [`Intake::fd`] becomes readable.
    pub fn is_crowded(&self) -> bool {
        match &self.0 {
            IntakeMode::Receiver(process) => {
                process.link.lock().unpoisoned().leaving() >= process.max_leaving
            }
            IntakeMode::InPlace { .. } => false,
        }
    }

    /// Wraps the socket of a client to be served. With the receiver process: one at a time.
    pub fn admit(&mut self, socket: OwnedFd) -> Socket {
        match &self.0 {
            IntakeMode::InPlace { max_fds } => Socket::in_place(socket, *max_fds),
            IntakeMode::Receiver(process) => {
                // Otherwise a read would drop an out-of-band byte with its descriptors. The call
                // cannot fail on a Unix socket.
                let _ = sockopt::set_socket_oobinline(&socket, true);
                Socket::received(socket, &process.link)
            }
        }
    }

    /// Wraps the socket of a client of a protocol without descriptors. There may be many at a time.
    pub fn admit_plain<S: AsFd + Send + 'static>(&mut self, socket: S) -> PlainSocket<S> {
        match &self.0 {
            IntakeMode::InPlace { .. } => PlainSocket::in_place(socket),
            IntakeMode::Receiver(process) => {
                // Out-of-band bytes are handled as in `admit`.
                let _ = sockopt::set_socket_oobinline(&socket, true);
                PlainSocket::received(socket, &process.link)
            }
        }
    }

    /// Closes the socket of a client that is refused.
    pub fn dismiss(&mut self, socket: OwnedFd) {
        let _ = shutdown(&socket, Shutdown::Both);
        if let IntakeMode::Receiver(process) = &self.0
            && let Some(socket) = process.link.lock().unpoisoned().dismiss(socket)
        {
            sync::discard(socket);
        }
    }
}
