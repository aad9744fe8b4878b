//! Connection of one I/O queue: sends commands, receives completions, and closes; a new connection
//! then replaces it.
//!
//! ```text
//! Down --a thread has connected--> Open --error, time-out, end of the stream--> Closing --> Down
//!                                                                                   |
//!                commands that were not answered, and whether the controller has    |
//!                closed the connection, too, within the time for that  <------------'
//! ```

use super::subrequest::{Answered, CommandKind, Subrequest, range_bytes};
use crate::connect::NamespaceProperties;
use dma::SegmentList;
use nvme::sgl::SglDescriptor;
use nvme_tcp::{
    Answer, Answers, CommandInfo, ConnectionLimits, InFlight, Terminated, Violation, Writer, digest,
};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use volume::{Incoming, Outgoing, RingStream, RingStreams};

/// Maximum number of staged bytes while a message is being sent. Above it no command is accepted,
/// and no PDU that requests more data is parsed.
const STAGED: u64 = 1 << 20;
/// Size in bytes of the receive buffer of a connection.
const BUFFER: usize = 128 << 10;
/// Minimum number of outstanding bytes for which data is received directly into its final memory,
/// without a copy.
const DIRECT: u32 = 16 << 10;
/// Time limit for a controller to close a connection after this host has closed the sending side.
const CLOSING: Duration = Duration::from_secs(1);
/// Maximum number of unused segment lists that a connection keeps for reuse.
const SPARE_LISTS: usize = 64;
/// Bit in the identifier of a sent list: it holds a piece of a command's memory, not all of it.
const PIECE: u64 = 1 << 32;
/// Number of bytes that one step copies and adds to the data digest.
const CHUNK: usize = 4096;

/// Connection of an I/O queue that a path's thread has established for a worker.
#[derive(Debug)]
pub(crate) struct Ready {
    pub fd: OwnedFd,
    pub limits: ConnectionLimits,
    /// Number of the path's association that the connection belongs to.
    pub epoch: u64,
    pub qid: u16,
    /// Maximum number of outstanding commands on the queue.
    pub depth: u16,
    /// Maximum number of bytes of in-capsule data.
    pub in_capsule: u32,
}

/// Outcome of a command on one connection.
#[derive(Debug)]
pub(super) enum CommandResult {
    /// The controller has completed the command.
    Answered(Subrequest, Answered),
    /// The connection has ended before the completion arrived. The command was sent, unless
    /// `subrequest.unsent`.
    Lost(Subrequest),
}

/// Reason why a connection to a controller is no longer usable.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the controller has closed the connection")]
    Closed,
    #[error("{0}")]
    Io(io::Error),
    #[error("the controller breaks the protocol: {0}")]
    Violation(Violation),
    #[error("the controller ends the connection: {0}")]
    Terminated(Terminated),
    #[error("no answer to a command for {0:?}")]
    TimeOut(Duration),
    #[error("a request was cancelled while it was sent or received")]
    GivenUp,
    #[error("its association has ended")]
    Association,
}

impl Broken {
    /// Returns whether the kernel could not read or write the memory of a request.
    pub(super) fn is_fault(&self) -> bool {
        matches!(self, Self::Io(error) if is(error, Errno::FAULT))
    }

    /// Returns whether a command counts this failure, so that it fails after several of them.
    pub(super) fn is_blamed(&self) -> bool {
        matches!(self, Self::Violation(_) | Self::Terminated(_)) || self.is_fault()
    }

    /// Returns the reason as a text, for the thread that serves the path.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Closed => "the controller has closed the connection",
            Self::Io(_) => "the connection has failed",
            Self::Violation(_) => "the controller breaks the protocol",
            Self::Terminated(_) => "the controller ends the connection",
            Self::TimeOut(_) => "a command was not answered in time",
            Self::GivenUp => "a request was cancelled while it was sent or received",
            Self::Association => "its association has ended",
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

impl From<Violation> for Broken {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

struct Open {
    stream: RingStream,
    writer: Writer,
    answers: Answers,
    in_capsule: u32,
    epoch: u64,
    qid: u16,
    /// Receive buffer of the connection; `None` while the kernel uses it.
    incoming: Option<Incoming>,
    /// Whether parsing has stopped before the end of the received bytes, because too much is to be
    /// sent first.
    stopped: bool,
    /// Identifier of the command into which the kernel receives directly, if there is one.
    direct: Option<u16>,
    /// Message of PDUs that is being assembled, and its number.
    staged: Outgoing,
    batch: u64,
    /// Message buffer to be reused; `None` while the kernel uses it.
    spare: Option<Outgoing>,
    /// Unused segment lists that are kept for reuse.
    lists: Vec<SegmentList>,
    chunk: Box<[u8; CHUNK]>,
}

enum State {
    Down,
    Open(Open),
    Closing {
        open: Open,
        until: Instant,
        /// Whether commands count this failure, to fail after several of them.
        blamed: bool,
        /// Side that has ended the connection; `None` while it is open.
        ended: Option<ClosedBy>,
    },
}

/// Side that has ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClosedBy {
    /// The controller, which executes no more commands of the connection.
    Controller,
    /// This host has closed the connection, or the network has failed.
    Other,
}

impl ClosedBy {
    fn of(error: &io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        match error.kind() {
            BrokenPipe | ConnectionReset => Self::Controller,
            _ => Self::Other,
        }
    }
}

/// Place for one connection of a queue, which may be down.
pub(super) struct Link {
    state: State,
    in_flight: InFlight<Subrequest>,
    looked: Option<Instant>,
}

impl Link {
    pub(super) fn new() -> Self {
        Self {
            state: State::Down,
            in_flight: InFlight::new(1),
            looked: None,
        }
    }

    /// Starts to use a new connection.
    ///
    /// # Errors
    /// Returns `ready` if the previous connection has not ended.
    pub(super) fn opened(&mut self, streams: &RingStreams, ready: Ready) -> Result<(), Ready> {
        if !matches!(self.state, State::Down) {
            return Err(ready);
        }
        self.in_flight = InFlight::new(ready.depth);
        self.state = State::Open(Open {
            stream: streams.open(ready.fd),
            writer: Writer::new(ready.limits),
            answers: Answers::new(&ready.limits),
            in_capsule: ready.in_capsule,
            epoch: ready.epoch,
            qid: ready.qid,
            incoming: Some(Incoming::new(BUFFER)),
            stopped: false,
            direct: None,
            staged: Outgoing::new(),
            batch: 1,
            spare: Some(Outgoing::new()),
            lists: Vec::new(),
            chunk: Box::new([0; CHUNK]),
        });
        Ok(())
    }

    /// Returns the number of commands that are staged, being sent, or executed by the controller.
    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    fn open(&self) -> Option<&Open> {
        match &self.state {
            State::Open(open) => Some(open),
            _ => None,
        }
    }

    /// Returns whether another command can be added to the message.
    pub(super) fn has_room(&self) -> bool {
        !self.in_flight.is_full() && self.open().is_some_and(|open| open.staged.left() < STAGED)
    }

    /// Returns whether the message is empty, so that the next command begins a batch.
    pub(super) fn begins(&self) -> bool {
        self.open().is_none_or(|open| open.staged.left() == 0)
    }

    /// Returns whether the connection is open, so that commands can be sent.
    pub(super) fn is_open(&self) -> bool {
        self.open().is_some()
    }

    /// Returns the association number and the queue identifier of an open or closing connection.
    pub(super) fn identity(&self) -> Option<(u64, u16)> {
        match &self.state {
            State::Down => None,
            State::Open(open) | State::Closing { open, .. } => Some((open.epoch, open.qid)),
        }
    }

    /// Returns whether the link waits for an event that may not be signalled: the controller's
    /// close.
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
        mut subrequest: Subrequest,
        facts: &NamespaceProperties,
    ) -> Result<(), Subrequest> {
        let State::Open(open) = &mut self.state else {
            return Err(subrequest);
        };
        let (mut command, range) = subrequest.command(facts);
        let (data_in, data_out) = (subrequest.data_in(), subrequest.data_out());
        let inside = data_out > 0 && data_out <= open.in_capsule;
        let range_len = range
            .as_ref()
            .map_or(0, |range| range_bytes(range).len() as u32);
        let capsule = if inside { data_out } else { range_len };
        let info = CommandInfo {
            data_in,
            whole: true,
            data_out: if inside { 0 } else { data_out },
        };
        command.set_sgl(match capsule {
            // Length in bytes: the data of a read, or of a write that is sent in messages of its
            // own.
            0 => SglDescriptor::transport(data_in.max(data_out)),
            capsule => SglDescriptor::in_capsule(0, capsule),
        });
        subrequest.batch = open.batch;
        subrequest.owed = if inside { 0 } else { data_out };
        subrequest.answer = None;
        let cid = self.in_flight.insert(info, subrequest)?;
        command.cid = cid.into();
        open.staged.bytes(&open.writer.command(&command, capsule));
        if let Some(range) = &range {
            open.stage_bytes(range_bytes(range));
        } else if inside && let Some(entry) = self.in_flight.get(cid) {
            open.stage_data(cid, &mut entry.item, 0, data_out);
        }
        Ok(())
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
        open.poll(&mut self.in_flight, over)?;
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
        let state = std::mem::replace(&mut self.state, State::Down);
        let State::Open(mut open) = state else {
            self.state = state;
            return;
        };
        // Commands that were not sent yet are sent on another path.
        open.staged.clear(|name, list| {
            return_list(&mut self.in_flight, &mut open.lists, name, list);
        });
        let ended = match why {
            Broken::Closed => Some(ClosedBy::Controller),
            Broken::Io(error) if !why.is_fault() => Some(ClosedBy::of(error)),
            _ => None,
        };
        match ended {
            Some(_) => open.stream.shut_down(),
            None => {
                if let Broken::Violation(violation) = why
                    && let Some(mut last) = open.spare.take()
                {
                    // The reason is reported if that can be done without waiting.
                    last.bytes(&violation.h2c_term_req());
                    match open.stream.send(last) {
                        Ok(()) => open.stream.push(),
                        Err(last) => open.spare = Some(last),
                    }
                }
                // The controller may still complete the commands that it has begun.
                open.stream.end_sending();
            }
        }
        if matches!(why, Broken::GivenUp) {
            // The memory is needed at once.
            open.stream.cancel();
        }
        self.state = State::Closing {
            open,
            until: now.checked_add(CLOSING).unwrap_or(now),
            blamed: why.is_blamed(),
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
    /// commands are then in `over`.
    pub(super) fn closed(
        &mut self,
        now: Instant,
        over: &mut Vec<CommandResult>,
    ) -> Option<ClosedBy> {
        let State::Closing {
            open,
            until,
            blamed,
            ended,
        } = &mut self.state
        else {
            return None;
        };
        let drained = open.drain(&mut self.in_flight, ended.is_some());
        if ended.is_none() {
            *ended = drained;
        }
        if ended.is_none() && now >= *until {
            open.stream.shut_down();
            *ended = Some(ClosedBy::Other);
        }
        let by = (*ended)?;
        if open.spare.is_none() || open.incoming.is_none() {
            return None;
        }
        let (blamed, batch) = (u8::from(*blamed), open.batch);
        for entry in self.in_flight.drain() {
            let mut subrequest = entry.item;
            subrequest.lent = 0;
            subrequest.unsent = subrequest.batch >= batch;
            match subrequest.answer.take() {
                Some(answer) => over.push(CommandResult::Answered(subrequest, answer)),
                None => {
                    subrequest.violations += blamed;
                    over.push(CommandResult::Lost(subrequest));
                }
            }
        }
        self.state = State::Down;
        Some(by)
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

impl Open {
    /// Adds bytes of a PDU to the message, and to the data digest.
    fn stage_bytes(&mut self, bytes: &[u8]) {
        self.staged.bytes(bytes);
        if self.writer.data_digest() {
            self.staged.bytes(&digest::crc32c(bytes).to_le_bytes());
        }
    }

    /// Adds `len` bytes of a write's data to the message, after their PDU header.
    fn stage_data(&mut self, cid: u16, subrequest: &mut Subrequest, at: u32, len: u32) {
        if self.writer.data_digest() {
            // The sent bytes must be those of the digest. A guest that changes its memory meanwhile
            // would break the connection otherwise.
            return self.stage_copy(subrequest, at, len);
        }
        if at == 0 && len == subrequest.len && subrequest.lent == 0 {
            subrequest.lent += 1;
            self.staged
                .data(cid.into(), std::mem::take(&mut subrequest.list));
            return;
        }
        let mut piece = self.lists.pop().unwrap_or_default();
        if subrequest.list.slice(at.into(), len.into(), &mut piece) != u64::from(len) {
            // The memory is shorter than the request's length. Zeroes keep the protocol intact, and
            // the request fails.
            subrequest.unstored = true;
            self.lists.push(piece);
            return self.stage_copy(subrequest, at, len);
        }
        subrequest.lent += 1;
        self.staged.data(u64::from(cid) | PIECE, piece);
    }

    fn stage_copy(&mut self, subrequest: &mut Subrequest, at: u32, len: u32) {
        let mut sum = digest::RunningDigest::new();
        let mut done = 0;
        while done < len {
            let count = (len - done).min(CHUNK as u32) as usize;
            let chunk = self.chunk.get_mut(..count).unwrap_or_default();
            let copied = subrequest
                .list
                .copy_to(u64::from(at) + u64::from(done), chunk);
            if copied < chunk.len() {
                subrequest.unstored = true;
                chunk.iter_mut().skip(copied).for_each(|byte| *byte = 0);
            }
            sum.update(chunk);
            self.staged.bytes(chunk);
            done += count as u32;
        }
        if self.writer.data_digest() {
            self.staged.bytes(&sum.value().to_le_bytes());
        }
    }

    /// Sends the part of a write's data that the controller has requested by an R2T PDU.
    fn transfer(&mut self, cid: u16, subrequest: &mut Subrequest, tag: u16, at: u32, len: u32) {
        let most = self.writer.limits().h2c_data;
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(most);
            let from = at.saturating_add(done);
            done += piece;
            let header = self.writer.h2c_data(cid, tag, from, piece, done == len);
            self.staged.bytes(&header);
            self.stage_data(cid, subrequest, from, piece);
        }
        subrequest.owed = subrequest.owed.saturating_sub(len);
    }

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
        }
        if let Some((mut incoming, received)) = self.stream.received() {
            match received {
                Ok(0) => {
                    self.reclaim(&mut incoming, in_flight);
                    self.incoming = Some(incoming);
                    return Err(Broken::Closed);
                }
                Ok(len) => self.received(&mut incoming, len, in_flight),
                Err(error) => {
                    self.reclaim(&mut incoming, in_flight);
                    self.incoming = Some(incoming);
                    return Err(error.into());
                }
            }
            self.incoming = Some(incoming);
        }
        if let Some(mut incoming) = self.incoming.take() {
            let parsed = self.parse(&mut incoming, in_flight, over);
            if parsed.is_err() || self.stopped {
                self.incoming = Some(incoming);
                return parsed;
            }
            self.receive(incoming, in_flight);
        }
        Ok(())
    }

    /// Regains the memory of a message that has been sent, and ends its commands that were
    /// completed meanwhile.
    fn end_of_sending(
        &mut self,
        mut outgoing: Outgoing,
        in_flight: &mut InFlight<Subrequest>,
        over: &mut Vec<CommandResult>,
    ) {
        let lists = &mut self.lists;
        outgoing.clear(|name, list| {
            let cid = return_list(in_flight, lists, name, list);
            let answered = in_flight
                .get(cid)
                .is_some_and(|entry| entry.item.lent == 0 && entry.item.answer.is_some());
            if answered && let Some(entry) = in_flight.remove(cid) {
                let mut subrequest = entry.item;
                if let Some(answer) = subrequest.answer.take() {
                    over.push(CommandResult::Answered(subrequest, answer));
                }
            }
        });
        self.spare = Some(outgoing);
        self.stopped = false;
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
        self.answers.took(direct as u32);
    }

    fn reclaim(&mut self, incoming: &mut Incoming, in_flight: &mut InFlight<Subrequest>) {
        if let Some((list, ..)) = incoming.direct.take()
            && let Some(cid) = self.direct.take()
        {
            return_list(in_flight, &mut self.lists, cid.into(), list);
        }
    }

    fn parse(
        &mut self,
        incoming: &mut Incoming,
        in_flight: &mut InFlight<Subrequest>,
        over: &mut Vec<CommandResult>,
    ) -> Result<(), Broken> {
        loop {
            // A controller that requests data and does not read it gets no further commands.
            if self.staged.left() >= STAGED {
                self.send();
                if self.staged.left() >= STAGED {
                    self.stopped = true;
                    return Ok(());
                }
            }
            let (used, answer) = self.answers.next(incoming.bytes(), in_flight)?;
            match answer {
                Answer::More if used == 0 => return Ok(()),
                Answer::More => {}
                Answer::Data { cid, at, bytes } => {
                    if let Some(entry) = in_flight.get(cid) {
                        entry.item.store(at, bytes);
                    }
                }
                Answer::Transfer { cid, tag, at, len } => {
                    if let Some(entry) = in_flight.get(cid) {
                        self.transfer(cid, &mut entry.item, tag, at, len);
                    }
                }
                Answer::End {
                    cid,
                    completion,
                    corrupt,
                } => {
                    let status = completion.status();
                    let answer = Answered { status, corrupt };
                    let lent = in_flight.get(cid).is_some_and(|entry| entry.item.lent > 0);
                    if !lent {
                        if let Some(entry) = in_flight.remove(cid) {
                            over.push(CommandResult::Answered(entry.item, answer));
                        }
                    } else if let Some(entry) = in_flight.get(cid) {
                        // The command ends when its message has been sent.
                        entry.item.answer = Some(answer);
                    }
                }
                Answer::Terminated(why) => return Err(Broken::Terminated(why)),
            }
            incoming.consume(used);
        }
    }

    /// Starts the next receive, into the buffer or directly into a request's memory.
    fn receive(&mut self, mut incoming: Incoming, in_flight: &mut InFlight<Subrequest>) {
        if incoming.bytes().is_empty()
            && let Some(expected) = self.answers.expects()
            && expected.left >= DIRECT
            && let Some(entry) = in_flight.get(expected.cid)
            && !entry.item.given_up
        {
            entry.item.lent += 1;
            let list = std::mem::take(&mut entry.item.list);
            incoming.direct = Some((list, expected.at.into(), expected.left.into()));
            self.direct = Some(expected.cid);
        }
        if let Err(mut incoming) = self.stream.receive(incoming) {
            self.reclaim(&mut incoming, in_flight);
            self.incoming = Some(incoming);
        }
    }

    /// Regains memory from the kernel, and discards received bytes unless the connection has
    /// `ended`. Returns the side that ended the connection.
    fn drain(&mut self, in_flight: &mut InFlight<Subrequest>, ended: bool) -> Option<ClosedBy> {
        if let Some((mut outgoing, _)) = self.stream.sent() {
            let lists = &mut self.lists;
            outgoing.clear(|name, list| {
                return_list(in_flight, lists, name, list);
            });
            self.spare = Some(outgoing);
        }
        let mut by = None;
        if let Some((mut incoming, received)) = self.stream.received() {
            self.reclaim(&mut incoming, in_flight);
            by = match &received {
                Ok(0) => Some(ClosedBy::Controller),
                Ok(_) => None,
                // Cancelling our own operations does not mean that the controller closed.
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
}

/// Returns a segment list that the kernel no longer uses to its command, and the command's
/// identifier.
fn return_list(
    in_flight: &mut InFlight<Subrequest>,
    lists: &mut Vec<SegmentList>,
    name: u64,
    mut list: SegmentList,
) -> u16 {
    // The identifier is in the low bits.
    let cid = name as u16;
    let entry = in_flight.get(cid);
    if let Some(entry) = entry {
        entry.item.lent = entry.item.lent.saturating_sub(1);
        if name & PIECE == 0 {
            entry.item.list = list;
            return cid;
        }
    }
    if name & PIECE != 0 && lists.len() < SPARE_LISTS {
        list.clear();
        lists.push(list);
    }
    cid
}

impl CommandKind {
    /// Returns the kind of error of a command that fails because of its controller.
    pub(super) const fn failed(self) -> volume::IoErrorKind {
        match self {
            Self::Read => volume::IoErrorKind::MediaRead,
            _ => volume::IoErrorKind::MediaWrite,
        }
    }
}
