//! A volume in this process's memory.

use crate::request::check_range;
use crate::{
    Completion, FastPath, Info, Io, IoError, IoErrorKind, Kind, Op, OpenQueue, QueueState, Request,
    Volume, VolumeError, VolumeQueue,
};
use dma::{PrivateMemory, SegmentList, View};

/// From this length on, asking the kernel to drop pages is cheaper than writing zeroes (bytes).
const RELEASE_FROM: u64 = 256 << 10;

/// Cache lines of a read or write that are asked for when it is known of: the processor asks for
/// the others itself, once the copy is under way.
const AHEAD: usize = 16;

/// A volume in memory: shared by all its queues, gone with the process. Memory is taken from the
/// system when it is first written, in huge pages where there are any ([`PrivateMemory`]), and
/// returned by deallocation.
#[derive(Debug)]
pub struct MemVolume {
    memory: PrivateMemory,
    size: u64,
    read_only: bool,
}

impl MemVolume {
    /// A volume of `size` zero bytes.
    pub fn new(size: u64) -> Result<Self, VolumeError> {
        if size == 0 {
            return Err(VolumeError::Size {
                size,
                why: "it must hold at least one block",
            });
        }
        let len = usize::try_from(size)
            .ok()
            .filter(|len| isize::try_from(*len).is_ok())
            .ok_or(VolumeError::Size {
                size,
                why: "it does not fit into the address space",
            })?;
        let memory = PrivateMemory::new(len).map_err(|error| VolumeError::Memory {
            what: "a memory volume",
            error: std::io::Error::other(error),
        })?;
        Ok(Self {
            memory,
            size,
            read_only: false,
        })
    }

    /// The same volume, refusing writes.
    pub fn read_only(self) -> Self {
        Self {
            read_only: true,
            ..self
        }
    }
}

impl Volume for MemVolume {
    fn info(&self) -> Info {
        Info {
            size: self.size,
            block_size: 1,
            optimal_io: 4096,
            read_only: self.read_only,
            volatile_cache: false,
            deallocate: !self.read_only,
            deallocate_granularity: if self.read_only { 0 } else { 4096 },
            zeroes_after_deallocate: true,
            write_zeroes: true,
            kind: Kind::Memory,
            description: "memory".into(),
        }
    }

    fn open(&self, _io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::with_fast_path(MemQueue {
            memory: self.memory.clone(),
            size: self.size,
            read_only: self.read_only,
        }))
    }

    fn id(&self) -> Vec<u8> {
        format!("mem:{}", self.size).into_bytes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }
}

/// One worker's queue into a [`MemVolume`].
struct MemQueue {
    memory: PrivateMemory,
    size: u64,
    read_only: bool,
}

impl MemQueue {
    fn execute(&self, request: &Request) -> Result<(), IoError> {
        request.check(self.size, 1, self.read_only)?;
        match request.op {
            Op::Flush => Ok(()),
            Op::Read | Op::Write { .. } => {
                self.copy(request.op, request.offset, request.data.view())
            }
            Op::WriteZeroes {
                deallocate: false, ..
            } => self.zero(request),
            Op::WriteZeroes {
                deallocate: true, ..
            }
            | Op::Deallocate => self.release(request),
        }
    }

    fn copy(&self, op: Op, offset: u64, data: View<'_>) -> Result<(), IoError> {
        let copied = match op {
            Op::Read => self.memory.copy_out(offset, data),
            _ => self.memory.copy_in(offset, data),
        };
        self.complete(op, copied, data.len_bytes())
    }

    fn zero(&self, request: &Request) -> Result<(), IoError> {
        let zeroed = self.memory.zero(request.offset, request.len);
        self.complete(request.op, zeroed, request.len)
    }

    /// Gives whole pages back to the system; what is left of pages is zeroed.
    fn release(&self, request: &Request) -> Result<(), IoError> {
        if request.len < RELEASE_FROM {
            return self.zero(request);
        }
        let released = self.memory.release(request.offset, request.len);
        self.complete(request.op, released, request.len)
    }

    /// All bytes must have been reached: the ranges were checked, so that anything else is memory
    /// that has gone.
    fn complete(&self, op: Op, bytes: u64, len: u64) -> Result<(), IoError> {
        if bytes != len {
            Err(IoErrorKind::Memory.into())
        } else if !self.memory.is_poisoned() {
            Ok(())
        } else if op.changes() {
            Err(IoErrorKind::MediaWrite.into())
        } else {
            Err(IoErrorKind::MediaRead.into())
        }
    }
}

impl VolumeQueue for MemQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        let result = self.execute(&request);
        Some(request.complete(result))
    }

    fn poll(&mut self, _: &mut dyn FnMut(Completion)) -> usize {
        0
    }

    fn state(&self) -> QueueState {
        QueueState::IDLE
    }

    fn cancel(&mut self, _: u64) {}
}

impl FastPath for MemQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {}

    fn is_immediate(&self) -> bool {
        true
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let len = data.len_bytes();
        let checked = check_range(op, offset, len, self.size, 1, self.read_only);
        Some(checked.and_then(|()| self.copy(op, offset, data)))
    }

    fn prefetches(&self) -> bool {
        true
    }

    fn prefetch(&mut self, _: Op, offset: u64, len: u64) {
        self.memory.prefetch::<AHEAD>(offset, len);
    }
}
