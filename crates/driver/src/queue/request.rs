//! Requests to a queue pair, and their completions.

use nvme::NvmOpcode;

use crate::buffer::DmaBuffer;
use crate::error::CommandError;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read blocks into the buffer.
    Read,
    /// Write blocks from the buffer.
    Write {
        /// Force Unit Access: the data is durable on completion.
        fua: bool,
    },
    /// Compare blocks with the buffer; a difference fails with Compare Failure.
    Compare,
    /// Make the blocks read as zeroes.
    WriteZeroes {
        /// The zeroes are durable on completion.
        fua: bool,
        /// The controller may deallocate the blocks.
        deallocate: bool,
    },
    /// Deallocate the blocks (Dataset Management with the attribute Deallocate).
    Deallocate,
    /// Make all completed writes durable. The block range is ignored.
    Flush,
}

impl Op {
    /// Returns the operation's opcode.
    pub const fn opcode(self) -> NvmOpcode {
        match self {
            Op::Read => NvmOpcode::READ,
            Op::Write { .. } => NvmOpcode::WRITE,
            Op::Compare => NvmOpcode::COMPARE,
            Op::WriteZeroes { .. } => NvmOpcode::WRITE_ZEROES,
            Op::Deallocate => NvmOpcode::DATASET_MANAGEMENT,
            Op::Flush => NvmOpcode::FLUSH,
        }
    }

    /// Returns whether the operation transfers the buffer's data.
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write { .. } | Op::Compare)
    }
}

/// A request of any size. Requests larger than a command are split.
#[derive(Debug)]
pub struct Request {
    /// Operation.
    pub op: Op,
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Data buffer; `None` for operations without data.
    pub buffer: Option<DmaBuffer>,
    /// Value returned in the completion.
    pub user_data: u64,
}

/// Completion of a request.
#[derive(Debug)]
#[must_use = "a completion says whether the request worked, and owns its buffer"]
pub struct Completion {
    /// User data of the request.
    pub user_data: u64,
    /// Result of the request.
    pub result: Result<(), CommandError>,
    /// Dword 0 of the completion, for commands that return a value there; 0 for a request that was
    /// split.
    pub dw0: u32,
    /// Buffer of the request. `None` if it had none, or if the device is lost and may still write
    /// there; that memory is never used again.
    pub buffer: Option<DmaBuffer>,
}

/// Receiver of completed commands.
pub(crate) trait Sink {
    /// Handles a command that was submitted by itself; `hold` in its slot has the buffer.
    fn single(
        &mut self,
        user_data: u64,
        result: Result<(), CommandError>,
        dw0: u32,
        hold: &mut Option<DmaBuffer>,
    );

    /// Handles any other completion.
    fn other(&mut self, completion: Completion);
}

impl<F: FnMut(Completion)> Sink for F {
    #[inline]
    fn single(
        &mut self,
        user_data: u64,
        result: Result<(), CommandError>,
        dw0: u32,
        hold: &mut Option<DmaBuffer>,
    ) {
        self(Completion {
            user_data,
            result,
            dw0,
            buffer: hold.take(),
        });
    }

    #[inline]
    fn other(&mut self, completion: Completion) {
        self(completion);
    }
}

/// Counters of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounters {
    /// Commands submitted, repeated ones included.
    pub commands: u64,
    /// Completions of submitted commands.
    pub completions: u64,
    /// Completion entries that belong to no command in flight: stale, repeated or made up.
    pub stale: u64,
    /// Doorbell registers written.
    pub register_doorbells: u64,
    /// Doorbells published in memory alone.
    pub silent_doorbells: u64,
    /// Commands that were repeated after an abort or a reset.
    pub retried: u64,
    /// Commands that the controller was asked to abort.
    pub aborts: u64,
    /// Times that the queue pair was set up again after a reset.
    pub recreated: u64,
    /// Transfers that were copied through a bounce buffer.
    pub bounced: u64,
    /// Bytes of the bounced transfers.
    pub bounced_bytes: u64,
    /// Times that the thread slept for an interrupt.
    pub sleeps: u64,
}

/// Hook that sees completion entries before the queue pair, with which tests tamper with a real
/// queue.
pub trait Tap: Send {
    /// Called for the entry at the head, whether or not it has the expected phase (`new`). The
    /// result replaces the entry.
    fn look(&mut self, entry: nvme::Completion, new: bool) -> Look;
}

/// Result of a [`Tap`].
#[derive(Clone, Copy, Debug)]
pub enum Look {
    /// No entry (yet).
    Nothing,
    /// This entry instead.
    Entry(nvme::Completion),
    /// Two entries instead, for example a repeated or a forged one.
    Both(nvme::Completion, nvme::Completion),
    /// A lost entry: the queue advances without a completion.
    Lost,
}
