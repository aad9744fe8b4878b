//! What goes into a queue pair and what comes out.

use nvme::NvmOpcode;

use crate::buffer::DmaBuffer;
use crate::error::CommandError;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read blocks into the buffer.
    Read,
    /// Write blocks from the buffer.
    Write {
        /// Force Unit Access: durable when it completes.
        fua: bool,
    },
    /// Compare blocks with the buffer; different ones fail with Compare Failure.
    Compare,
    /// Make the blocks read as zeroes.
    WriteZeroes {
        /// Durable when it completes.
        fua: bool,
        /// The controller may deallocate them.
        deallocate: bool,
    },
    /// Deallocate the blocks (Dataset Management with the attribute Deallocate).
    Deallocate,
    /// Make durable what has been completed. Blocks are not looked at.
    Flush,
}

impl Op {
    /// Its opcode.
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

    /// It moves the buffer's data.
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write { .. } | Op::Compare)
    }
}

/// One piece of work, of any size. Larger ones than a command can carry are split.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// The data; none for operations without.
    pub buffer: Option<DmaBuffer>,
    /// Comes back in the completion.
    pub user_data: u64,
}

/// The end of a request.
#[derive(Debug)]
#[must_use = "a completion says whether the request worked, and owns its buffer"]
pub struct Completion {
    /// The request's.
    pub user_data: u64,
    /// How it went.
    pub result: Result<(), CommandError>,
    /// Dword 0 of the completion, for commands that give something back there; 0 for a
    /// request that went out in parts.
    pub dw0: u32,
    /// The request's buffer. `None` if it had none, or if the device is gone and may still write
    /// there: then that memory is never used again.
    pub buffer: Option<DmaBuffer>,
}

/// Who is told of commands that have completed.
pub(crate) trait Sink {
    /// One that was submitted by itself; its slot's buffer is there to be taken.
    fn single(
        &mut self,
        user_data: u64,
        result: Result<(), CommandError>,
        dw0: u32,
        hold: &mut Option<DmaBuffer>,
    );

    /// Any other.
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

/// What a queue pair has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounters {
    /// Commands submitted, repeated ones included.
    pub commands: u64,
    /// Completions of them.
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
    /// Bytes of these.
    pub bounced_bytes: u64,
    /// Times that the thread slept for an interrupt.
    pub sleeps: u64,
}

/// A look at completion entries before the queue pair sees them: the place where tests
/// tamper with a real queue.
pub trait Tap: Send {
    /// Called for the entry at the head, whether its phase is the one waited for (`new`) or not.
    /// What is returned is taken instead.
    fn look(&mut self, entry: nvme::Completion, new: bool) -> Look;
}

/// What a [`Tap`] makes of an entry.
#[derive(Clone, Copy, Debug)]
pub enum Look {
    /// There is nothing (yet).
    Nothing,
    /// This entry.
    Entry(nvme::Completion),
    /// Two entries in its place: one of them is repeated, or was never sent.
    Both(nvme::Completion, nvme::Completion),
    /// An entry that is lost: the queue moves on, nobody is told.
    Lost,
}
