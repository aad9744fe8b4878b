//! Requests to a queue pair, their completions, and its counters.

use nvme::NvmOpcode;

use crate::buffer::DmaBuffer;
use crate::error::CommandError;

/// Operation of a request to a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read blocks into the buffer.
    Read,
    /// Write blocks from the buffer, durably with `fua`.
    Write {
        /// Force Unit Access: the data is durable on completion.
        fua: bool,
    },
    /// Compare blocks with the buffer; the command fails with Compare Failure when they differ.
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
    /// Operation that the request executes.
    pub op: Op,
    /// Number of the first logical block.
    pub lba: u64,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Data buffer; `None` for operations without data.
    pub buffer: Option<DmaBuffer>,
    /// Number by which the caller recognises the completion.
    pub user_data: u64,
}

/// Completion of a request.
#[derive(Debug)]
#[must_use = "a completion says whether the request worked, and owns its buffer"]
pub struct Completion {
    /// User data of the request that has completed.
    pub user_data: u64,
    /// Result of the request: success, or an error.
    pub result: Result<(), CommandError>,
    /// Dword 0 of the completion entry, for commands that return a value there; 0 for a split
    /// request.
    pub dw0: u32,
    /// Buffer of the request. `None` if there was none, or if the device is lost and may still
    /// write to the buffer; that memory is then never used again.
    pub buffer: Option<DmaBuffer>,
}

/// Receiver of completed commands within a queue pair.
pub(crate) trait Sink {
    /// Handles the completion of an unsplit command; `hold` in its slot contains the buffer.
    fn single(
        &mut self,
        user_data: u64,
        result: Result<(), CommandError>,
        dw0: u32,
        hold: &mut Option<DmaBuffer>,
    );

    /// Handles the completion of a split request, or of a command without a completion entry.
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
    /// Number of submitted commands, repeated ones included.
    pub commands: u64,
    /// Number of completions of submitted commands.
    pub completions: u64,
    /// Number of completion queue entries that match no outstanding command: stale, duplicate or
    /// forged.
    pub stale: u64,
    /// Number of writes of doorbell registers.
    pub register_doorbells: u64,
    /// Number of doorbell updates in shared memory that needed no register write.
    pub silent_doorbells: u64,
    /// Number of commands that were repeated after an abort or a reset.
    pub retried: u64,
    /// Number of commands that the controller was asked to abort.
    pub aborts: u64,
    /// Number of times that the queues were created again after a reset.
    pub recreated: u64,
    /// Number of transfers that were copied through a bounce buffer.
    pub bounced: u64,
    /// Number of bytes copied through bounce buffers.
    pub bounced_bytes: u64,
    /// Number of times that the thread slept until an interrupt.
    pub sleeps: u64,
}

/// Hook for tests that sees and changes completion entries of a real queue before the queue pair
/// does.
pub trait Tap: Send {
    /// Handles the entry at the head; `new` tells whether its phase tag marks it as new. The result
    /// replaces the entry.
    fn look(&mut self, entry: nvme::Completion, new: bool) -> TapResult;
}

/// Completion queue entries that the queue pair sees in place of one, as decided by a [`Tap`].
#[derive(Clone, Copy, Debug)]
pub enum TapResult {
    /// No entry has arrived.
    Nothing,
    /// This entry replaces the original.
    Entry(nvme::Completion),
    /// These two entries replace the original, for example one that is repeated or forged.
    Both(nvme::Completion, nvme::Completion),
    /// The entry is lost: the queue advances without a completion.
    Lost,
}
