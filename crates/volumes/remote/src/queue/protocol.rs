//! Traits of a protocol: [`Session`] for a connection, [`Protocol`] for a queue.

use super::link::{Broken, ClosedBy, Link};
use super::subrequest::Subrequest;
use dma::SegmentList;
use std::fmt::Display;
use std::time::{Duration, Instant};
use volume::{IoError, Outgoing, RingStreams};

/// Meaning of received bytes. Commands are identified by the session's names.
#[derive(Debug)]
pub enum Event<'a, A> {
    /// The bytes complete nothing; more may be needed.
    More,
    /// Data of a read was received.
    Data {
        /// Name of the command.
        name: u64,
        /// Byte offset of the data within the command.
        at: u32,
        /// Received data.
        bytes: &'a [u8],
    },
    /// A range of a read contains zeroes, which were not transferred.
    Hole {
        /// Name of the command.
        name: u64,
        /// Byte offset of the range within the command.
        at: u32,
        /// Length of the range in bytes.
        len: u32,
    },
    /// The server has answered a command.
    End {
        /// Name of the command.
        name: u64,
        /// Answer of the server.
        answer: A,
    },
}

/// Data of a read that comes next on the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Name of the command that the data belongs to.
    pub name: u64,
    /// Byte offset of the data within the command.
    pub at: u32,
    /// Number of data bytes that are still to be received.
    pub left: u32,
}

/// Reason of the protocol for the end of a connection, such as a violation by the server.
pub trait Failure: Display {
    /// Noun for the server in messages.
    const PEER: &'static str;

    /// Returns whether commands count this failure, so that they fail after several of them.
    fn is_blamed(&self) -> bool;
}

/// Protocol on one connection: encoding of commands, parsing of answers, and the table of
/// outstanding commands, each of which has a name.
pub trait Session: Sized {
    /// Answer of the server to a command.
    type Answer;
    /// Reason of the protocol for the end of a connection.
    type Failure: Failure;
    /// Time limit for a server to close a connection after this host has closed the sending side.
    const CLOSING: Duration;
    /// Whether answers of the server add data to the next message. Answers are then parsed only
    /// while the message has room, so that a server that does not read takes no memory.
    const REQUESTS_DATA: bool;

    /// Returns the number of commands that are staged, being sent, or executed by the server.
    fn outstanding(&self) -> usize;

    /// Returns whether the maximum number of commands is outstanding.
    fn is_full(&self) -> bool;

    /// Returns the outstanding command with this name.
    fn get(&mut self, name: u64) -> Option<&mut Subrequest<Self::Answer>>;

    /// Removes and returns the outstanding command with this name.
    fn remove(&mut self, name: u64) -> Option<Subrequest<Self::Answer>>;

    /// Returns all outstanding commands.
    fn commands(&mut self) -> impl Iterator<Item = &mut Subrequest<Self::Answer>>;

    /// Removes and returns all outstanding commands.
    fn drain(&mut self) -> impl Iterator<Item = Subrequest<Self::Answer>>;

    /// Adds a command to the table and to the message.
    ///
    /// # Errors
    /// Returns `subrequest` if the table is full.
    fn stage(
        &mut self,
        subrequest: Subrequest<Self::Answer>,
        message: &mut Outgoing,
    ) -> Result<(), Subrequest<Self::Answer>>;

    /// Parses received bytes. Returns the number of bytes consumed, and their meaning. Data that
    /// the server requests is added to `message`.
    ///
    /// # Errors
    /// The reason for which the connection ends.
    fn next<'a>(
        &mut self,
        input: &'a [u8],
        message: &mut Outgoing,
    ) -> Result<(usize, Event<'a, Self::Answer>), Self::Failure>;

    /// Returns the data that follows, if all of it may be received directly into the command's
    /// memory.
    fn expects(&self) -> Option<Expected>;

    /// Records that `len` bytes of the expected data were received directly into the command's
    /// memory.
    fn took(&mut self, len: u32);

    /// Returns a segment list that the kernel no longer uses to its command, and returns the
    /// command's name. `name` is the list's name in the message.
    fn returned(&mut self, name: u64, list: SegmentList) -> u64 {
        if let Some(subrequest) = self.get(name) {
            subrequest.lent = subrequest.lent.saturating_sub(1);
            subrequest.list = list;
        }
        name
    }

    /// Adds the last bytes of a connection to `message`, if there are any. `why` is `None` when the
    /// queue drops the connection.
    fn farewell(&self, why: Option<&Self::Failure>, message: &mut Outgoing);
}

/// Command of a session.
pub type Command<P> = Subrequest<<<P as Protocol>::Session as Session>::Answer>;

/// Consequence of a server's answer to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The command has ended with this result.
    Ended(Result<(), IoError>),
    /// The command is sent again.
    Again,
}

/// Protocol of one queue: how its connections are made, which one a command uses, and when a
/// command may be sent again.
///
/// Links are numbered from 0 on, and their number does not change.
pub trait Protocol: Sized {
    /// Protocol on one connection.
    type Session: Session;
    /// Message from another thread to the queue, such as a new connection.
    type Message: Send + 'static;

    /// Logs that the worker ends, and cancels requests because the server does not answer.
    fn log_cancelled(&self, requests: usize);

    /// Returns the current size of the volume in bytes.
    fn size(&self) -> u64;

    /// Handles a message from another thread.
    fn receive(
        &mut self,
        message: Self::Message,
        links: &mut [Link<Self::Session>],
        streams: &RingStreams,
        now: Instant,
    );

    /// Continues making connections. Called once in each round, after the links were polled.
    fn make_connections(
        &mut self,
        links: &mut [Link<Self::Session>],
        streams: &RingStreams,
        now: Instant,
    );

    /// Returns the number of the link for the next command; `None` if no usable one has room.
    fn choose(&mut self, links: &[Link<Self::Session>]) -> Option<usize>;

    /// Returns whether any usable link has room for another command.
    fn has_room(&self, links: &[Link<Self::Session>]) -> bool;

    /// Returns whether the server was lost for so long that requests fail. `resends`: commands wait
    /// to be sent again.
    fn is_overdue(&mut self, links: &[Link<Self::Session>], resends: bool, now: Instant) -> bool;

    /// Records that a link has received answers to commands.
    fn note_answers(&mut self, number: usize) {
        let _ = number;
    }

    /// Evaluates the answer to a command. The queue handles memory that was inaccessible.
    fn outcome(
        &mut self,
        number: usize,
        subrequest: &mut Command<Self>,
        answer: <Self::Session as Session>::Answer,
        now: Instant,
    ) -> Outcome;

    /// Records the failure of a link, before it is closed.
    fn broken(
        &mut self,
        number: usize,
        link: &Link<Self::Session>,
        why: &Broken<<Self::Session as Session>::Failure>,
        now: Instant,
    );

    /// Records that the connection of a link is closed, so that the next one may be made.
    fn closed(&mut self, number: usize, session: &Self::Session, by: ClosedBy, now: Instant);

    /// Takes a command whose connection was closed without an answer. Returns it if it may be sent
    /// again at once, and otherwise holds it until [`Protocol::released`].
    fn lost(
        &mut self,
        number: usize,
        session: &Self::Session,
        subrequest: Command<Self>,
    ) -> Option<Command<Self>> {
        let _ = (number, session);
        Some(subrequest)
    }

    /// Returns the commands that the protocol holds.
    fn held(&mut self) -> impl Iterator<Item = &mut Command<Self>> {
        std::iter::empty()
    }

    /// Removes and returns the held commands that may be sent again by now.
    fn released(&mut self, links: &[Link<Self::Session>], now: Instant) -> Vec<Command<Self>> {
        let _ = (links, now);
        Vec::new()
    }

    /// Returns whether a time limit of the protocol is running, of which no event tells the end.
    fn is_timed(&self) -> bool;
}
