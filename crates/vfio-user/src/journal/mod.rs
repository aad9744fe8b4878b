//! What a connection leaves to the process that goes on with it, in an order such that each request
//! is answered once, wherever this process is killed.
//!
//! A byte is in one place at a time: in the client's socket, in the session's memory, in the pipe
//! of replies, or with the client. What moves it is one call of the kernel's, and how far that went
//! is in the kernel, too, which outlives this process:
//!
//! - *Requests.* Bytes are looked at (`MSG_PEEK`), copied into the session's memory, and then moved
//!   out of the socket into a pipe that counts them (`splice`): its level was noted before, so the
//!   next process sees to the byte what was taken. Descriptors that come with them are kept before.
//! - *Replies.* A reply is written into a pipe, and moved from there into the socket (`splice`).
//!   What is in the pipe is not sent; what is not, is. Before it is in the pipe in full, its
//!   request is handled again by the next process, which is harmless for each of them.
//! - *A reply with a descriptor* is sent in two parts: its head with the descriptor, by `sendmsg`,
//!   which no pipe can do, and the rest as above. The descriptor is an open file description of its
//!   own that holds a lock ([`witness`]); this process has the only one until it is sent. A client
//!   that has the head waits for the rest, and has the descriptor. So the lock is there in the next
//!   process if the head was sent, and only then.
//!
//! One word ([`Hand`]) says which message is in hand and how far it is: a single store ends one and
//! begins the next. Where a store says that something is done, it comes after it; where it says
//! that something is about to be done, before it.

mod replies;
mod resume;
mod taking;
mod witness;
mod words;

pub(crate) use taking::Arriving;
pub use words::{SESSION, SESSION_VERSION};

use keeper::{Ledger, LedgerError, Ticket};
use receive::ReadError;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use state_memory::{Area, DescriptorKind};
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use words::{ABANDONED, CAPABILITIES, Hand, Phase, Word, Words};

use crate::version::Capabilities;

/// A descriptor that a client has sent.
pub const SENT: DescriptorKind = DescriptorKind(64);
/// One that was of no use: it has a number, and is not kept.
pub const REFUSED: DescriptorKind = DescriptorKind(65);

/// What is noted of a descriptor that is the device's.
const SETTLED: u64 = 0;

/// Why a connection cannot go on in this process, or its journal cannot.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The session's memory is too small, or there is none left.
    #[error("no memory for the session")]
    Memory,
    /// What was left does not fit together.
    #[error("what is left of the session is damaged: {0}")]
    Damaged(&'static str),
    /// The previous process could not have the client's descriptors kept any more.
    #[error("the previous process could not have this client's descriptors kept")]
    Abandoned,
    /// A descriptor is missing.
    #[error("a descriptor of the client's was not kept")]
    Missing,
    /// A pipe cannot be made or used.
    #[error("a pipe")]
    Pipe(#[source] Errno),
}

/// A pipe of which both ends are kept.
#[derive(Debug)]
pub struct Pipe {
    /// The end that is read.
    pub reader: OwnedFd,
    /// The end that is written.
    pub writer: OwnedFd,
}

impl Pipe {
    /// A new one.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn new() -> Result<Self, Errno> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(Self { reader, writer })
    }

    /// Bytes that are in it.
    fn level(&self) -> Result<usize, Errno> {
        let level = rustix::io::ioctl_fionread(&self.reader)?;
        usize::try_from(level).map_err(|_| Errno::OVERFLOW)
    }

    /// Empties it.
    fn drain(&self) {
        let mut bytes = [0; 4096];
        loop {
            match rustix::io::read(&self.reader, &mut bytes) {
                Ok(1..) | Err(Errno::INTR) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }
}

/// The descriptors of the disk, which the connection and its device both have kept.
pub type SharedLedger = Rc<RefCell<Ledger>>;

/// What a connection leaves to the next process.
#[derive(Debug)]
pub struct Journal {
    words: Words,
    ledger: SharedLedger,
    /// Of replies on their way to the client.
    replies: Pipe,
    /// Of bytes that were taken from the client's socket: only their number matters.
    counter: Pipe,
    /// The client's socket, once it is kept.
    client: Option<NonZeroU32>,
    /// Until the client's socket is kept.
    begins: Option<(NonZeroU32, Ticket)>,
    /// Place in the stream of the message at the front.
    place: u64,
    received: u64,
    base: u64,
    phase: Phase,
    group: u8,
    groups: u8,
    next_group: u8,
    arriving: Option<Arriving>,
    /// Calls whose bytes are in the counting pipe, and these bytes.
    counted: u32,
    level: u32,
    /// Bytes that are in the pipe of replies.
    piped: usize,
    /// Bytes of the message in hand.
    size: usize,
    /// A descriptor whose reply's head could not be sent yet.
    witness: Option<OwnedFd>,
    /// Descriptors of the message in hand.
    in_hand: Vec<NonZeroU32>,
    /// Those that are the device's.
    settled: Vec<NonZeroU32>,
    /// The message in hand may have made the device give some of them up.
    frees: bool,
    is_abandoned: bool,
}

/// Where the journal is.
#[derive(Debug)]
pub struct JournalSetup {
    /// Memory of [`SESSION`] bytes.
    pub area: Area,
    /// The descriptors of the disk.
    pub ledger: SharedLedger,
    /// For replies on their way to the client.
    pub replies: Pipe,
    /// For the number of the bytes that were taken from the client's socket.
    pub counter: Pipe,
}

impl Journal {
    /// With what is kept, and outlives the client. What an earlier client has left there is of no
    /// interest: for that see [`crate::Connection::resume`].
    ///
    /// # Errors
    /// [`JournalError::Memory`].
    pub fn new(setup: JournalSetup) -> Result<Self, JournalError> {
        let JournalSetup {
            area,
            ledger,
            replies,
            counter,
        } = setup;
        let words = Words::new(area).ok_or(JournalError::Memory)?;
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
            is_abandoned: false,
        })
    }

    /// Nothing counts of a client that a process before has left.
    pub fn discard(mut self) {
        self.end();
    }

    /// Place in the stream of the message at the front.
    pub(crate) fn place(&self) -> u64 {
        self.place
    }

    /// The message that has brought a descriptor has been handled: from now on the descriptor is
    /// the device's, if that needs it, or is not kept any more.
    pub(crate) fn settle(&mut self, number: NonZeroU32, is_needed: bool) {
        let mut ledger = self.ledger.borrow_mut();
        match is_needed {
            true => {
                ledger.set_detail(number, SETTLED);
                self.settled.push(number);
            }
            false => ledger.forget(number),
        }
    }

    /// The number of the client's socket that a previous process went on with, if it did with one.
    pub fn client(&self) -> Option<NonZeroU32> {
        Self::client_in(self.words.area())
    }

    /// The same of a journal that is in this memory.
    pub fn client_in(area: &Area) -> Option<NonZeroU32> {
        let mut word = [0; 8];
        area.load(Word::Client as usize, &mut word).ok()?;
        NonZeroU32::new(u64::from_ne_bytes(word) as u32)
    }

    /// Has a new client's socket kept. Until that is so nothing is read from it.
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

    /// Begins with a client whose socket is kept already.
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
        self.base = self.received;
        self.phase = Phase::Idle;
        self.put_hand();
        crash::point!("vfio-user.journal.cleared");
        self.words.store(Word::Client, u64::from(number.get()));
        crash::point!("vfio-user.journal.begun");
        self.client = Some(number);
    }

    /// Sees whether what was asked of the keeper has been done. `false`: it is to be waited for.
    pub(crate) fn is_settled(&mut self) -> bool {
        let Some((number, ticket)) = self.begins else {
            return self.arriving.is_none() || self.has_arrived();
        };
        if self.has_failed() {
            self.begins = None;
            return true;
        }
        if !self.ledger.borrow().is_answered(ticket) {
            return false;
        }
        self.begins = None;
        self.begin_kept(number);
        true
    }

    /// The keeper's answer is waited for.
    pub(crate) fn is_waiting(&self) -> bool {
        self.begins.is_some() || self.arriving.is_some()
    }

    /// Nothing is kept any more: the client lives as long as this process does.
    fn has_failed(&mut self) -> bool {
        let failed = self.ledger.borrow().failed().cloned();
        if let Some(error) = failed {
            self.abandon(&error);
        }
        self.is_abandoned
    }

    fn abandon(&mut self, error: &LedgerError) {
        if std::mem::replace(&mut self.is_abandoned, true) {
            return;
        }
        let client = self.words.load(Word::Client);
        self.words.store(Word::Client, client | ABANDONED);
        let error: &dyn std::error::Error = error;
        tracing::error!(
            error,
            "this disk will not outlive its process: not everything of it can be kept"
        );
    }

    /// The client has gone, or is to go: nothing of it counts any more.
    pub(crate) fn end(&mut self) {
        self.words.store(Word::Client, 0);
        crash::point!("vfio-user.journal.ended");
        self.replies.drain();
        self.witness = None;
        self.arriving = None;
        let mut ledger = self.ledger.borrow_mut();
        for noted in ledger.noted() {
            if [SENT, REFUSED, DescriptorKind::CLIENT].contains(&noted.kind) {
                ledger.forget(noted.number);
            }
        }
        self.begins = None;
        self.client = None;
        self.in_hand.clear();
        self.settled.clear();
    }

    fn put_hand(&self) {
        let hand = Hand {
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

    /// The message at the front, of `size` bytes, which came with so many groups of descriptors, is
    /// handled now. `frees`: the device may need fewer of those descriptors that it has, then.
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

    /// The same of one that a process before has handled: its reply is on its way.
    pub(crate) fn handled(&mut self, (size, frees): (usize, bool), numbers: &[Option<NonZeroU32>]) {
        self.size = size;
        self.frees = frees;
        self.in_hand.clear();
        self.in_hand.extend(numbers.iter().flatten());
    }

    /// The message at the front has been handled and answered. Those of its descriptors that are
    /// not said by `keeps` are not kept any more.
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

    /// What is to be answered to the message in hand, and cannot be found out again when it is
    /// handled again.
    pub(crate) fn hint(&self, value: u64) {
        self.words.store(Word::Hint, value);
        self.words.store(Word::HintFor, self.place);
    }

    /// What was noted for the message in hand by a process before.
    pub(crate) fn noted_hint(&self) -> Option<u64> {
        let is_there = self.words.load(Word::HintFor) == self.place;
        is_there.then(|| self.words.load(Word::Hint))
    }

    /// The version is negotiated.
    pub(crate) fn negotiated(&self, told: &Capabilities, theirs: &Capabilities) {
        for (word, side) in [(Word::Told, told), (Word::Theirs, theirs)] {
            for (n, value) in side.to_words().into_iter().enumerate() {
                self.words.store_at(word as usize + 8 * n, value);
            }
        }
        self.words.store(Word::Negotiated, 1);
        crash::point!("vfio-user.version.noted");
    }

    /// What the version message has brought, if it has come.
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
