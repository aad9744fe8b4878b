//! Commands in flight, as mediation remembers them.

use dma::{Pin, SegmentList};
use driver::raw::{IovaRange, Method};
use driver::{CommandError, DmaBuffer};
use nvme::{Command, Status};

/// What an entry is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Nothing.
    Free,
    /// A command that the device executes as one, on the guest's own memory: when it has
    /// completed, so has the guest's.
    Simple,
    /// One in parts, or with a copy of its data.
    Composite,
}

/// A guest's command in flight, or room for one: what its end needs, in one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct InFlight {
    pub used: Use,
    /// Whose it is.
    pub client: usize,
    pub token: u64,
    /// Keeps the guest's memory.
    pub pin: Option<Pin>,
    /// The device works on a copy ([`Copied`]).
    pub copied: bool,
    /// The data goes to the guest.
    pub read: bool,
    /// The table that its addresses are from.
    pub table: u64,
    /// Commands of the device that are not over, those that have not begun among them.
    pub parts: u32,
    /// The first error of a part.
    pub status: Status,
    pub dw0: u32,
}

const _: () = assert!(size_of::<InFlight>() == 64);

/// The copy that the device works on, and the guest's memory that it is a copy of.
pub(crate) type Copied = (DmaBuffer, SegmentList);

impl InFlight {
    pub fn new() -> Self {
        Self {
            used: Use::Free,
            client: 0,
            token: 0,
            pin: None,
            copied: false,
            read: false,
            table: 0,
            parts: 0,
            status: Status::SUCCESS,
            dw0: 0,
        }
    }
}

/// A command of the guest's that has completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub token: u64,
    /// Status and dword 0 in one word, for it is read a few instructions after it is written: a
    /// processor hands a store to a load at once only if the store is all that the load reads.
    end: u64,
}

impl Done {
    #[inline]
    pub fn new(token: u64, status: Status, dw0: u32) -> Self {
        Self {
            token,
            end: u64::from(status.into_bits()) << 32 | u64::from(dw0),
        }
    }

    #[inline]
    pub fn status(&self) -> Status {
        Status::from_bits((self.end >> 32) as u16)
    }

    #[inline]
    pub fn dw0(&self) -> u32 {
        self.end as u32
    }
}

/// The rest of a command that is larger than the device takes, for which the
/// physical queue had no room.
#[derive(Debug)]
pub(crate) struct Parked {
    pub entry: u16,
    /// As it went out last.
    pub command: Command,
    pub method: Method,
    /// All of its data.
    pub ranges: Vec<IovaRange>,
    pub skip: u64,
    pub left: u64,
}

/// The status that a guest is told of a command that failed.
#[cold]
pub(crate) fn status_of(error: CommandError) -> Status {
    match error {
        CommandError::Status(status) => status,
        CommandError::TimedOut | CommandError::Reset => Status::ABORT_REQUESTED,
        CommandError::Gone => Status::INTERNAL_ERROR.with_dnr(true),
        _ => Status::INTERNAL_ERROR,
    }
}
