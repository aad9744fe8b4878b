//! Commands in flight, as mediation remembers them.

use dma::{Pin, SegmentList};
use driver::raw::{IovaRange, Method};
use driver::{CommandError, DmaBuffer};
use nvme::{Command, Status};

/// A guest's command in flight, or room for one.
#[derive(Debug)]
pub(crate) struct Entry {
    pub busy: bool,
    /// Whose it is.
    pub client: usize,
    pub token: u64,
    /// Keeps the guest's memory.
    pub pin: Option<Pin>,
    /// The copy that the device works on, and the guest's memory that it is a copy of.
    pub bounce: Option<(DmaBuffer, SegmentList)>,
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

impl Entry {
    pub fn new() -> Self {
        Self {
            busy: false,
            client: 0,
            token: 0,
            pin: None,
            bounce: None,
            read: false,
            table: 0,
            parts: 0,
            status: Status::SUCCESS,
            dw0: 0,
        }
    }
}

/// A command of the guest's that is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub token: u64,
    pub status: Status,
    pub dw0: u32,
}

/// The rest of a command that is larger than the device takes, for which the physical queue had no room.
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

/// The status that a guest is told.
#[cold]
pub(crate) fn status_of(result: Result<(), CommandError>) -> Status {
    match result {
        Ok(()) => Status::SUCCESS,
        Err(CommandError::Status(status)) => status,
        Err(CommandError::TimedOut | CommandError::Reset) => Status::ABORT_REQUESTED,
        Err(CommandError::Gone) => Status::INTERNAL_ERROR.with_dnr(true),
        Err(_) => Status::INTERNAL_ERROR,
    }
}
