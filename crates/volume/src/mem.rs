//! A volume in this process's memory.

use crate::request::check_range;
use crate::{
    Completion, Info, Io, IoError, IoErrorKind, Kind, Op, Request, Volume, VolumeError, VolumeQueue,
};
use dma::{Memory, SegmentList, View};
use rustix::fs::FallocateFlags;

/// From this length on, asking the kernel to drop pages is cheaper than writing zeroes (bytes).
const PUNCH_FROM: u64 = 256 << 10;

/// A volume in memory: shared by all its queues, gone with the process. Memory is taken from the system when it is
/// first written, and given back by deallocation.
#[derive(Debug)]
pub struct MemVolume {
    memory: Memory,
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
        let memory = Memory::anonymous(len).map_err(|error| VolumeError::Memory {
            what: "a memory volume",
            source: std::io::Error::other(error),
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

    fn open(&self, _io: &Io) -> Result<Box<dyn VolumeQueue>, VolumeError> {
        let whole = usize::try_from(self.size)
            .ok()
            .and_then(|len| self.memory.segments(0, len));
        let whole = whole.ok_or(VolumeError::Size {
            size: self.size,
            why: "it does not fit into the address space",
        })?;
        Ok(Box::new(MemQueue {
            memory: self.memory.clone(),
            whole,
            size: self.size,
            read_only: self.read_only,
        }))
    }

    fn id(&self) -> Vec<u8> {
        format!("mem:{}", self.size).into_bytes()
    }
}

/// One worker's queue into a [`MemVolume`].
struct MemQueue {
    memory: Memory,
    /// All of the volume.
    whole: SegmentList,
    size: u64,
    read_only: bool,
}

impl MemQueue {
    fn execute(&mut self, request: &Request) -> Result<(), IoError> {
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
        complete(copied, data.len_bytes())
    }

    fn zero(&mut self, request: &Request) -> Result<(), IoError> {
        complete(
            self.whole.fill_range(request.offset, request.len, 0),
            request.len,
        )
    }

    /// Gives whole pages back to the system; what is left of pages is zeroed.
    fn release(&mut self, request: &Request) -> Result<(), IoError> {
        if request.len < PUNCH_FROM {
            return self.zero(request);
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.memory.fd(), punch, request.offset, request.len) {
            Ok(()) => Ok(()),
            Err(_) => self.zero(request),
        }
    }
}

/// All bytes must have been reached: the ranges were checked, so that anything else is memory that has gone.
fn complete(bytes: u64, len: u64) -> Result<(), IoError> {
    if bytes == len {
        Ok(())
    } else {
        Err(IoErrorKind::Memory.into())
    }
}

impl VolumeQueue for MemQueue {
    fn is_immediate(&self) -> bool {
        true
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let len = data.len_bytes();
        let checked = check_range(op, offset, len, self.size, 1, self.read_only);
        Some(checked.and_then(|()| self.copy(op, offset, data)))
    }

    fn submit(&mut self, request: Request) -> Option<Completion> {
        let result = self.execute(&request);
        Some(request.complete(result))
    }
}
