//! Interfaces of this crate to its environment: guest pages, interruption subclasses, time, and the
//! queues below.

use core::fmt;

use thiserror::Error;

use crate::command::Subclass;
use crate::information::{Configuration, Hardware};
use crate::matrix::Apqn;
use crate::status::QueueStatus;

/// Size of a page of the guest in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// A page frame of the guest: its absolute address divided by [`PAGE_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPage(pub u64);

impl GuestPage {
    /// Returns the page that contains a guest absolute address.
    pub const fn of(address: u64) -> GuestPage {
        GuestPage(address / PAGE_SIZE)
    }
}

/// Host address, as the host's queues use it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAddress(pub u64);

impl fmt::Debug for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A subclass of the host that stands for a guest's (Linux: the GIB's ISC for a GISA's).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostSubclass(pub u8);

/// Error: a page is not guest memory, or the host cannot pin more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the guest page cannot be pinned")]
pub struct CannotPin;

/// Error: a subclass cannot be registered, because there is no GISA or no GIB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the interruption subclass cannot be registered")]
pub struct CannotRegister;

/// Access to the guest's memory.
pub trait Pages {
    /// Pins a page, until it is unpinned as often as it was pinned. Returns the host address of its
    /// first byte.
    fn pin(&mut self, page: GuestPage) -> Result<HostAddress, CannotPin>;

    /// Releases one pin.
    fn unpin(&mut self, page: GuestPage);
}

/// The registry of the guest's interruption subclasses (Linux: `kvm_s390_gisc_register`).
/// Registrations are counted.
pub trait Subclasses {
    /// Enables interrupts of a subclass for the guest.
    fn register(&mut self, subclass: Subclass) -> Result<HostSubclass, CannotRegister>;

    /// Releases one registration.
    fn unregister(&mut self, subclass: Subclass);
}

/// A clock in nanoseconds, with which the device waits for a queue.
pub trait Clock {
    /// Returns the time in nanoseconds since an arbitrary instant.
    fn now(&self) -> u64;

    /// Waits for that many nanoseconds.
    fn wait(&mut self, nanoseconds: u64);
}

/// Destination of a queue's interrupts: the operand of the host's AQIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptTarget {
    /// Host address of the notification byte.
    pub notification: HostAddress,
    /// The guest's subclass, made pending in its GISA.
    pub guest: Subclass,
    /// The host's subclass, for the alert when the guest does not run.
    pub host: HostSubclass,
}

/// A request for NQAP, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct RequestPart<'a> {
    /// Identifier of the message, which the guest's program chooses.
    pub id: u64,
    /// Bytes of the request.
    pub data: &'a [u8],
    /// Whether this is the last part of the request.
    pub last: bool,
    /// Whether the program marked it as a special command.
    pub special: bool,
}

/// A reply from DQAP, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Identifier of the request that the reply answers.
    pub id: u64,
    /// Bytes of the reply, or of this part of it.
    pub data: alloc::vec::Vec<u8>,
    /// Number of bytes of this reply that remain in the queue.
    pub residual: usize,
}

/// Queues of the host: real ones through AP instructions, or emulated cards
/// ([`crate::card::Cards`]).
pub trait Queues {
    /// Tests a queue.
    fn tapq(&mut self, apqn: Apqn) -> (QueueStatus, Hardware);

    /// Starts a reset.
    fn rapq(&mut self, apqn: Apqn) -> QueueStatus;

    /// Starts a reset that also zeroizes the queue.
    fn zapq(&mut self, apqn: Apqn) -> QueueStatus;

    /// Turns interrupts on for a target, or off for `None`. The interrupt bit of the status follows
    /// later.
    fn aqic(&mut self, apqn: Apqn, target: Option<InterruptTarget>) -> QueueStatus;

    /// Returns the machine's configuration; its matrix is that of the host.
    fn qci(&mut self) -> Configuration;

    /// Adds a request to the queue.
    fn nqap(&mut self, apqn: Apqn, part: RequestPart<'_>) -> QueueStatus;

    /// Returns up to `room` bytes of the oldest reply: with `continued` from where the last call
    /// ended, otherwise from its beginning. The reply leaves the queue with its last byte.
    fn dqap(&mut self, apqn: Apqn, room: usize, continued: bool) -> (QueueStatus, Option<Reply>);
}
