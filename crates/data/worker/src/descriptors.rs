//! A front-end's view of its worker's epoll set.

use rustix::event::epoll;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// Condition of a descriptor that an epoll set watches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// The descriptor is readable (level-triggered).
    Readable,
    /// The descriptor has become readable: one event each time (edge-triggered), without a read.
    Edge,
    /// The descriptor is writable.
    Writable,
    /// The peer has hung up; one event only.
    HangUp,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Interest::Readable => epoll::EventFlags::IN,
            Interest::Edge => epoll::EventFlags::IN | epoll::EventFlags::ET,
            Interest::Writable => epoll::EventFlags::OUT,
            // epoll always reports a hang-up; once, since it would be reported again and again.
            Interest::HangUp => epoll::EventFlags::ONESHOT,
        }
    }

    /// Returns whether the kernel reports the event only once, so that an unhandled one is lost.
    fn is_told_once(self) -> bool {
        matches!(self, Interest::Edge | Interest::HangUp)
    }
}

/// Front-end number that marks events of the worker itself.
pub(crate) const OWN: u32 = u32::MAX;

/// Recipient of an epoll event: number of the front-end, and the front-end's own token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub front: u32,
    pub token: u32,
    /// Whether the event is reported only once (EPOLLONESHOT).
    pub once: bool,
}

/// Highest bit of a front-end's token: the event is reported only once.
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

    /// Adds a descriptor under a token, of which 31 bits are kept. Closing the last duplicate
    /// removes the descriptor from the set.
    ///
    /// # Errors
    /// The kernel's error: the descriptor cannot be polled, or is in the set already.
    pub fn add(&self, fd: impl AsFd, token: u32, interest: Interest) -> Result<(), Errno> {
        epoll::add(
            &self.epoll,
            fd,
            self.token(token, interest),
            interest.flags(),
        )
    }

    /// Changes the interest and token of a descriptor in the set.
    ///
    /// # Errors
    /// The kernel's error: the descriptor is not in the set.
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
    /// The kernel's error: the descriptor is not in the set.
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
