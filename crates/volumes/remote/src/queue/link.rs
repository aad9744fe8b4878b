//! Connection of a queue: sends commands, receives answers, and closes; a new connection then
//! replaces it.
//!
//! ```text
//! Down --a thread has connected--> Open --error, time-out, end of the stream--> Closing --> Down
//!                                                                                  |
//!               commands that were not answered, and whether the server has        |
//!               closed the connection, too, within the time for that  <------------'
//! ```
//!
//! A closing connection sends nothing more, but is read until the server has closed it: servers
//! answer the commands that they have begun before they close.

use super::protocol::{Event, Failure, Session};
use super::subrequest::{Blame, Subrequest};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use volume::{Incoming, Outgoing, RingStream, RingStreams};

/// Maximum number of staged bytes while a message is being sent; above it no command is accepted.
const STAGED: u64 = 1 << 20;
/// Size in bytes of the receive buffer of a connection.
const BUFFER: usize = 128 << 10;
/// Minimum number of outstanding bytes for which data is received directly into its final memory,
/// without a copy.
const DIRECT: u32 = 16 << 10;
/// Interval of checks for commands that have timed out.
const LATE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Outcome of a command on one connection.
#[derive(Debug)]
pub(super) enum CommandResult<A> {
    /// The server has answered the command.
    Answered(Subrequest<A>, A),
    /// The connection has ended before the answer arrived. The command was sent, unless
    /// `subrequest.unsent`.
    Lost(Subrequest<A>),
}

/// Reason why a connection to the server is no longer usable.
#[derive(Debug)]
pub enum Broken<F> {
    /// The server has closed the connection.
    Closed,
    /// The kernel has reported an error of the connection.
    Io(io::Error),
    /// The protocol ends the connection.
    Protocol(F),
    /// A command was not answered within the time limit.
    TimeOut(Duration),
    /// The memory of a cancelled request is in use by the kernel.
    GivenUp,
}

impl<F: Failure> fmt::Display for Broken<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "the {} has closed the connection", F::PEER),
            Self::Io(error) => error.fmt(f),
            Self::Protocol(failure) => failure.fmt(f),
            Self::TimeOut(limit) => write!(f, "no answer to a request for {limit:?}"),
            Self::GivenUp => f.write_str("a request was cancelled while it was sent or received"),
        }
    }
}

impl<F: Failure> Broken<F> {
    fn blame(&self) -> Option<Blame> {
        match self {
            Self::Io(error) if is(error, Errno::FAULT) => Some(Blame::Memory),
            Self::Protocol(failure) if failure.is_blamed() => Some(Blame::Server),
            _ => None,
        }
    }

    /// Returns the side that has ended the connection; `None` if it is still open.
    fn ended(&self) -> Option<ClosedBy> {
        match self {
            Self::Closed => Some(ClosedBy::Server),
            Self::Io(error) if !is(error, Errno::FAULT) => Some(ClosedBy::of(error)),
            _ => None,
        }
    }
}

impl<F> From<io::Error> for Broken<F> {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Side that has ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClosedBy {
    /// The server, which executes no more commands of the connection.
    Server,
    /// This host has closed the connection, or the network has failed.
    Other,
}

impl ClosedBy {
    fn of(error: &io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        match error.kind() {
            BrokenPipe | ConnectionReset => Self::Server,
            _ => Self::Other,
        }
    }
}

struct Open<S: Session> {
    stream: RingStream,
    /// Receive buffer of the connection; `None` while the kernel uses it.
    incoming: Option<Incoming>,
    /// Whether parsing has stopped before the end of the received bytes, because too much is to be
    /// sent first.
    stopped: bool,
    /// Name of the command into which the kernel receives directly, if there is one.
    direct: Option<u64>,
    /// Message of commands that is being assembled, and its number.
    staged: Outgoing,
    batch: u64,
    /// Message buffer to be reused; `None` while the kernel uses it.
    spare: Option<Outgoing>,
    /// Protocol on the connection. As the last field, it is dropped after the connection.
    session: S,
}

enum State<S: Session> {
    Down,
    Open(Open<S>),
    Closing {
        open: Open<S>,
        until: Instant,
        /// Cause for which commands fail after several failed connections, if there is one.
        blame: Option<Blame>,
        /// Side that has ended the connection; `None` while it is open.
        ended: Option<ClosedBy>,
    },
}

/// Place for one connection of a queue, which may be down.
pub struct Link<S: Session> {
    state: State<S>,
    /// Time of the last check for commands that have timed out.
    looked: Option<Instant>,
}

impl<S: Session> Link<S> {
    pub(super) fn new() -> Self {
        Self {
            state: State::Down,
            looked: None,
        }
    }

    /// Starts to use a new connection, with a socket in blocking mode. The link has to be down.
    pub fn open(&mut self, streams: &RingStreams, fd: OwnedFd, session: S) {
        self.state = State::Open(Open {
            stream: streams.open(fd),
            incoming: Some(Incoming::new(BUFFER)),
            stopped: false,
            direct: None,
            staged: Outgoing::new(),
            batch: 1,
            spare: Some(Outgoing::new()),
            session,
        });
    }

    fn opened(&self) -> Option<&Open<S>> {
        match &self.state {
            State::Open(open) => Some(open),
            _ => None,
        }
    }

    /// Returns the protocol of an open or closing connection.
    pub fn session(&self) -> Option<&S> {
        match &self.state {
            State::Down => None,
            State::Open(open) | State::Closing { open, .. } => Some(&open.session),
        }
    }

    /// Returns the number of commands that are staged, being sent, or executed by the server.
    pub fn outstanding(&self) -> usize {
        self.session().map_or(0, S::outstanding)
    }

    /// Returns whether another command can be added to the message.
    pub fn has_room(&self) -> bool {
        self.opened()
            .is_some_and(|open| !open.session.is_full() && open.staged.left() < STAGED)
    }

    /// Returns whether the message is empty, so that the next command begins a batch.
    pub(super) fn begins(&self) -> bool {
        self.opened().is_none_or(|open| open.staged.left() == 0)
    }

    /// Returns whether the connection is open, so that commands can be sent.
    pub fn is_open(&self) -> bool {
        self.opened().is_some()
    }

    /// Returns whether the link has no connection, not even a closing one.
    pub fn is_down(&self) -> bool {
        matches!(self.state, State::Down)
    }

    /// Returns whether the link waits for an event that may not be signalled: the server's close.
    pub(super) fn is_timed(&self) -> bool {
        matches!(self.state, State::Closing { .. })
    }

    /// Returns whether bytes were received, or a message can be sent.
    pub(super) fn has_news(&self) -> bool {
        match &self.state {
            State::Down => false,
            State::Open(open) => {
                open.stream.has_news()
                    || (open.incoming.is_some() && !open.stopped)
                    || (open.staged.left() > 0 && open.spare.is_some())
            }
            State::Closing { open, .. } => open.stream.has_news(),
        }
    }

    /// Adds a command to the next message.
    ///
    /// # Errors
    /// Returns `subrequest` if there is no room.
    pub(super) fn stage(
        &mut self,
        mut subrequest: Subrequest<S::Answer>,
    ) -> Result<(), Subrequest<S::Answer>> {
        let State::Open(open) = &mut self.state else {
            return Err(subrequest);
        };
        subrequest.batch = open.batch;
        subrequest.answer = None;
        open.session.stage(subrequest, &mut open.staged)
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
        if let Some(open) = self.opened() {
            open.stream.push();
        }
    }

    /// Handles received bytes and completed sends. Appends finished commands to `over`.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        timeout: Duration,
        over: &mut Vec<CommandResult<S::Answer>>,
    ) -> Result<(), Broken<S::Failure>> {
        let State::Open(open) = &mut self.state else {
            return Ok(());
        };
        open.poll(over)?;
        open.send();
        let due = |at: Instant| now.saturating_duration_since(at) >= LATE_CHECK_INTERVAL;
        if open.session.outstanding() > 0 && self.looked.is_none_or(due) {
            self.looked = Some(now);
            let late = |subrequest: &mut Subrequest<S::Answer>| {
                now.saturating_duration_since(subrequest.since) >= timeout
            };
            if open.session.commands().any(late) {
                return Err(Broken::TimeOut(timeout));
            }
        }
        Ok(())
    }

    /// Starts to close the connection for the reason `why`.
    pub fn close(&mut self, why: &Broken<S::Failure>, now: Instant) {
        let state = std::mem::replace(&mut self.state, State::Down);
        let State::Open(mut open) = state else {
            self.state = state;
            return;
        };
        // Commands that were not sent yet are sent on another connection.
        let Open {
            staged, session, ..
        } = &mut open;
        staged.clear(|name, list| {
            session.returned(name, list);
        });
        let ended = why.ended();
        if ended.is_some() {
            open.stream.shut_down()
        } else {
            if let Broken::Protocol(failure) = why {
                // The reason is reported if that can be done without waiting.
                open.farewell(Some(failure));
            }
            // The server may still answer the commands that it has begun.
            open.stream.end_sending();
        }
        if matches!(why, Broken::GivenUp) {
            // The memory is needed at once.
            open.stream.cancel();
        }
        self.state = State::Closing {
            open,
            until: now.checked_add(S::CLOSING).unwrap_or(now),
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

    /// Continues closing the connection. Returns the side that ended it when it is closed; its
    /// commands are then in `over`, and [`Link::reset`] has to follow.
    pub(super) fn closed(
        &mut self,
        now: Instant,
        over: &mut Vec<CommandResult<S::Answer>>,
    ) -> Option<ClosedBy> {
        let State::Closing {
            open,
            until,
            blame,
            ended,
        } = &mut self.state
        else {
            return None;
        };
        let drained = open.drain(ended.is_some());
        *ended = ended.or(drained);
        if ended.is_none() && now >= *until {
            open.stream.shut_down();
            *ended = Some(ClosedBy::Other);
        }
        let by = (*ended)?;
        if open.spare.is_none() || open.incoming.is_none() {
            return None;
        }
        let batch = open.batch;
        for mut subrequest in open.session.drain() {
            subrequest.lent = 0;
            subrequest.unsent = subrequest.batch >= batch;
            over.push(match subrequest.answer.take() {
                Some(answer) => CommandResult::Answered(subrequest, answer),
                None => {
                    if let Some(blame) = *blame {
                        subrequest.violations += 1;
                        subrequest.blame = blame;
                    }
                    CommandResult::Lost(subrequest)
                }
            });
        }
        Some(by)
    }

    /// Drops a closed connection.
    pub(super) fn reset(&mut self) {
        self.state = State::Down;
    }

    /// Abandons the commands of a cancelled request. `take` receives the commands, except those
    /// with memory in use by the kernel. Returns `true` if there are such.
    pub(super) fn give_up(
        &mut self,
        parent: usize,
        mut take: impl FnMut(&mut Subrequest<S::Answer>),
    ) -> bool {
        let (State::Open(open) | State::Closing { open, .. }) = &mut self.state else {
            return false;
        };
        let mut lent = false;
        for subrequest in open.session.commands() {
            if subrequest.parent != parent || subrequest.given_up {
                continue;
            }
            if subrequest.lent > 0 {
                lent = true;
            } else {
                subrequest.given_up = true;
                take(subrequest);
            }
        }
        lent
    }
}

impl<S: Session> Open<S> {
    fn send(&mut self) -> bool {
        if self.staged.left() == 0 {
            return false;
        }
        let Some(spare) = self.spare.take() else {
            return false;
        };
        let outgoing = std::mem::replace(&mut self.staged, spare);
        match self.stream.send(outgoing) {
            Ok(()) => self.batch += 1,
            Err(outgoing) => {
                // The ring is full: the next round tries again.
                let spare = std::mem::replace(&mut self.staged, outgoing);
                self.spare = Some(spare);
            }
        }
        true
    }

    fn poll(&mut self, over: &mut Vec<CommandResult<S::Answer>>) -> Result<(), Broken<S::Failure>> {
        if let Some((mut outgoing, sent)) = self.stream.sent() {
            outgoing.advance(*sent.as_ref().unwrap_or(&0));
            if sent.is_ok() && outgoing.left() > 0 {
                if let Err(outgoing) = self.stream.send(outgoing) {
                    self.end_of_sending(outgoing, over);
                    return Err(Broken::Io(io::ErrorKind::WouldBlock.into()));
                }
            } else {
                self.end_of_sending(outgoing, over);
                sent?;
            }
        }
        if let Some((mut incoming, received)) = self.stream.received() {
            // At most the expected number of bytes, which has 32 bits.
            let direct = incoming.received(*received.as_ref().unwrap_or(&0)) as u32;
            self.reclaim(&mut incoming);
            self.incoming = Some(incoming);
            match received {
                Ok(0) => return Err(Broken::Closed),
                Ok(_) => self.session.took(direct),
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(mut incoming) = self.incoming.take() {
            let parsed = self.parse(&mut incoming, over);
            if parsed.is_err() || self.stopped {
                self.incoming = Some(incoming);
                return parsed;
            }
            self.receive(incoming);
        }
        Ok(())
    }

    /// Regains the memory of a message that has been sent, and ends its commands that were answered
    /// meanwhile.
    fn end_of_sending(&mut self, mut outgoing: Outgoing, over: &mut Vec<CommandResult<S::Answer>>) {
        let session = &mut self.session;
        outgoing.clear(|name, list| {
            let name = session.returned(name, list);
            let answered = session
                .get(name)
                .is_some_and(|subrequest| subrequest.lent == 0 && subrequest.answer.is_some());
            if answered
                && let Some(mut subrequest) = session.remove(name)
                && let Some(answer) = subrequest.answer.take()
            {
                over.push(CommandResult::Answered(subrequest, answer));
            }
        });
        self.spare = Some(outgoing);
        self.stopped = false;
    }

    fn reclaim(&mut self, incoming: &mut Incoming) {
        if let Some((list, ..)) = incoming.direct.take()
            && let Some(name) = self.direct.take()
        {
            self.session.returned(name, list);
        }
    }

    fn parse(
        &mut self,
        incoming: &mut Incoming,
        over: &mut Vec<CommandResult<S::Answer>>,
    ) -> Result<(), Broken<S::Failure>> {
        loop {
            // A server that requests data and does not read it gets no further commands.
            if S::REQUESTS_DATA && self.staged.left() >= STAGED {
                self.send();
                if self.staged.left() >= STAGED {
                    self.stopped = true;
                    return Ok(());
                }
            }
            let session = &mut self.session;
            let (used, event) = session
                .next(incoming.bytes(), &mut self.staged)
                .map_err(Broken::Protocol)?;
            match event {
                Event::More if used == 0 => return Ok(()),
                Event::More => {}
                Event::Data { name, at, bytes } => {
                    if let Some(subrequest) = session.get(name) {
                        subrequest.store(at, bytes);
                    }
                }
                Event::Hole { name, at, len } => {
                    if let Some(subrequest) = session.get(name) {
                        subrequest.clear(at, len);
                    }
                }
                Event::End { name, answer } => match session.get(name) {
                    // The command ends when its message has been sent.
                    Some(subrequest) if subrequest.lent > 0 => subrequest.answer = Some(answer),
                    _ => {
                        if let Some(subrequest) = session.remove(name) {
                            over.push(CommandResult::Answered(subrequest, answer));
                        }
                    }
                },
            }
            incoming.consume(used);
        }
    }

    /// Starts the next receive, into the buffer or directly into a request's memory.
    fn receive(&mut self, mut incoming: Incoming) {
        if incoming.bytes().is_empty()
            && let Some(expected) = self.session.expects()
            && expected.left >= DIRECT
            && let Some(subrequest) = self.session.get(expected.name)
            && !subrequest.given_up
        {
            subrequest.lent += 1;
            let list = std::mem::take(&mut subrequest.list);
            incoming.direct = Some((list, expected.at.into(), expected.left.into()));
            self.direct = Some(expected.name);
        }
        if let Err(mut incoming) = self.stream.receive(incoming) {
            self.reclaim(&mut incoming);
            self.incoming = Some(incoming);
        }
    }

    /// Regains memory from the kernel, and discards received bytes unless the connection has
    /// `ended`. Returns the side that ended the connection.
    fn drain(&mut self, ended: bool) -> Option<ClosedBy> {
        if let Some((mut outgoing, _)) = self.stream.sent() {
            outgoing.clear(|name, list| {
                self.session.returned(name, list);
            });
            self.spare = Some(outgoing);
        }
        let mut by = None;
        if let Some((mut incoming, received)) = self.stream.received() {
            self.reclaim(&mut incoming);
            by = match &received {
                Ok(0) => Some(ClosedBy::Server),
                Ok(_) => None,
                // Cancelling our own operations does not mean that the server closed.
                Err(error) if is(error, Errno::CANCELED) => None,
                Err(error) => Some(ClosedBy::of(error)),
            };
            self.incoming = Some(incoming);
        }
        if !ended
            && by.is_none()
            && let Some(mut incoming) = self.incoming.take()
        {
            incoming.clear();
            if let Err(incoming) = self.stream.receive(incoming) {
                self.incoming = Some(incoming);
            }
        }
        by
    }

    /// Sends the protocol's last bytes to the server, if that does not block.
    fn farewell(&mut self, why: Option<&S::Failure>) {
        let Some(mut last) = self.spare.take() else {
            return;
        };
        self.session.farewell(why, &mut last);
        if last.left() == 0 {
            self.spare = Some(last);
            return;
        }
        match self.stream.send(last) {
            Ok(()) => self.stream.push(),
            Err(last) => self.spare = Some(last),
        }
    }
}

impl<S: Session> Drop for Open<S> {
    fn drop(&mut self) {
        self.farewell(None);
    }
}
