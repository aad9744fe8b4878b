//! One client of the control socket: what it has sent so far, what it is still to be sent.

use super::{REQUEST_MAX, Reply, TIMEOUT};
use receive::{PlainSocket, Read};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// Where it stands.
enum State {
    /// Its request is incomplete.
    Asking(Vec<u8>),
    /// A thread does what it has asked for.
    Waiting,
    /// The answer, and how much of it has gone.
    Answering(Vec<u8>, usize),
}

/// What came of a look at its socket.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It is waited for.
    Blocked,
    /// Its request is complete: this line.
    Asked(Vec<u8>),
    /// It is to be closed: everything is said, or it has gone.
    Over,
}

/// A client. Descriptors that it sends are neither taken nor closed here: closing one may block.
pub(super) struct Peer {
    socket: PlainSocket,
    state: State,
    /// When it is dropped, whatever it does.
    deadline: Option<Instant>,
}

impl Peer {
    /// One that has just connected, over a non-blocking socket.
    pub(super) fn new(socket: PlainSocket, now: Instant) -> Self {
        Self {
            socket,
            state: State::Asking(Vec::new()),
            deadline: Some(now + TIMEOUT),
        }
    }

    /// When it is dropped.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Its request is incomplete: of too many clients the one that began first is dropped.
    pub(super) fn is_asking(&self) -> bool {
        matches!(self.state, State::Asking(_))
    }

    /// What its socket is waited for; a hang-up alone while a thread works for it.
    pub(super) fn interest(&self) -> PollFlags {
        match self.state {
            State::Asking(_) => PollFlags::IN,
            State::Waiting => PollFlags::empty(),
            State::Answering(..) => PollFlags::OUT,
        }
    }

    /// A thread does what it has asked for, which takes the time that it takes.
    pub(super) fn wait(&mut self) {
        self.state = State::Waiting;
        self.deadline = None;
    }

    /// Begins to answer.
    pub(super) fn answer(&mut self, reply: &Reply, now: Instant) -> Progress {
        let Ok(mut text) = serde_json::to_vec(reply) else {
            return Progress::Over;
        };
        text.push(b'\n');
        self.state = State::Answering(text, 0);
        self.deadline = Some(now + TIMEOUT);
        self.go_on()
    }

    /// Its socket is ready: reads or writes as much as there is. Bounded: a request has an end.
    pub(super) fn go_on(&mut self) -> Progress {
        match &mut self.state {
            State::Asking(line) => loop {
                let mut piece = [0; REQUEST_MAX];
                let room = piece.get_mut(line.len()..).unwrap_or_default();
                let ended = match self.socket.read(room) {
                    Ok(Read::Bytes { len, .. }) => {
                        line.extend(room.iter().take(len));
                        line.iter().position(|byte| *byte == b'\n')
                    }
                    Ok(Read::Eof) => Some(line.len()),
                    Ok(Read::Blocked | Read::Waiting) => return Progress::Blocked,
                    Err(_) => return Progress::Over,
                };
                // A line, all that was sent, or all that is read: one that is longer is no request.
                if ended.is_some() || line.len() >= REQUEST_MAX {
                    line.truncate(ended.unwrap_or(line.len()));
                    return Progress::Asked(std::mem::take(line));
                }
            },
            // It has hung up. What was begun goes on.
            State::Waiting => Progress::Over,
            State::Answering(text, sent) => loop {
                let rest = text.get(*sent..).unwrap_or_default();
                if rest.is_empty() {
                    return Progress::Over;
                }
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match send(&self.socket, rest, flags) {
                    Ok(more) => *sent += more,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => return Progress::Blocked,
                    Err(_) => return Progress::Over,
                }
            },
        }
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
