//! State of a connection for the process that continues with it, written in an order that answers
//! each request once, wherever this process is killed.
//!
//! A byte is in one place at a time: in the client's socket, in the session's memory, in the pipe
//! of replies, or with the client. A single kernel call moves it, and the kernel, which outlives
//! this process, also records the progress:
//!
//! - *Requests.* Bytes are peeked at (`MSG_PEEK`), copied into the session's memory, and then moved
//!   out of the socket into a pipe that counts them (`splice`). The pipe's level was noted before,
//!   so the next process knows to the byte how much was taken. Descriptors that arrive with the
//!   bytes are kept before. Messages without reply may be handled before they are moved.
//! - *Replies.* A reply is written into a pipe, and moved from there into the socket (`splice`).
//!   Bytes in the pipe are unsent; bytes no longer in it are sent. Until the reply is completely in
//!   the pipe, the next process handles its request again, which is harmless for every request.
//! - *A reply with a descriptor* is sent in two parts: its head with the descriptor, by `sendmsg`,
//!   which no pipe can do, and the rest as above. The descriptor is an open file description of its
//!   own that holds a lock ([`witness`]); this process has the only copy until it is sent. A client
//!   that has the head waits for the rest, and has the descriptor. The lock therefore exists in the
//!   next process exactly if the head was sent.
//!
//! One word ([`CurrentMessage`]) names the message in hand and its progress: a single store ends
//! one message and begins the next. A store that marks a step as done follows that step; a store
//! that marks a step as begun precedes it.

mod layout;
mod replies;
mod resume;
mod taking;
mod witness;

pub use layout::{SESSION, SESSION_OLDEST_READ, SESSION_VERSION};
pub(crate) use taking::Arriving;
use taking::Looks;

use layout::{ABANDONED, CAPABILITIES, CurrentMessage, Phase, SessionWords, Word};
use receive::ReadError;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use state_memory::{Area, DescriptorKind, DescriptorLedger, Ticket};
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

use crate::version::Capabilities;

/// Kind of a kept descriptor that a client has sent.
pub const SENT: DescriptorKind = DescriptorKind(64);
/// Kind of a descriptor that was refused: it has a number, but the keeper does not hold it.
pub const REFUSED: DescriptorKind = DescriptorKind(65);

/// Maximum number of messages that a late keeper has no room for. With more, the client waits: a
/// client that maps and unmaps memory without end would use up this process's descriptors.
const MAX_BACKLOG: usize = 256;

/// Note of a descriptor that belongs to the device.
const SETTLED: u64 = 0;

/// Reason why a connection, or its journal, cannot continue in this process.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The journal's memory is too small, or no memory is left.
    #[error("no memory for the session")]
    Memory,
    /// The state that the previous process has left is inconsistent.
    #[error("what is left of the session is damaged: {0}")]
    Damaged(&'static str),
    /// The keeper could not hold all of the client's descriptors for the previous process.
    #[error("the previous process could not have this client's descriptors kept")]
    Abandoned,
    /// A descriptor that the state names is missing.
    #[error("a descriptor of the client's was not kept")]
    Missing,
    /// A pipe cannot be created or used.
    #[error("a pipe")]
    Pipe(#[source] Errno),
}

/// Pipe of which the keeper holds both ends.
#[derive(Debug)]
pub struct Pipe {
    /// Read end of the pipe.
    pub reader: OwnedFd,
    /// Write end of the pipe.
    pub writer: OwnedFd,
}

impl Pipe {
    /// Creates a pipe.
    ///
    /// # Errors
    /// The kernel's error when no descriptor is left.
    pub fn new() -> Result<Self, Errno> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(Self { reader, writer })
    }

    /// Returns the number of bytes that the pipe contains.
    fn level(&self) -> Result<usize, Errno> {
        let level = rustix::io::ioctl_fionread(&self.reader)?;
        usize::try_from(level).map_err(|_| Errno::OVERFLOW)
    }

    /// Reads and discards all bytes of the pipe. No other process writes into it.
    fn drain(&self) {
        let mut bytes = [0; 4096];
        loop {
            match rustix::io::read(&self.reader, &mut bytes) {
                Ok(len) if len == bytes.len() => {}
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => return,
            }
        }
    }
}

/// List of the disk's kept descriptors, shared by the connection and its device.
pub type SharedLedger = Rc<RefCell<dyn DescriptorLedger>>;

/// Journal of a connection, from which the next process continues it.
#[derive(Debug)]
pub struct Journal {
    words: SessionWords,
    ledger: SharedLedger,
    /// Pipe through which replies are sent to the client.
    replies: Pipe,
    /// Pipe that counts the bytes read from the client's socket; only its fill level matters.
    counter: Pipe,
    /// Keeper's number of the client's socket; `None` until the keeper holds it.
    client: Option<NonZeroU32>,
    /// Keeper's number of the client's socket, and the barrier after which the keeper holds it.
    begins: Option<(NonZeroU32, Ticket)>,
    /// Stream offset of the first message that is not handled completely.
    place: u64,
    /// Stream offset of the first byte that was not taken from the socket yet.
    received: u64,
    /// Stream offset of the first byte that was not copied into the session's memory yet; not less
    /// than `received`.
    found: u64,
    looks: Looks,
    base: u64,
    phase: Phase,
    group: u8,
    groups: u8,
    next_group: u8,
    arriving: Option<Arriving>,
    /// Number of calls that have filled the counting pipe, and the number of bytes in it.
    counted: u32,
    level: u32,
    /// Number of bytes in the pipe of replies.
    piped: usize,
    /// Size in bytes of the message that is being handled.
    size: usize,
    /// Descriptor that has to be sent with the head of a reply.
    witness: Option<OwnedFd>,
    /// Keeper's numbers of the descriptors of the message that is being handled.
    in_hand: Vec<NonZeroU32>,
    /// Keeper's numbers of the descriptors that belong to the device.
    settled: Vec<NonZeroU32>,
    /// The message in hand may have made the device release settled descriptors.
    frees: bool,
    /// The keeper is late: the client is answered before everything of it is kept.
    is_behind: bool,
    is_abandoned: bool,
}

/// Resources from which a journal is created.
#[derive(Debug)]
pub struct JournalSetup {
    /// Memory of [`SESSION`] bytes for the journal.
    pub area: Area,
    /// List of the disk's kept descriptors.
    pub ledger: SharedLedger,
    /// Pipe through which replies are sent to the client.
    pub replies: Pipe,
    /// Pipe that counts the bytes read from the client's socket.
    pub counter: Pipe,
}

impl Journal {
    /// Creates a journal from kept resources, which outlive the client. State of an earlier client
    /// in them is ignored; [`crate::Connection::resume`] uses it.
    ///
    /// # Errors
    /// [`JournalError::Memory`] when the session's memory is too small.
    pub fn new(setup: JournalSetup) -> Result<Self, JournalError> {
        let JournalSetup {
            area,
            ledger,
            replies,
            counter,
        } = setup;
        let words = SessionWords::new(area).ok_or(JournalError::Memory)?;
        let received = words.load(Word::Received);
        Ok(Self {
            words,
            ledger,
            replies,
            counter,
            client: None,
            begins: None,
            place: received,
            received,
            found: received,
            looks: Looks::default(),
            base: received,
            phase: Phase::Idle,
            group: 0,
            groups: 0,
            next_group: 0,
            arriving: None,
            counted: 0,
            level: 0,
            piped: 0,
            size: 0,
            witness: None,
            in_hand: Vec::new(),
            settled: Vec::new(),
            frees: false,
            is_behind: false,
            is_abandoned: false,
        })
    }

    /// Removes the state of the client that a previous process has left.
    pub fn discard(mut self) {
        self.end();
    }

    /// Returns the stream offset of the first message that is not handled completely.
    pub(crate) fn place(&self) -> u64 {
        self.place
    }

    /// Hands a descriptor to the device after the message that brought it was handled. A descriptor
    /// that the device does not need is no longer kept.
    pub(crate) fn settle(&mut self, number: NonZeroU32, is_needed: bool) {
        let mut ledger = self.ledger.borrow_mut();
        if is_needed {
            ledger.set_detail(number, SETTLED);
            self.settled.push(number);
        } else {
            ledger.forget(number)
        }
    }

    /// Returns the number of the client's socket that a previous process left, if there is one.
    pub fn client(&self) -> Option<NonZeroU32> {
        Self::client_in(self.words.area())
    }

    /// Returns the keeper's number of the client's socket, read from a journal's memory.
    pub fn client_in(area: &Area) -> Option<NonZeroU32> {
        let mut word = [0; 8];
        area.load(Word::Client as usize, &mut word).ok()?;
        NonZeroU32::new(u64::from_ne_bytes(word) as u32)
    }

    /// Asks the keeper to keep a new client's socket. Until that is done the socket is not read.
    pub(crate) fn begin(&mut self, socket: BorrowedFd<'_>) {
        let kept = {
            let mut ledger = self.ledger.borrow_mut();
            let kept = ledger.keep(DescriptorKind::CLIENT, 0, socket);
            kept.and_then(|number| Ok((number, ledger.barrier()?)))
        };
        match kept {
            Ok(begins) => self.begins = Some(begins),
            Err(error) => self.abandon(&error),
        }
    }

    /// Begins with a client for which the keeper holds the socket already.
    pub(crate) fn begin_kept(&mut self, number: NonZeroU32) {
        crash::point!("vfio-user.journal.begins");
        self.replies.drain();
        self.words.store(Word::Take, 0);
        self.empty_counter();
        self.words.store(Word::Negotiated, 0);
        self.words.store(Word::HintFor, u64::MAX);
        self.words.store(Word::Base, self.received);
        self.words.store(Word::Received, self.received);
        self.place = self.received;
        self.found = self.received;
        self.base = self.received;
        self.phase = Phase::Idle;
        self.put_hand();
        crash::point!("vfio-user.journal.cleared");
        self.client = Some(number);
        self.put_client();
        crash::point!("vfio-user.journal.begun");
    }

    /// Notes the client, and whether the next process can continue with it.
    fn put_client(&self) {
        let client = self.client.map_or(0, |number| u64::from(number.get()));
        let is_lost = self.is_abandoned
            || self.words.is_lost()
            || (self.is_behind && !self.ledger.borrow().is_sent());
        let flag = if is_lost { ABANDONED } else { 0 };
        self.words.store(Word::Client, client | flag);
    }

    /// Checks whether the keeper has answered. Returns `false` while it has not.
    pub(crate) fn is_settled(&mut self) -> bool {
        let Some((number, ticket)) = self.begins else {
            return self.arriving.is_none() || self.has_arrived();
        };
        if self.has_failed() {
            self.begins = None;
            return true;
        }
        if !self.ledger.borrow().is_answered(ticket) && !self.falls_behind() {
            return false;
        }
        self.begins = None;
        self.begin_kept(number);
        true
    }

    /// Returns whether an answer of the keeper is outstanding.
    pub(crate) fn is_waiting(&self) -> bool {
        self.begins.is_some() || self.arriving.is_some()
    }

    /// Returns whether the client is to be answered although the keeper is late. If there is no
    /// room for a request to the keeper, the client does not outlive this process until the keeper
    /// has [caught up](Self::catch_up).
    fn falls_behind(&mut self) -> bool {
        let ledger = self.ledger.borrow();
        let may = (self.is_behind || ledger.is_late()) && ledger.backlog() < MAX_BACKLOG;
        drop(ledger);
        if may {
            let was_behind = std::mem::replace(&mut self.is_behind, true);
            self.put_client();
            if !was_behind {
                tracing::warn!("the keeper is slow: this disk is not yet kept, and is served");
            }
        }
        may
    }

    /// Notes the keeper's progress. Everything is kept when it has answered all requests.
    pub(crate) fn catch_up(&mut self) {
        if !self.is_behind || self.has_failed() {
            return;
        }
        self.is_behind = self.ledger.borrow().is_waiting();
        self.put_client();
        if !self.is_behind {
            tracing::info!("the keeper runs again: this disk is kept");
        }
    }

    /// Returns whether the client is not yet kept, because the keeper is late.
    pub(crate) fn is_behind(&self) -> bool {
        self.is_behind && !self.is_abandoned
    }

    /// Returns whether keeping has failed; the client then lives only as long as this process.
    fn has_failed(&mut self) -> bool {
        if self.words.is_lost() {
            self.abandon(&JournalError::Memory);
        }
        let failed = self.ledger.borrow().failed().cloned();
        if let Some(error) = failed {
            self.abandon(&error);
        }
        self.is_abandoned
    }

    fn abandon(&mut self, error: &(dyn std::error::Error + 'static)) {
        if std::mem::replace(&mut self.is_abandoned, true) {
            return;
        }
        self.put_client();
        tracing::error!(
            error,
            "this disk will not outlive its process: not everything of it can be kept"
        );
    }

    /// Ends the session of the client, and removes its state.
    pub(crate) fn end(&mut self) {
        self.words.store(Word::Client, 0);
        crash::point!("vfio-user.journal.ended");
        self.replies.drain();
        self.witness = None;
        self.arriving = None;
        // Bytes that were not taken disappear with the client's socket.
        self.found = self.received;
        self.looks = Looks::default();
        let mut ledger = self.ledger.borrow_mut();
        for noted in ledger.noted() {
            if [SENT, REFUSED, DescriptorKind::CLIENT].contains(&noted.kind) {
                ledger.forget(noted.number);
            }
        }
        self.begins = None;
        self.client = None;
        self.is_behind = false;
        self.in_hand.clear();
        self.settled.clear();
    }

    fn put_hand(&self) {
        let hand = CurrentMessage {
            place: self.place as u32,
            phase: self.phase,
            group: self.group,
            groups: self.groups,
        };
        self.words.store(Word::Hand, hand.to_word());
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.put_hand();
    }

    /// Marks the message at the front as being handled. It has `size` bytes and brought `groups`
    /// groups of descriptors. `frees`: the device may need fewer descriptors afterwards.
    pub(crate) fn handle(
        &mut self,
        (size, frees): (usize, bool),
        groups: usize,
        numbers: &[Option<NonZeroU32>],
    ) {
        self.handled((size, frees), numbers);
        self.groups = u8::try_from(groups).unwrap_or(u8::MAX);
        self.enter(Phase::Handling);
        crash::point!("vfio-user.message.handling");
    }

    /// Restores a message that a previous process has handled and is answering: its size, and
    /// whether it frees descriptors.
    pub(crate) fn handled(&mut self, (size, frees): (usize, bool), numbers: &[Option<NonZeroU32>]) {
        self.size = size;
        self.frees = frees;
        self.in_hand.clear();
        self.in_hand.extend(numbers.iter().flatten());
    }

    /// Marks the message at the front as handled and answered. Its descriptors are no longer kept
    /// unless `keeps` returns `true`.
    pub(crate) fn done(&mut self, keeps: impl Fn(NonZeroU32) -> bool) {
        if self.phase == Phase::Idle {
            return;
        }
        crash::point!("vfio-user.message.answered");
        self.place = self.place.wrapping_add(self.size as u64);
        self.group = self.group.wrapping_add(self.groups);
        self.groups = 0;
        self.enter(Phase::Idle);
        crash::point!("vfio-user.message.done");
        for number in std::mem::take(&mut self.in_hand) {
            self.settle(number, keeps(number));
        }
        if std::mem::take(&mut self.frees) {
            let (needed, freed) = self.settled.iter().partition(|number| keeps(**number));
            self.settled = needed;
            let freed: Vec<NonZeroU32> = freed;
            let mut ledger = self.ledger.borrow_mut();
            freed.into_iter().for_each(|number| ledger.forget(number));
        }
    }

    /// Notes a value of the message's answer that a second handling could not determine again.
    pub(crate) fn hint(&self, value: u64) {
        self.words.store(Word::Hint, value);
        self.words.store(Word::HintFor, self.place);
    }

    /// Returns the value that a previous process has stored for the answer to the current message.
    pub(crate) fn noted_hint(&self) -> Option<u64> {
        let is_there = self.words.load(Word::HintFor) == self.place;
        is_there.then(|| self.words.load(Word::Hint))
    }

    /// Stores the negotiated capabilities of both sides.
    pub(crate) fn negotiated(&self, told: &Capabilities, theirs: &Capabilities) {
        for (word, side) in [(Word::Told, told), (Word::Theirs, theirs)] {
            for (n, value) in side.to_words().into_iter().enumerate() {
                self.words.store_at(word as usize + 8 * n, value);
            }
        }
        self.words.store(Word::Negotiated, 1);
        crash::point!("vfio-user.version.noted");
    }

    /// Returns the negotiated capabilities of both sides, if the version message has arrived.
    pub(crate) fn noted_version(&self) -> Option<(Capabilities, Capabilities)> {
        let side = |word: Word| {
            let mut words = [0; CAPABILITIES];
            for (n, value) in words.iter_mut().enumerate() {
                *value = self.words.load_at(word as usize + 8 * n);
            }
            Capabilities::of_words(words)
        };
        let is_there = self.words.load(Word::Negotiated) == 1;
        is_there.then(|| (side(Word::Told), side(Word::Theirs)))
    }
}

fn pipe_error(errno: Errno) -> ReadError {
    ReadError::System(errno)
}
