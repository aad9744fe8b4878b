//! Mediation's records of outstanding commands.

use dma::{Pin, SegmentList};
use driver::raw::{IovaRange, Method};
use driver::{CommandError, DmaBuffer};
use nvme::{Command, Status};

/// Use of an entry in the table of outstanding commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryUse {
    /// The entry is unused.
    Free,
    /// A command that the device executes as a single command, directly on the guest's memory. Its
    /// completion completes the guest's command.
    Simple,
    /// A command that is split, or works on a copy of its data.
    Composite,
}

/// Record of a guest's outstanding command: the values needed on its completion, in one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct InFlight {
    pub used: EntryUse,
    /// Number of the virtual queue pair that has submitted the command.
    pub client: usize,
    pub token: u64,
    /// Pin that keeps the guest's memory mapped.
    pub pin: Option<Pin>,
    /// Whether the device works on a copy of the guest's data ([`Copied`]).
    pub copied: bool,
    /// Whether the command transfers data to the guest.
    pub read: bool,
    /// Number of the table of registered memory that its device addresses were taken from.
    pub table: u64,
    /// Number of incomplete commands of the device, including those that are not submitted yet.
    pub parts: u32,
    /// First error of the command's parts; success while there is none.
    pub status: Status,
    pub dw0: u32,
}

const _: () = assert!(size_of::<InFlight>() == 64);

/// Bounce buffer that the device works on, and the guest memory of the original data.
pub(crate) type Copied = (DmaBuffer, SegmentList);

impl InFlight {
    pub fn new() -> Self {
        Self {
            used: EntryUse::Free,
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

/// Command of a guest that has completed, with its status.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletedCommand {
    pub token: u64,
    /// Status and dword 0 in one word, because they are read a few instructions after they were
    /// written. A processor forwards a store to a load at once only if the store covers the whole
    /// load.
    end: u64,
}

impl CompletedCommand {
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

/// Rest of a command that exceeds the device's maximum, for which the physical queue had no room.
#[derive(Debug)]
pub(crate) struct Parked {
    pub entry: u16,
    /// Command for the device, as it was last submitted.
    pub command: Command,
    pub method: Method,
    /// Device addresses of all data of the command.
    pub ranges: Vec<IovaRange>,
    pub skip: u64,
    pub left: u64,
}

/// Returns the status that the guest gets for a command that has failed.
#[cold]
pub(crate) fn status_of(error: CommandError) -> Status {
    match error {
        CommandError::Status(status) => status,
        CommandError::TimedOut | CommandError::Reset => Status::ABORT_REQUESTED,
        CommandError::Gone => Status::INTERNAL_ERROR.with_dnr(true),
        _ => Status::INTERNAL_ERROR,
    }
}
