//! Server side of a listener link: the socket pair to the receiver process for one listening
//! socket.

use crate::message::{self, MAX_PACKET_LEN, MAX_READ, Message, TOO_MANY_FDS};
use crate::{ReadError, kind::AcceptedDescriptors};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval of checks on a missing answer. Descriptors are checked within microseconds.
const PERIOD: Duration = Duration::from_millis(250);
/// Number of signs of life of the receiver process after which a missing answer hangs. They are at
/// least a period apart. A process without a processor, or a stopped one, gives none.
const SIGNS: u32 = 8;

/// Bytes and descriptors that the receiver process has peeked at.
#[derive(Debug)]
pub(crate) struct ReceivedData {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Progress of a request to peek.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asking {
    /// Maximum number of bytes.
    most: u32,
    /// Time of the next check.
    next: Instant,
    /// Signs of life of the receiver process that are left until the request hangs.
    signs: u32,
    /// The receiver process has the request. Otherwise it is sent at the next check.
    sent: bool,
}

impl Asking {
    fn new(most: usize, now: Instant) -> Self {
        Asking {
            most: u32::try_from(most.min(MAX_READ)).unwrap_or(u32::MAX),
            next: now + PERIOD,
            signs: SIGNS,
            sent: false,
        }
    }
}

/// Request to the receiver process of which the answer is missing.
#[derive(Debug)]
enum PendingRead {
    Asked(Asking),
    Come(Result<ReceivedData, ReadError>),
}

/// Current client of the listening socket.
#[derive(Debug)]
struct CurrentClient {
    client: u64,
    socket: Arc<OwnedFd>,
    /// The receiver process has a duplicate of the socket.
    registered: bool,
    /// The receiver process has duplicates of the peeked descriptors.
    held: bool,
    awaited: Option<PendingRead>,
}

/// Server side of the link to the receiver process for one listening socket. The thread that serves
/// the socket uses it.
#[derive(Debug)]
pub(crate) struct ListenerLink {
    /// Channel to the receiver process; `None` while there is none.
    channel: Option<Arc<OwnedFd>>,
    wanted: AcceptedDescriptors,
    last_client: u64,
    present: Option<CurrentClient>,
    /// Clients of a protocol without descriptors. The receiver process has duplicates of their
    /// sockets.
    plain: HashSet<u64>,
    /// Disconnected clients for which the receiver process still has to close the socket.
    leaving: HashSet<u64>,
    /// Disconnected clients of which the receiver process was not told yet.
    untold: Vec<u64>,
    /// A sign of life was asked for, and has not come.
    pinged: bool,
    /// The receiver process does not take or answer messages.
    late: Arc<AtomicBool>,
    /// Whether the end of this link shuts the sockets down; `None` if it always does.
    is_owner: Option<Arc<AtomicBool>>,
}

impl Drop for ListenerLink {
    fn drop(&mut self) {
        // If the clients' sockets are kept, the receiver process does not treat the end of this
        // process as the end of the connections.
        if self
            .is_owner
            .as_ref()
            .is_none_or(|is_owner| is_owner.load(Ordering::Acquire))
        {
            let _ = self.send(message::kind::SHUT, 0, 0, None);
        }
    }
}

impl ListenerLink {
    pub(crate) fn new(
        wanted: AcceptedDescriptors,
        is_owner: Option<Arc<AtomicBool>>,
    ) -> ListenerLink {
        ListenerLink {
            channel: None,
            wanted,
            last_client: 0,
            present: None,
            plain: HashSet::new(),
            leaving: HashSet::new(),
            untold: Vec::new(),
            pinged: false,
            late: Arc::default(),
            is_owner,
        }
    }

    pub(crate) fn wanted(&self) -> AcceptedDescriptors {
        self.wanted
    }

    pub(crate) fn is_open(&self) -> bool {
        self.channel.is_some()
    }

    pub(crate) fn leaving(&self) -> usize {
        self.leaving.len()
    }

    /// Returns the flag that the receiver process does not answer, for the owner's thread.
    pub(crate) fn late(&self) -> Arc<AtomicBool> {
        self.late.clone()
    }

    /// Uses a new receiver process.
    pub(crate) fn open(&mut self, channel: Arc<OwnedFd>) {
        self.lose();
        self.channel = Some(channel);
        self.register();
    }

    /// Handles the end of the receiver process, or its replacement, and of everything that it held.
    fn lose(&mut self) {
        self.channel = None;
        self.plain.clear();
        self.leaving.clear();
        self.untold.clear();
        self.pinged = false;
        self.late.store(false, Ordering::Relaxed);
        if let Some(present) = &mut self.present {
            present.registered = false;
            present.held = false;
            // A peek takes nothing, so the next process is asked again.
            if let Some(PendingRead::Asked(asking)) = &mut present.awaited {
                asking.sent = false;
                asking.signs = SIGNS;
            }
        }
    }

    /// Sends a message without waiting: the receiver process reads messages at once, and few are
    /// outstanding.
    fn send(
        &mut self,
        kind: u32,
        value: u32,
        client: u64,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        let channel = self.channel.clone().ok_or(Errno::NOTCONN)?;
        let message = Message {
            kind,
            value,
            client,
        };
        let sent = message::send(
            channel.as_fd(),
            message,
            &[],
            fd.as_slice(),
            SendFlags::DONTWAIT,
        );
        match sent {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => self.lose(),
            Err(Errno::TOOMANYREFS) => self.report_crowd(),
            Err(errno) => {
                tracing::debug!(%errno, "message to the process that receives descriptors");
            }
        }
        sent
    }

    /// Has the receiver process look for clients with too many unread descriptors.
    pub(crate) fn report_crowd(&mut self) {
        let _ = self.send(message::kind::CROWDED, 0, 0, None);
    }

    fn next_client(&mut self) -> u64 {
        self.last_client += 1;
        self.last_client
    }

    /// Registers a new client, which must be the only one. Returns its number.
    pub(crate) fn enter(&mut self, socket: Arc<OwnedFd>) -> u64 {
        let client = self.next_client();
        self.present = Some(CurrentClient {
            client,
            socket,
            registered: false,
            held: false,
            awaited: None,
        });
        self.register();
        client
    }

    /// Gives the receiver process a duplicate of the present client's socket, and an outstanding
    /// request.
    fn register(&mut self) {
        let Some(present) = &self.present else {
            return;
        };
        let (client, socket) = (present.client, present.socket.clone());
        let sent = self.send(message::kind::OPEN, 0, client, Some(socket.as_fd()));
        if let Some(present) = &mut self.present {
            present.registered = sent.is_ok();
        }
        self.note_room(sent);
        self.send_request();
    }

    /// Sends the outstanding request, if there is one that the receiver process does not have.
    fn send_request(&mut self) {
        let Some(CurrentClient {
            client,
            registered: true,
            awaited:
                Some(PendingRead::Asked(Asking {
                    most, sent: false, ..
                })),
            ..
        }) = self.present
        else {
            return;
        };
        let sent = self.send(message::kind::PEEK, most, client, None);
        if let Some(CurrentClient {
            awaited: Some(PendingRead::Asked(asking)),
            ..
        }) = &mut self.present
        {
            asking.sent = sent.is_ok();
        }
        self.note_room(sent);
    }

    /// Notes that the receiver process takes no messages from its channel.
    fn note_room(&self, sent: Result<(), Errno>) {
        if sent == Err(Errno::AGAIN) {
            self.late.store(true, Ordering::Relaxed);
        }
    }

    /// Has the receiver process close the socket of a client that is not served. Returns the socket
    /// if that is impossible.
    pub(crate) fn dismiss(&mut self, socket: OwnedFd) -> Option<OwnedFd> {
        let client = self.next_client();
        let sent = self.send(message::kind::OPEN, 0, client, Some(socket.as_fd()));
        if sent.is_err() {
            return Some(socket);
        }
        drop(socket);
        self.end(client);
        None
    }

    /// Registers a client of a protocol without descriptors; there may be many. `None` if the
    /// receiver process cannot get a duplicate of its socket.
    pub(crate) fn enter_plain(&mut self, socket: BorrowedFd<'_>) -> Option<u64> {
        let client = self.next_client();
        let sent = self.send(message::kind::OPEN, 0, client, Some(socket));
        sent.is_ok().then(|| {
            self.plain.insert(client);
            client
        })
    }

    /// Removes a client of a protocol without descriptors, as [`ListenerLink::leave`].
    pub(crate) fn leave_plain(&mut self, client: u64) -> bool {
        self.dispatch();
        self.plain.remove(&client)
    }

    /// Reports that the server has closed its end of a registered client's socket.
    pub(crate) fn end(&mut self, client: u64) {
        let sent = self.send(message::kind::END, 0, client, None);
        if self.is_open() {
            self.leaving.insert(client);
            if sent.is_err() {
                self.untold.push(client);
            }
        }
    }

    /// Removes the client. Returns `true` if the receiver process has a duplicate of its socket:
    /// [`ListenerLink::end`] must follow after the server's own is closed.
    pub(crate) fn leave(&mut self, client: u64) -> bool {
        // A receiver process that has ended unnoticed holds nothing.
        self.dispatch();
        let present = self.present.take_if(|present| present.client == client);
        present.is_some_and(|present| present.registered)
    }

    /// Requests a peek at `most` bytes, which stay in the socket.
    pub(crate) fn ask(&mut self, client: u64, most: usize) {
        let Some(present) = self.present.as_mut().filter(|p| p.client == client) else {
            return;
        };
        present.awaited = Some(PendingRead::Asked(Asking::new(most, Instant::now())));
        self.send_request();
    }

    /// Tells the receiver process that the peeked bytes were read from the socket.
    pub(crate) fn looked(&mut self, client: u64) {
        let _ = self.send(message::kind::PEEKED, 0, client, None);
    }

    /// Returns whether the receiver process holds the peeked descriptors, as far as known.
    pub(crate) fn holds(&mut self, client: u64) -> bool {
        self.dispatch();
        let present = self.present.as_ref().filter(|p| p.client == client);
        present.is_some_and(|present| present.held)
    }

    /// Returns the time at which the answer has to be checked for again; `None` without a request.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.present.as_ref()?.awaited.as_ref()? {
            PendingRead::Asked(asking) => Some(asking.next),
            PendingRead::Come(_) => None,
        }
    }

    /// Takes the answer, if it has arrived.
    pub(crate) fn answer(&mut self, client: u64) -> Result<Option<ReceivedData>, ReadError> {
        self.check(Instant::now());
        let present = self.present.as_mut().filter(|p| p.client == client);
        let Some(present) = present else {
            return Err(ReadError::ReceiverGone);
        };
        match present.awaited.take() {
            Some(PendingRead::Come(answer)) => answer.map(Some),
            Some(PendingRead::Asked(Asking { signs: 0, .. })) => Err(ReadError::Stuck),
            asked => {
                present.awaited = asked;
                Ok(None)
            }
        }
    }

    /// Checks an outstanding request whose answer has not arrived within a period. Time alone
    /// decides nothing: a receiver process may be slow because the machine is busy.
    fn check(&mut self, now: Instant) {
        let Some(CurrentClient {
            client,
            registered,
            awaited: Some(PendingRead::Asked(asking)),
            ..
        }) = &mut self.present
        else {
            return;
        };
        if now < asking.next {
            return;
        }
        asking.next = now + PERIOD;
        let client = *client;
        match (asking.sent, *registered) {
            _ if self.channel.is_none() => {}
            (false, true) => self.send_request(),
            (false, false) => self.register(),
            (true, _) if self.pinged => self.late.store(true, Ordering::Relaxed),
            (true, _) => self.pinged = self.send(message::kind::PING, 0, client, None).is_ok(),
        }
    }

    /// Handles the messages of the receiver process. Returns `false` when the process has ended.
    pub(crate) fn dispatch(&mut self) -> bool {
        for client in std::mem::take(&mut self.untold) {
            self.end(client);
        }
        while let Some(channel) = self.channel.clone() {
            let incoming = match message::receive::<MAX_PACKET_LEN>(channel.as_fd()) {
                Ok(Some(incoming)) => incoming,
                Err(Errno::AGAIN) => return true,
                Ok(None) | Err(_) => {
                    self.lose();
                    return false;
                }
            };
            let Message {
                kind,
                value,
                client,
            } = incoming.message;
            match kind {
                message::kind::ANSWER => {
                    let answer = match value {
                        TOO_MANY_FDS => Err(ReadError::TooManyFds),
                        0 if incoming.incomplete => Err(ReadError::TooManyFds),
                        0 => Ok(ReceivedData {
                            bytes: incoming.bytes,
                            fds: incoming.fds,
                        }),
                        errno => Err(ReadError::System(Errno::from_raw_os_error(errno as i32))),
                    };
                    // Late answers are dropped. Descriptors in them are harmless.
                    if let Some(present) = &mut self.present
                        && present.client == client
                        && matches!(present.awaited, Some(PendingRead::Asked(_)))
                    {
                        present.held = answer.is_ok();
                        present.awaited = Some(PendingRead::Come(answer));
                    }
                }
                message::kind::CLOSED => {
                    self.leaving.remove(&client);
                    self.plain.remove(&client);
                    if let Some(present) = self.present.as_mut().filter(|p| p.client == client) {
                        present.registered = false;
                        present.held = false;
                        if let Some(PendingRead::Asked(asking)) = &mut present.awaited {
                            asking.sent = false;
                        }
                    }
                }
                message::kind::PONG => {
                    self.pinged = false;
                    self.late.store(false, Ordering::Relaxed);
                    if let Some(CurrentClient {
                        client: present,
                        awaited: Some(PendingRead::Asked(asking)),
                        ..
                    }) = &mut self.present
                        && *present == client
                        && value == 0
                    {
                        asking.signs = asking.signs.saturating_sub(1);
                    }
                }
                _ => {}
            }
        }
        false
    }
}
