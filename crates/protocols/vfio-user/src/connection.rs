//! Server side of one client's connection.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use receive::{ForeignProtocol, Read, Socket};
use rustix::net::{SendFlags, Shutdown, UCred, send, shutdown};

use crate::device::Device;
use crate::error::ConnectionError;
use crate::inbox::{Inbox, Message};
use crate::journal::{Journal, JournalError, JournalSetup};
use crate::outbox::{Outbox, SendResult};
use crate::session::{self, MessageResult, Request, Session};
use crate::version::Capabilities;
use crate::wire::{self, Command, Header};
use rustix::io::Errno;

/// Limits that a server states to its clients in the version message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Largest region access in bytes. Clients that cannot be informed (no JSON in their version
    /// message, or no room for it in the reply) assume the specification's default,
    /// [`wire::DEFAULT_MAX_DATA_XFER_SIZE`].
    pub max_data_xfer_size: u32,
    /// `max_dma_maps` as stated to clients; counting them is the device's job.
    /// QEMU accepts at most 65535.
    pub max_dma_maps: u32,
    /// Work in one [`Connection::on_ready`]: a message costs 1, and 1 more for each 16 KiB of it or
    /// its reply, or for each 16 writes in one message. The number is small, since the time that
    /// messages cost is known only afterwards, when the owner reads the clock.
    pub work_per_call: u32,
}

impl ServerLimits {
    /// Limits that [`Connection::new`] uses.
    pub const DEFAULT: Self = Self {
        max_data_xfer_size: wire::DEFAULT_MAX_DATA_XFER_SIZE,
        max_dma_maps: 65535,
        work_per_call: 4,
    };
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Number of bytes of a message that cost as much of the budget as one message.
const BYTES_PER_WORK: usize = 16 << 10;
/// Number of bytes of a multi-write message that cost as much of the budget as one message.
const BYTES_PER_WORK_OF_WRITES: usize = 16 * size_of::<wire::MultiWrite>();

/// State of a connection after a call of [`Connection::on_ready`] or [`Connection::complete`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ConnectionStatus {
    /// The socket must become ready before more can be done, see [`Connection::interest`].
    Open,
    /// The call's budget is used up: call [`Connection::on_ready`] again after the turns of the
    /// other clients.
    MoreWork,
    /// The device has an operation outstanding: wait for [`Connection::complete`].
    Pending,
    /// The connection has ended and the device was told. The owner drops the connection.
    Closed,
}

/// Readiness of the socket that the connection waits for, level-triggered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes can be received.
    Readable,
    /// Writable: a reply does not fit into the socket, and nothing is read until it does.
    Writable,
    /// None: an operation is pending, the receiver process reads, or the connection is closed. Take
    /// the socket out of the epoll set, since epoll reports a hang-up even without interest.
    None,
}

/// Message counters of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of complete messages received.
    pub messages: u64,
    /// Number of received messages that requested no reply.
    pub posted: u64,
    /// Number of messages that were refused with an error, with or without a reply.
    pub refused: u64,
    /// Number of descriptors received.
    pub fds: u64,
}

/// Connection with one client: a socket, partial messages in both directions, and the state of the
/// protocol.
///
/// No method blocks. The owner waits for the readiness in [`interest`](Self::interest), then calls
/// [`on_ready`](Self::on_ready).
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    inbox: Inbox,
    outbox: Outbox,
    session: Session,
    deferred: Option<Deferred>,
    /// State of the connection for the next process; `None` if the connection ends with this one.
    journal: Option<Journal>,
    /// Whether a previous process has begun to handle the first message.
    again: bool,
    limits: ServerLimits,
    counters: Counters,
    /// The kernel took no descriptor with a reply, which is sent again at this time.
    crowded: Option<Instant>,
    closed: bool,
}

/// Pause after which a descriptor is sent again that the kernel did not take, because this user has
/// too many in flight (unix(7), ETOOMANYREFS).
const CROWDED: Duration = Duration::from_millis(20);

/// An operation that the device will complete later.
#[derive(Debug)]
struct Deferred {
    request: Header,
    payload: Vec<u8>,
}

/// Returns the length of a message, and whether a device may need fewer descriptors after it.
fn effect(header: &Header) -> (usize, bool) {
    let frees = [Command::DMA_UNMAP, Command::DEVICE_SET_IRQS].contains(&header.command);
    (header.message_size as usize, frees)
}

/// Next step of the connection after a message was handled.
enum NextAction {
    /// Handle the next message, if one has arrived.
    Message,
    /// Return to the owner with this status.
    Stop(ConnectionStatus),
}

impl Connection {
    /// Creates a connection over a Unix stream socket, with the default limits.
    pub fn new(socket: OwnedFd) -> Self {
        Self::with_limits(socket, ServerLimits::default())
    }

    /// Creates a connection over a Unix stream socket. Descriptors are received in place: the
    /// client is trusted to send none that blocks on `close`.
    pub fn with_limits(socket: OwnedFd, limits: ServerLimits) -> Self {
        Self::over(Socket::in_place(socket, wire::MAX_MSG_FDS), limits)
    }

    /// Creates a connection over a Unix stream socket with its own method of receiving descriptors:
    /// at most [`wire::MAX_MSG_FDS`] with one read.
    pub fn over(socket: Socket, limits: ServerLimits) -> Self {
        let ours = Capabilities {
            max_msg_fds: wire::MAX_MSG_FDS as u64,
            max_data_xfer_size: u64::from(limits.max_data_xfer_size),
            max_dma_maps: u64::from(limits.max_dma_maps),
            write_multiple: true,
            ..Capabilities::default()
        };
        Self {
            socket,
            inbox: Inbox::new(),
            outbox: Outbox::default(),
            session: Session::new(ours),
            deferred: None,
            journal: None,
            again: false,
            limits,
            counters: Counters::default(),
            crowded: None,
            closed: false,
        }
    }

    /// Creates a connection with a new client that outlives this process; the journal holds its
    /// state. `kept` is the number under which the keeper holds the client's socket; a socket
    /// without one is handed to the keeper first.
    pub fn kept(
        socket: Socket,
        limits: ServerLimits,
        mut journal: Journal,
        kept: Option<NonZeroU32>,
    ) -> Self {
        match kept {
            Some(number) => journal.begin_kept(number),
            None => journal.begin(socket.as_fd()),
        }
        let mut connection = Self::over(socket, limits);
        connection.inbox.begin(journal.place());
        connection.journal = Some(journal);
        connection
    }

    /// Resumes a previous process's connection where that process left it. `device` must be in the
    /// state that the process left, too. `fd` returns descriptors by the numbers under which they
    /// are kept. Call [`on_ready`](Self::on_ready) next.
    ///
    /// # Errors
    /// [`JournalError`] when no process can continue with this client.
    pub fn resume(
        socket: Socket,
        limits: ServerLimits,
        journal: JournalSetup,
        fd: impl FnMut(NonZeroU32) -> Option<OwnedFd>,
        device: &dyn Device,
    ) -> Result<Self, JournalError> {
        let file = |message: &[u8]| device.sent_file(session::asked_region(message)?);
        let (mut journal, left) = Journal::resume(journal, fd, file)?;
        for number in left.earlier {
            journal.settle(number, device.needs_kept(number));
        }
        let mut connection = Self::over(socket, limits);
        connection.inbox = left.inbox;
        connection.again = left.again;
        if let Some((told, theirs)) = journal.noted_version() {
            connection.session.resume(told, theirs);
        }
        if journal.is_replying() {
            // The message at the front has been handled, and its reply is being sent.
            let limit = connection.session.max_message();
            let message = connection.inbox.next(limit).ok().flatten();
            let message = message.ok_or(JournalError::Damaged("the message in hand"))?;
            journal.handled(effect(&message.header), &message.numbers);
        }
        connection.journal = Some(journal);
        Ok(connection)
    }

    /// Returns process, user and group of the peer at the time of its connect.
    pub fn peer(&self) -> Result<UCred, Errno> {
        rustix::net::sockopt::socket_peercred(&self.socket)
    }

    /// Returns the capabilities that the client has stated; before the negotiation, the
    /// specification's defaults.
    pub fn client_capabilities(&self) -> &Capabilities {
        self.session.client()
    }

    /// Returns whether the protocol version was negotiated.
    pub fn is_negotiated(&self) -> bool {
        self.session.is_negotiated()
    }

    /// Returns the counters of received messages.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the readiness of the socket that the owner has to wait for.
    pub fn interest(&self) -> Interest {
        if self.closed || self.crowded.is_some() {
            Interest::None
        } else if !self.outbox.is_empty() || self.is_replying() {
            Interest::Writable
        } else if self.deferred.is_some() || self.is_receiving() || self.is_keeping() {
            Interest::None
        } else {
            Interest::Readable
        }
    }

    /// Returns whether the helper process of crate `receive` is reading the client's next message
    /// and its descriptors. Call [`on_ready`](Self::on_ready) when it answers, or at the
    /// [deadline](Self::deadline).
    pub fn is_receiving(&self) -> bool {
        self.socket.is_waiting()
    }

    /// Returns whether the keeper has a request to complete. Call [`on_ready`](Self::on_ready) when
    /// it has answered.
    pub fn is_keeping(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::is_waiting)
    }

    /// Notes that the keeper has answered, or is late.
    pub fn keeper_answered(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.catch_up();
        }
    }

    /// Returns whether the next process cannot continue with this client yet, because the keeper is
    /// late.
    pub fn is_behind(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::is_behind)
    }

    /// Returns whether a reply is being sent from the pipe.
    fn is_replying(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::is_replying)
    }

    /// Returns when to call [`on_ready`](Self::on_ready) without an event: to check the receiver
    /// process, or to send a reply again.
    pub fn deadline(&self) -> Option<Instant> {
        self.crowded.or_else(|| self.socket.deadline())
    }

    /// Reads available bytes, handles complete messages and writes replies, as far as the budget
    /// allows. Never blocks; may be called at any time.
    ///
    /// # Errors
    /// [`ConnectionError`] when the connection was closed because of it; the device has been
    /// notified.
    pub fn on_ready(
        &mut self,
        device: &mut dyn Device,
    ) -> Result<ConnectionStatus, ConnectionError> {
        if self.closed {
            return Ok(ConnectionStatus::Closed);
        }
        let result = self.run(device);
        if !matches!(
            result,
            Ok(ConnectionStatus::Open | ConnectionStatus::MoreWork | ConnectionStatus::Pending)
        ) {
            self.close(device);
        }
        result
    }

    /// Completes the pending operation: sends its reply and continues with the messages behind it.
    ///
    /// Without a pending operation (for example because the client has disconnected) the result is
    /// dropped.
    pub fn complete(
        &mut self,
        device: &mut dyn Device,
        result: Result<(), Errno>,
    ) -> Result<ConnectionStatus, ConnectionError> {
        if let Some(Deferred { request, payload }) = self.deferred.take() {
            if request.flags & wire::flags::NO_REPLY == 0 {
                self.outbox.begin().extend_from_slice(&payload);
                self.outbox.finish(&request, result.map(|()| None));
            }
            self.counters.refused += u64::from(result.is_err());
            crash::point!("vfio-user.message.completed");
        }
        self.on_ready(device)
    }

    /// Takes the bytes of handled messages from the socket, which is then readable only when there
    /// is news. To be called before the owner waits for that.
    pub fn settle(&mut self) {
        if let Some(journal) = &mut self.journal {
            // The next read reports an error.
            let _ = journal.take_found(&mut self.socket);
        }
    }

    /// Ends the connection from the server's side.
    pub fn close(&mut self, device: &mut dyn Device) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.deferred = None;
        self.inbox.clear();
        self.outbox.clear();
        // Unread bytes in the socket would be an error for the client, not its end.
        self.settle();
        // The client is to see the end now, not when the owner drops this. It may have disconnected
        // already.
        let _ = shutdown(&self.socket, Shutdown::Both);
        crash::point!("vfio-user.connection.shut");
        if let Some(journal) = &mut self.journal {
            journal.end();
        }
        device.disconnected();
    }

    /// Returns the journal of an ended connection, for the next client.
    pub fn into_journal(self) -> Option<Journal> {
        self.journal
    }

    /// Sends the remaining bytes of a reply. After the last byte the next message can be handled.
    fn flush(&mut self, device: &dyn Device) -> Result<SendResult, ConnectionError> {
        let socket = self.socket.as_fd();
        let sent = match &mut self.journal {
            None => self.outbox.flush(socket),
            Some(journal) => journal.flush(&mut self.outbox, socket),
        };
        self.crowded = None;
        if sent == Err(Errno::TOOMANYREFS) {
            // Descriptors of other processes of this user will be received.
            self.socket.report_crowd();
            self.crowded = Some(Instant::now() + CROWDED);
            return Ok(SendResult::Blocked);
        }
        let sent = sent.map_err(ConnectionError::Send)?;
        if sent == SendResult::All
            && self.deferred.is_none()
            && !self.again
            && let Some(journal) = &mut self.journal
        {
            journal.done(|number| device.needs_kept(number));
        }
        Ok(sent)
    }

    fn run(&mut self, device: &mut dyn Device) -> Result<ConnectionStatus, ConnectionError> {
        match self.flush(device)? {
            SendResult::All => {}
            SendResult::Blocked => return Ok(ConnectionStatus::Open),
            SendResult::PeerGone => return Ok(ConnectionStatus::Closed),
        }
        if self.deferred.is_some() {
            return Ok(ConnectionStatus::Pending);
        }
        let mut budget = self.limits.work_per_call.max(1) as usize;
        let mut drained = false;
        loop {
            while let Some(message) = self.inbox.next(self.session.max_message())? {
                let (next, cost) = self.handle(message, device)?;
                if let NextAction::Stop(status) = next {
                    return Ok(status);
                }
                budget = budget.saturating_sub(cost);
                if budget == 0 {
                    return Ok(ConnectionStatus::MoreWork);
                }
            }
            if drained {
                return Ok(ConnectionStatus::Open);
            }
            budget = budget.saturating_sub(1);
            let read = match &mut self.journal {
                None => self.inbox.receive(&mut self.socket)?,
                Some(journal) => self.inbox.receive_kept(&mut self.socket, journal)?,
            };
            match read {
                Read::Bytes { more, .. } => {
                    drained = !more || budget == 0;
                    self.check_first_bytes()?;
                }
                Read::Blocked | Read::Waiting => return Ok(ConnectionStatus::Open),
                Read::Eof if self.inbox.is_empty() => return Ok(ConnectionStatus::Closed),
                Read::Eof => return Err(ConnectionError::Truncated),
            }
        }
    }

    /// Refuses a client of another protocol, with an answer in that protocol if it is known.
    fn check_first_bytes(&self) -> Result<(), ConnectionError> {
        let first = self.inbox.first_bytes();
        match ForeignProtocol::of(first) {
            None | Some(ForeignProtocol::VfioUser) => Ok(()),
            Some(stranger) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                // The client may not wait for an answer.
                let _ = send(&self.socket, &stranger.answer(first), flags);
                Err(ConnectionError::Stranger(stranger))
            }
        }
    }

    /// Handles one message. Returns the next step and the cost of the message.
    fn handle(
        &mut self,
        message: Message,
        device: &mut dyn Device,
    ) -> Result<(NextAction, usize), ConnectionError> {
        let Message {
            header,
            payload,
            fds,
            numbers,
            groups,
        } = message;
        let again = std::mem::take(&mut self.again);
        if let Some(journal) = &mut self.journal {
            journal.handle(effect(&header), groups, &numbers);
            if !numbers.is_empty() {
                device.descriptors_kept(&numbers);
            }
        }
        self.counters.messages += 1;
        self.counters.fds += fds.len() as u64;
        let wants_reply = header.flags & wire::flags::NO_REPLY == 0;
        self.counters.posted += u64::from(!wants_reply);

        let early = !self.session.is_negotiated() && header.command != Command::VERSION;
        let reply = self.outbox.begin();
        let mut work = payload.len();
        let result = if early {
            Err(Errno::PROTO)
        } else {
            let message = Request {
                header: &header,
                payload: self.inbox.payload(payload),
                fds,
                journal: self.journal.as_ref(),
                again,
            };
            self.session.handle(message, device, reply)
        };
        crash::point!("vfio-user.message.handled");
        work += reply.len();
        let bytes = match header.command {
            Command::REGION_WRITE_MULTI => BYTES_PER_WORK_OF_WRITES,
            _ => BYTES_PER_WORK,
        };
        let cost = 1 + work / bytes;

        let result = match result {
            Ok(MessageResult::Deferred(payload)) => {
                self.outbox.clear();
                self.deferred = Some(Deferred {
                    request: header,
                    payload,
                });
                return Ok((NextAction::Stop(ConnectionStatus::Pending), cost));
            }
            Ok(MessageResult::Reply(fd)) => Ok(fd),
            Err(errno) => {
                self.counters.refused += 1;
                tracing::debug!(command = header.command.0, %errno, "message refused");
                Err(errno)
            }
        };
        if wants_reply {
            self.outbox.finish(&header, result)
        } else {
            self.outbox.clear()
        }
        let sent = self.flush(device)?;
        if early {
            return Err(ConnectionError::NotNegotiated {
                command: header.command,
            });
        }
        let next = match sent {
            SendResult::All => NextAction::Message,
            SendResult::Blocked => NextAction::Stop(ConnectionStatus::Open),
            SendResult::PeerGone => NextAction::Stop(ConnectionStatus::Closed),
        };
        Ok((next, cost))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
