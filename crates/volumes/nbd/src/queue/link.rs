//! A connection of a queue: sends commands, receives replies, and closes; a new connection then
//! replaces it.
//!
//! ```text
//! Connecting --a thread has connected--> Open --error, time-out, end of the stream--> Closing
//!     ^                                                                                 |
//!     `---- the server has closed it, too, or had time for that <-----------------------'
//! ```
//!
//! A closing connection sends nothing more, but is read until the server has closed it: servers
//! answer the commands that they have begun before they close. A write that was sent on it is
//! therefore never executed after a write on the next connection.
//!
//! A server counts as lost from the end of a connection until a reply arrives on another one.
//! Commands that cannot be sent again within the time limit fail ([`Link::is_overdue`]).

use crate::connect::{Connected, ConnectionGuard};
use crate::protocol::wire::{EINVAL, ENOMEM, EOVERFLOW, ESHUTDOWN};
use crate::protocol::{Command, Event, InFlight, Replies, RequestInfo};
use dma::SegmentList;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};
use volume::{Incoming, IoError, IoErrorKind, Outgoing, RingStream, RingStreams};

/// Maximum number of outstanding commands on a connection.
const DEPTH: u32 = 128;
/// Maximum number of staged bytes while a message is being sent; above it no command is accepted.
const STAGED: u64 = 1 << 20;
/// Size in bytes of the receive buffer of a connection.
const BUFFER: usize = 128 << 10;
/// Minimum number of outstanding bytes for which data is received directly into its final memory,
/// without a copy.
const DIRECT: u32 = 16 << 10;
/// Time limit for a server to close a connection after this host has closed the sending side.
const CLOSING: Duration = Duration::from_secs(5);
/// Number of failed connections (protocol violation or inaccessible memory) after which a command
/// that was outstanding on all of them fails.
const MAX_VIOLATIONS: u8 = 5;

/// Command to the server that executes a request or a part of it.
#[derive(Debug)]
pub(super) struct Subrequest {
    /// Index of the request that the command belongs to.
    pub(super) parent: usize,
    pub(super) command: Command,
    /// Byte offset of the command in the export.
    pub(super) offset: u64,
    pub(super) len: u32,
    /// Memory of the command's data; empty while the kernel uses it.
    pub(super) list: SegmentList,
    /// Whether `list` is all of the request's memory, not only a part.
    pub(super) whole: bool,
    /// Time at which the command was sent to the server.
    pub(super) since: Instant,
    /// Whether the kernel uses the command's memory.
    pub(super) lent: bool,
    /// Whether the request was cancelled, so that the reply is discarded.
    pub(super) given_up: bool,
    /// Whether received data could not be stored, because the request's memory is inaccessible.
    pub(super) unstored: bool,
    /// Number of connections that failed, other than by being closed, while the command was
    /// outstanding.
    pub(super) violations: u8,
}

/// Command that has ended, and its result.
pub(super) type CommandResult = (Subrequest, Result<(), IoError>);

/// Reason why a connection to the server is no longer usable.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the server has closed the connection")]
    Closed,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("{0}")]
    Io(io::Error),
    #[error("the server breaks the protocol: {0}")]
    Violation(crate::protocol::Violation),
    #[error("no answer to a request for {0:?}")]
    TimeOut(Duration),
    #[error("a request was cancelled while it was sent or received")]
    GivenUp,
}

/// Cause of a connection's failure for which commands eventually fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blame {
    /// The server has violated the protocol.
    Server,
    /// The memory of a request is inaccessible (the guest has shrunk its file).
    Memory,
}

impl Broken {
    /// Returns whether the kernel could not read or write the memory of a request.
    fn is_fault(&self) -> bool {
        matches!(self, Self::Io(error) if is(error, Errno::FAULT))
    }

    fn blame(&self) -> Option<Blame> {
        match self {
            Self::Violation(_) => Some(Blame::Server),
            _ if self.is_fault() => Some(Blame::Memory),
            _ => None,
        }
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<crate::protocol::Violation> for Broken {
    fn from(violation: crate::protocol::Violation) -> Self {
        Self::Violation(violation)
    }
}

struct Open {
    stream: RingStream,
    replies: Replies,
    /// Receive buffer of the connection; `None` while the kernel uses it.
    incoming: Option<Incoming>,
    /// Cookie of the request into which the kernel receives directly, if there is one.
    direct: Option<u64>,
    /// Message of commands that is being assembled.
    staged: Outgoing,
    /// Message buffer to be reused; `None` while the kernel uses it.
    spare: Option<Outgoing>,
    /// Whether any reply was received on the connection.
    answered: bool,
    /// Whether the server has announced that it shuts down.
    shutting_down: bool,
    /// Keeper's guard of the connection. As the last field, it is dropped after the connection.
    _kept: Option<ConnectionGuard>,
}

enum State {
    Connecting,
    Open(Open),
    Closing {
        open: Open,
        until: Instant,
        /// Cause for which commands fail after several failed connections, if there is one.
        blame: Option<Blame>,
        ended: bool,
    },
}

/// Place for one connection of a queue, which may be down.
pub(super) struct Link {
    state: State,
    in_flight: InFlight<Subrequest>,
    /// Commands of the previous connection, which are sent first on the next one.
    pub(super) again: VecDeque<Subrequest>,
    /// Number of connections in a row that have ended before any reply.
    pub(super) failures: u32,
    /// Time at which a connection first failed since the last reply.
    lost: Option<Instant>,
    looked: Option<Instant>,
    /// Time at which no thread could be started for the next connection.
    pub(super) forsaken: Option<Instant>,
}

impl Link {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: State::Connecting,
            in_flight: InFlight::new(DEPTH),
            again: VecDeque::new(),
            failures: 0,
            lost: Some(now),
            looked: None,
            forsaken: None,
        }
    }

    /// Starts to use a connection that was made.
    pub(super) fn opened(&mut self, streams: &RingStreams, connected: Connected) {
        if self.again.is_empty() {
            self.lost = None;
        }
        self.state = State::Open(Open {
            stream: streams.open(connected.fd),
            replies: Replies::new(connected.export.structured),
            incoming: Some(Incoming::new(BUFFER)),
            direct: None,
            staged: Outgoing::new(),
            spare: Some(Outgoing::new()),
            answered: false,
            shutting_down: false,
            _kept: connected.kept,
        });
    }

    /// Returns the number of commands that are staged, being sent, or executed by the server.
    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns whether another command can be added to the message.
    pub(super) fn has_room(&self) -> bool {
        match &self.state {
            State::Open(open) => !self.in_flight.is_full() && open.staged.left() < STAGED,
            _ => false,
        }
    }

    /// Returns whether the message is empty, so that the next command begins a batch.
    pub(super) fn begins(&self) -> bool {
        match &self.state {
            State::Open(open) => open.staged.left() == 0,
            _ => true,
        }
    }

    /// Returns whether the connection is closing or being made.
    pub(super) fn is_down(&self) -> bool {
        !matches!(self.state, State::Open(_))
    }

    /// Returns whether the connection is open, so that commands can be sent.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    /// Returns whether the link waits for an event that may not be signalled: the server's close,
    /// or a thread.
    pub(super) fn is_timed(&self) -> bool {
        matches!(self.state, State::Closing { .. }) || self.forsaken.is_some()
    }

    /// Returns whether no reply has arrived for `limit` since a connection failed.
    pub(super) fn is_overdue(&self, now: Instant, limit: Duration) -> bool {
        let overdue = |lost| now.saturating_duration_since(lost) >= limit;
        self.is_down() && self.lost.is_some_and(overdue)
    }

    /// Returns whether bytes were received, or a message can be sent.
    pub(super) fn has_news(&self) -> bool {
        match &self.state {
            State::Connecting => false,
            State::Open(open) => {
                open.stream.has_news()
                    || open.incoming.is_some()
                    || (open.staged.left() > 0 && open.spare.is_some())
            }
            State::Closing { open, .. } => open.stream.has_news(),
        }
    }

    /// Adds a command to the next message.
    ///
    /// # Errors
    /// Returns `subrequest` if there is no room.
    pub(super) fn stage(&mut self, mut subrequest: Subrequest) -> Result<(), Subrequest> {
        let State::Open(open) = &mut self.state else {
            return Err(subrequest);
        };
        let info = RequestInfo {
            read: subrequest.command == Command::Read,
            offset: subrequest.offset,
            len: subrequest.len,
        };
        let (command, offset, len) = (subrequest.command, subrequest.offset, subrequest.len);
        let data = match command {
            Command::Write { .. } => {
                subrequest.lent = true;
                Some(std::mem::take(&mut subrequest.list))
            }
            _ => None,
        };
        match self.in_flight.insert(info, subrequest) {
            Ok(cookie) => {
                open.staged.bytes(&command.header(cookie, offset, len));
                if let Some(list) = data {
                    open.staged.data(cookie, list);
                }
                Ok(())
            }
            Err(mut subrequest) => {
                subrequest.list = data.unwrap_or(std::mem::take(&mut subrequest.list));
                subrequest.lent = false;
                Err(subrequest)
            }
        }
    }

    /// Starts to send the assembled message. Returns `false` if it is empty.
    pub(super) fn send(&mut self) -> bool {
        let State::Open(open) = &mut self.state else {
            return false;
        };
        open.send()
    }

    /// Submits the entries of the ring to the kernel.
    pub(super) fn push(&self) {
        if let State::Open(open) = &self.state {
            open.stream.push();
        }
    }

    /// Handles received bytes and completed sends. Appends finished commands to `over`.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        timeout: Duration,
        over: &mut Vec<CommandResult>,
    ) -> Result<(), Broken> {
        let State::Open(open) = &mut self.state else {
            return Ok(());
        };
        let before = over.len();
        let polled = open.poll(&mut self.in_flight, over);
        if over.len() > before {
            open.answered = true;
            (self.failures, self.lost) = (0, None);
        }
        polled?;
        open.send();
        let due = |at: Instant| now.saturating_duration_since(at) >= Duration::from_millis(50);
        if !self.in_flight.is_empty() && self.looked.is_none_or(due) {
            self.looked = Some(now);
            let late = |subrequest: &Subrequest| {
                now.saturating_duration_since(subrequest.since) >= timeout
            };
            if self
                .in_flight
                .iter_mut()
                .any(|(_, entry)| late(&entry.item))
            {
                return Err(Broken::TimeOut(timeout));
            }
        }
        Ok(())
    }

    /// Starts to close the connection for the reason `why`.
    pub(super) fn close(&mut self, why: &Broken, now: Instant) {
        let state = std::mem::replace(&mut self.state, State::Connecting);
        let State::Open(mut open) = state else {
            self.state = state;
            return;
        };
        // Commands that were not sent are kept for the next connection.
        open.staged
            .clear(|cookie, list| return_list(&mut self.in_flight, cookie, list));
        let ended = matches!(why, Broken::Closed | Broken::Io(_)) && !why.is_fault();
        if ended {
            open.stream.shut_down()
        } else {
            // The server may still answer the commands that it has begun.
            open.stream.end_sending()
        }
        if matches!(why, Broken::GivenUp) {
            // The memory is needed at once.
            open.stream.cancel();
        }
        if !open.answered {
            self.failures = self.failures.saturating_add(1);
        }
        self.failures = self.failures.max(1);
        self.lost.get_or_insert(now);
        self.state = State::Closing {
            open,
            until: now.checked_add(CLOSING).unwrap_or(now),
            blame: why.blame(),
            ended,
        };
    }

    /// Cancels the kernel's operations on a closing connection, so that it returns their memory
    /// soon.
    pub(super) fn hurry(&mut self) {
        if let State::Closing { open, .. } = &self.state {
            open.stream.cancel();
        }
    }

    /// Continues closing the connection. Returns `true` when it is closed: its commands are then in
    /// [`Link::again`] or `over`, and the next connection may be made.
    pub(super) fn closed(&mut self, now: Instant, over: &mut Vec<CommandResult>) -> bool {
        let State::Closing {
            open,
            until,
            blame,
            ended,
        } = &mut self.state
        else {
            return false;
        };
        *ended |= open.drain(&mut self.in_flight);
        if now >= *until && !*ended {
            open.stream.shut_down();
        }
        if !*ended || open.spare.is_none() || open.incoming.is_none() {
            return false;
        }
        let blame = *blame;
        for entry in self.in_flight.drain() {
            let outcome = entry.outcome();
            let mut subrequest = entry.item;
            subrequest.lent = false;
            match outcome {
                _ if subrequest.given_up => over.push((subrequest, Ok(()))),
                Some(error) if error != Some(ESHUTDOWN) => {
                    let result = result(error, &subrequest);
                    over.push((subrequest, result));
                }
                _ => {
                    subrequest.violations += u8::from(blame.is_some());
                    match blame {
                        Some(blame) if subrequest.violations >= MAX_VIOLATIONS => {
                            let kind = match blame {
                                Blame::Memory => IoErrorKind::Memory,
                                Blame::Server => failed(subrequest.command),
                            };
                            over.push((subrequest, Err(kind.into())));
                        }
                        _ => self.again.push_back(subrequest),
                    }
                }
            }
        }
        self.state = State::Connecting;
        true
    }

    /// Abandons the commands of a cancelled request. `take` receives the commands, except those
    /// with memory in use by the kernel. Returns `true` if there are such.
    pub(super) fn give_up(&mut self, parent: usize, mut take: impl FnMut(&mut Subrequest)) -> bool {
        let mut lent = false;
        for (_, entry) in self.in_flight.iter_mut() {
            let subrequest = &mut entry.item;
            if subrequest.parent != parent || subrequest.given_up {
                continue;
            }
            if subrequest.lent {
                lent = true;
            } else {
                subrequest.given_up = true;
                take(subrequest);
            }
        }
        lent
    }
}

impl Open {
    fn send(&mut self) -> bool {
        if self.staged.left() == 0 {
            return false;
        }
        let Some(spare) = self.spare.take() else {
            return false;
        };
        let outgoing = std::mem::replace(&mut self.staged, spare);
        if let Err(outgoing) = self.stream.send(outgoing) {
            // The ring is full: the next round tries again.
            let spare = std::mem::replace(&mut self.staged, outgoing);
            self.spare = Some(spare);
        }
        true
    }

    fn poll(
        &mut self,
        in_flight: &mut InFlight<Subrequest>,
        over: &mut Vec<CommandResult>,
    ) -> Result<(), Broken> {
        if let Some((mut outgoing, sent)) = self.stream.sent() {
            outgoing.advance(*sent.as_ref().unwrap_or(&0));
            if sent.is_ok() && outgoing.left() > 0 {
                if let Err(outgoing) = self.stream.send(outgoing) {
                    self.end_of_sending(outgoing, in_flight, over);
                    return Err(Broken::Io(io::ErrorKind::WouldBlock.into()));
                }
            } else {
                self.end_of_sending(outgoing, in_flight, over);
                sent?;
            }
            if self.shutting_down {
                return Err(Broken::ShuttingDown);
            }
        }
        if let Some((mut incoming, received)) = self.stream.received() {
            let result = match received {
                Ok(0) => Err(Broken::Closed),
                Ok(len) => {
                    self.received(&mut incoming, len, in_flight);
                    self.parse(&mut incoming, in_flight, over)
                }
                Err(error) => Err(error.into()),
            };
            self.reclaim(&mut incoming, in_flight);
            self.incoming = Some(incoming);
            result?;
        }
        if let Some(incoming) = self.incoming.take() {
            self.receive(incoming, in_flight);
        }
        Ok(())
    }

    /// Regains the memory of a message that has been sent, and ends its commands that were answered
    /// meanwhile.
    fn end_of_sending(
        &mut self,
        mut outgoing: Outgoing,
        in_flight: &mut InFlight<Subrequest>,
        over: &mut Vec<CommandResult>,
    ) {
        outgoing.clear(|cookie, list| {
            return_list(in_flight, cookie, list);
            let answered = in_flight.get(cookie).and_then(|entry| entry.outcome());
            if answered == Some(Some(ESHUTDOWN)) {
                // Handled as in `parse` below.
                if let Some(entry) = in_flight.get(cookie) {
                    entry.ask_again();
                }
                self.shutting_down = true;
            } else if let Some(error) = answered
                && let Some(entry) = in_flight.remove(cookie)
            {
                let result = result(error, &entry.item);
                over.push((entry.item, result));
            }
        });
        self.spare = Some(outgoing);
    }

    /// Records that the kernel has received `len` bytes directly into a request's memory.
    fn received(
        &mut self,
        incoming: &mut Incoming,
        len: u64,
        in_flight: &mut InFlight<Subrequest>,
    ) {
        let direct = incoming.received(len);
        self.reclaim(incoming, in_flight);
        // At most the expected number of bytes, which has 32 bits.
        self.replies.took(direct as u32);
    }

    fn reclaim(&mut self, incoming: &mut Incoming, in_flight: &mut InFlight<Subrequest>) {
        if let Some((list, ..)) = incoming.direct.take()
            && let Some(cookie) = self.direct.take()
        {
            return_list(in_flight, cookie, list);
        }
    }

    fn parse(
        &mut self,
        incoming: &mut Incoming,
        in_flight: &mut InFlight<Subrequest>,
        over: &mut Vec<CommandResult>,
    ) -> Result<(), Broken> {
        loop {
            let (used, event) = self.replies.next(incoming.bytes(), in_flight)?;
            match event {
                Event::More if used == 0 => return Ok(()),
                Event::More => {}
                Event::Data { cookie, at, bytes } => {
                    if let Some(entry) = in_flight.get(cookie) {
                        entry.item.store(at, bytes);
                    }
                }
                Event::Hole { cookie, at, len } => {
                    if let Some(entry) = in_flight.get(cookie) {
                        entry.item.clear(at, len);
                    }
                }
                Event::End { cookie, error } => {
                    let lent = in_flight.get(cookie).is_some_and(|entry| entry.item.lent);
                    if error == Some(ESHUTDOWN) && !lent {
                        // The command is sent again on the next connection.
                        if let Some(entry) = in_flight.get(cookie) {
                            entry.ask_again();
                        }
                        return Err(Broken::ShuttingDown);
                    }
                    // A command that is still being sent ends when the send has ended.
                    if !lent && let Some(entry) = in_flight.remove(cookie) {
                        let result = result(error, &entry.item);
                        over.push((entry.item, result));
                    }
                }
            }
            incoming.consume(used);
        }
    }

    /// Starts the next receive, into the buffer or directly into a request's memory.
    fn receive(&mut self, mut incoming: Incoming, in_flight: &mut InFlight<Subrequest>) {
        if incoming.bytes().is_empty()
            && let Some(expected) = self.replies.expects()
            && expected.left >= DIRECT
            && let Some(entry) = in_flight.get(expected.cookie)
            && !entry.item.given_up
        {
            entry.item.lent = true;
            let list = std::mem::take(&mut entry.item.list);
            incoming.direct = Some((list, expected.at.into(), expected.left.into()));
            self.direct = Some(expected.cookie);
        }
        if let Err(mut incoming) = self.stream.receive(incoming) {
            self.reclaim(&mut incoming, in_flight);
            self.incoming = Some(incoming);
        }
    }

    /// Regains memory from the kernel, and discards received bytes. Returns `true` if the server
    /// has closed the connection.
    fn drain(&mut self, in_flight: &mut InFlight<Subrequest>) -> bool {
        if let Some((mut outgoing, _)) = self.stream.sent() {
            outgoing.clear(|cookie, list| return_list(in_flight, cookie, list));
            self.spare = Some(outgoing);
        }
        let mut ended = false;
        if let Some((mut incoming, received)) = self.stream.received() {
            self.reclaim(&mut incoming, in_flight);
            // Cancelling our own operations does not mean that the server closed.
            let cancelled = |error: &io::Error| is(error, Errno::CANCELED);
            ended = match &received {
                Ok(len) => *len == 0,
                Err(error) => !cancelled(error),
            };
            self.incoming = Some(incoming);
        }
        if !ended && let Some(mut incoming) = self.incoming.take() {
            incoming.clear();
            if let Err(incoming) = self.stream.receive(incoming) {
                self.incoming = Some(incoming);
            }
        }
        ended
    }
}

impl Subrequest {
    /// Copies received data into the command's memory, at byte offset `at` of the command.
    fn store(&mut self, at: u32, bytes: &[u8]) {
        if !self.given_up {
            self.unstored |= self.list.copy_from(at.into(), bytes) != bytes.len();
        }
    }

    /// Zeroes `len` bytes of the command's memory from offset `at` on, for a hole in a read.
    fn clear(&mut self, at: u32, len: u32) {
        if !self.given_up {
            let mut hole = SegmentList::new();
            self.list.slice(at.into(), len.into(), &mut hole);
            self.unstored |= hole.fill(0) != u64::from(len);
        }
    }
}

impl Drop for Open {
    /// Sends NBD_CMD_DISC to the server, if that does not block.
    fn drop(&mut self) {
        if let Some(mut outgoing) = self.spare.take() {
            outgoing.clear(|_, list| drop(list));
            outgoing.bytes(&Command::Disconnect.header(0, 0, 0));
            let _ = self.stream.send(outgoing);
            self.stream.push();
        }
    }
}

fn return_list(in_flight: &mut InFlight<Subrequest>, cookie: u64, list: SegmentList) {
    if let Some(entry) = in_flight.get(cookie) {
        entry.item.list = list;
        entry.item.lent = false;
    }
}

fn failed(command: Command) -> IoErrorKind {
    match command {
        Command::Read => IoErrorKind::MediaRead,
        _ => IoErrorKind::MediaWrite,
    }
}

/// Returns the result of a command with this NBD error code in its reply.
fn result(error: Option<u32>, subrequest: &Subrequest) -> Result<(), IoError> {
    match error {
        None if subrequest.unstored => Err(IoErrorKind::Memory.into()),
        None => Ok(()),
        Some(error) => {
            let write = subrequest.command != Command::Read;
            // The protocol's error numbers are those of Linux.
            Err(match i32::try_from(error) {
                // The server rejected the request, or had no memory: the medium is not at fault.
                Ok(EINVAL | EOVERFLOW) => IoErrorKind::Invalid.into(),
                Ok(ENOMEM) => IoErrorKind::Busy.into(),
                Ok(errno @ 1..=4095) if subrequest.command == Command::Flush => {
                    IoError::of_sync(errno)
                }
                Ok(errno @ 1..=4095) => match IoError::from_errno(errno, write) {
                    IoError {
                        kind: IoErrorKind::MediaWrite,
                        ..
                    } if subrequest.command == (Command::Write { fua: true }) => {
                        IoError::of_sync(errno)
                    }
                    error => error,
                },
                _ => failed(subrequest.command).into(),
            })
        }
    }
}
