//! The epoll set of a worker, as its front-ends see it.

use rustix::event::epoll;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// What a descriptor is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// It can be read.
    Readable,
    /// It has become readable: told once for each time (edge-triggered), without being read.
    Edge,
    /// It can be written.
    Writable,
    /// The peer has hung up; told once.
    HangUp,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Interest::Readable => epoll::EventFlags::IN,
            Interest::Edge => epoll::EventFlags::IN | epoll::EventFlags::ET,
            Interest::Writable => epoll::EventFlags::OUT,
            // A hang-up is always told; once, as it would be told again and again.
            Interest::HangUp => epoll::EventFlags::ONESHOT,
        }
    }

    /// What is not heeded at once is not told again.
    fn is_told_once(self) -> bool {
        matches!(self, Interest::Edge | Interest::HangUp)
    }
}

/// Events of the worker itself have this number in place of a front-end's.
pub(crate) const OWN: u32 = u32::MAX;

/// Who an event is for: a front-end's number and its own token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub front: u32,
    pub token: u32,
    /// The event does not come again.
    pub once: bool,
}

/// In place of a token's highest bit: the event does not come again.
const ONCE: u32 = 1 << 31;

impl Token {
    fn to_data(self) -> epoll::EventData {
        let once = if self.once { ONCE } else { 0 };
        epoll::EventData::new_u64(u64::from(self.front) << 32 | u64::from(self.token | once))
    }

    pub(crate) fn of(event: &epoll::Event) -> Self {
        let data = event.data.u64();
        Token {
            front: (data >> 32) as u32,
            token: data as u32 & !ONCE,
            once: data as u32 & ONCE != 0,
        }
    }
}

/// A front-end's part of its worker's epoll set. [`Frontend::ready`](crate::Frontend::ready) is
/// called with the token of a descriptor that is ready.
#[derive(Clone, Debug)]
pub struct Descriptors {
    epoll: Rc<OwnedFd>,
    front: u32,
}

impl Descriptors {
    pub(crate) fn new(epoll: Rc<OwnedFd>, front: u32) -> Self {
        Descriptors { epoll, front }
    }

    /// Waits for a descriptor under a token, of which 31 bits are kept. Closing its last duplicate
    /// removes it from the set.
    ///
    /// # Errors
    /// The kernel's: it is of a kind that cannot be waited for, or in the set already.
    pub fn add(&self, fd: impl AsFd, token: u32, interest: Interest) -> Result<(), Errno> {
        epoll::add(
            &self.epoll,
            fd,
            self.token(token, interest),
            interest.flags(),
        )
    }

    /// Waits for something else of a descriptor in the set.
    ///
    /// # Errors
    /// The kernel's: it is not in the set.
    pub fn modify(&self, fd: impl AsFd, token: u32, interest: Interest) -> Result<(), Errno> {
        epoll::modify(
            &self.epoll,
            fd,
            self.token(token, interest),
            interest.flags(),
        )
    }

    /// Removes a descriptor from the set.
    ///
    /// # Errors
    /// The kernel's: it is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> Result<(), Errno> {
        epoll::delete(&self.epoll, fd)
    }

    fn token(&self, token: u32, interest: Interest) -> epoll::EventData {
        let token = Token {
            front: self.front,
            token,
            once: interest.is_told_once(),
        };
        token.to_data()
    }
}
