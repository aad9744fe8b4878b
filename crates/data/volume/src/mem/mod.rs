//! Volumes in memory, private to this process or kept for later processes.

mod huge;
mod pieces;

use crate::request::{MAX_INLINE_BYTES, check_range};
use crate::{
    Completion, FastPath, Info, Io, IoError, IoErrorKind, Kind, Op, OpenQueue, QueueState, Request,
    Volume, VolumeError, VolumeQueue, Wake,
};
use dma::{MapError, PrivateMemory, SegmentList, View};
use pieces::Pieces;
use std::cell::Cell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

/// Length in bytes from which on returning pages to the kernel is cheaper than writing zeroes.
const RELEASE_FROM: u64 = 256 << 10;

/// Number of cache lines to prefetch for an expected read or write. The processor prefetches the
/// rest by itself once the copy has begun.
const AHEAD: usize = 16;

/// A volume in memory, shared by all its queues. The contents are lost with the process unless they
/// are kept ([`MemVolume::kept`]). Memory is allocated when it is first written, in huge pages
/// where possible ([`PrivateMemory`]), and freed by deallocation; or all at once, from the host's
/// pool of huge pages ([`MemVolume::reserved`]).
///
/// Short requests are done within the call. Zeroing, deallocation and long transfers continue in
/// pieces, a few in each round ([`VolumeQueue::poll`]), so that only their own client waits for
/// them.
#[derive(Debug)]
pub struct MemVolume {
    memory: PrivateMemory,
    size: u64,
    read_only: bool,
    /// Whether a later process may take the memory over.
    kept: bool,
    /// Whether the memory stays allocated until the volume is closed.
    reserved: bool,
}

impl MemVolume {
    /// Creates a volume in memory of `size` bytes, all zero.
    pub fn new(size: u64) -> Result<Self, VolumeError> {
        Self::with(size, PrivateMemory::new)
    }

    /// Creates a volume in a memory file ([`Volume::kept_memory`]). A later process that has a
    /// descriptor of the file can open the volume again with its contents. `file`: the file of an
    /// earlier process; `None`: create a new one.
    ///
    /// # Errors
    /// The errors of [`MemVolume::new`]. Also when `file` is not a memory file of a volume, or has
    /// another size.
    pub fn kept(size: u64, file: Option<OwnedFd>) -> Result<Self, VolumeError> {
        let volume = Self::with(size, |len| PrivateMemory::kept(len, file))?;
        huge::make(&volume.memory);
        Ok(Self {
            kept: true,
            ..volume
        })
    }

    /// Creates a volume in huge pages of 2 MiB from the host's pool, which are all allocated when
    /// this returns. `kept`: for a later process, as with [`MemVolume::kept`]; `file` has the same
    /// meaning as there.
    ///
    /// # Errors
    /// The errors of [`MemVolume::kept`]; [`VolumeError::Memory`] names the number of pages if the
    /// pool has too few.
    pub fn reserved(size: u64, file: Option<OwnedFd>, kept: bool) -> Result<Self, VolumeError> {
        let volume = Self::with(size, |len| PrivateMemory::reserved(len, file));
        let volume = volume.map_err(|error| match error {
            VolumeError::Memory { what, error } => VolumeError::Memory {
                what,
                error: std::io::Error::other(huge::shortage(size, &error)),
            },
            error => error,
        })?;
        Ok(Self {
            kept,
            reserved: true,
            ..volume
        })
    }

    fn with(
        size: u64,
        make: impl FnOnce(usize) -> Result<PrivateMemory, MapError>,
    ) -> Result<Self, VolumeError> {
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
        let memory = make(len).map_err(|error| VolumeError::Memory {
            what: "a memory volume",
            error: std::io::Error::other(error),
        })?;
        Ok(Self {
            memory,
            size,
            read_only: false,
            kept: false,
            reserved: false,
        })
    }

    /// Returns the volume with writes refused.
    pub fn read_only(self) -> Self {
        Self {
            read_only: true,
            ..self
        }
    }
}

impl Volume for MemVolume {
    fn info(&self) -> Info {
        let releases = !self.read_only && !self.reserved;
        Info {
            size: self.size,
            block_size: 1,
            optimal_io: 4096,
            read_only: self.read_only,
            volatile_cache: false,
            deallocate: releases,
            deallocate_granularity: if releases { 4096 } else { 0 },
            zeroes_after_deallocate: true,
            write_zeroes: true,
            kind: Kind::Memory,
            description: if self.reserved {
                "memory in huge pages"
            } else {
                "memory"
            }
            .into(),
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::with_fast_path(MemQueue {
            bytes: Bytes {
                memory: self.memory.clone(),
                size: self.size,
                read_only: self.read_only,
            },
            pieces: Pieces::new(),
            ending: io.ending(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        format!("mem:{}", self.size).into_bytes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn kept_memory(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file().filter(|_| self.kept)
    }
}

/// Queue of one worker into a [`MemVolume`].
struct MemQueue {
    bytes: Bytes,
    pieces: Pieces,
    /// Whether the worker is ending, so that unfinished requests are cancelled and the contents may
    /// be lost.
    ending: Rc<Cell<bool>>,
}

/// Memory of a volume, as a queue accesses it.
struct Bytes {
    memory: PrivateMemory,
    size: u64,
    read_only: bool,
}

impl Bytes {
    /// Executes `len` bytes of a checked request, beginning `done` bytes after its start.
    fn execute(&self, request: &Request, done: u64, len: u64) -> Result<(), IoError> {
        let offset = request.offset.saturating_add(done);
        match request.op {
            Op::Flush => Ok(()),
            Op::Read | Op::Write { .. } if len == request.len => {
                self.copy(request.op, offset, request.data.view())
            }
            Op::Read | Op::Write { .. } => {
                let mut part = SegmentList::new();
                request.data.slice(done, len, &mut part);
                self.copy(request.op, offset, part.view())
            }
            Op::WriteZeroes {
                deallocate: false, ..
            } => self.zero(request.op, offset, len),
            Op::WriteZeroes {
                deallocate: true, ..
            }
            | Op::Deallocate => self.release(request, offset, len),
        }
    }

    fn copy(&self, op: Op, offset: u64, data: View<'_>) -> Result<(), IoError> {
        let copied = match op {
            Op::Read => self.memory.copy_out(offset, data),
            _ => self.memory.copy_in(offset, data),
        };
        self.complete(op, copied, data.len_bytes())
    }

    fn zero(&self, op: Op, offset: u64, len: u64) -> Result<(), IoError> {
        let zeroed = self.memory.zero(offset, len);
        self.complete(op, zeroed, len)
    }

    /// Returns the whole pages of a range to the system, and zeroes the rest.
    fn release(&self, request: &Request, offset: u64, len: u64) -> Result<(), IoError> {
        if request.len < RELEASE_FROM {
            return self.zero(request.op, offset, len);
        }
        let released = self.memory.release(offset, len);
        self.complete(request.op, released, len)
    }

    /// Checks that all `len` bytes were accessed. Fewer mean that memory was lost, because the
    /// range was checked before.
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
        let Bytes {
            size, read_only, ..
        } = self.bytes;
        if let Err(error) = request.check(size, 1, read_only) {
            return Some(request.complete(Err(error)));
        }
        if !self.pieces.admits(&request) {
            self.pieces.push(request);
            return None;
        }
        let result = self.bytes.execute(&request, 0, request.len);
        Some(request.complete(result))
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        if self.pieces.count() > 0 && self.ending.get() {
            // A client may have asked for the zeroing of terabytes: nobody waits for that now.
            self.pieces.cancel_all();
        }
        let bytes = &self.bytes;
        let work = |request: &Request, done, len| bytes.execute(request, done, len);
        self.pieces.round(work, done)
    }

    fn state(&self) -> QueueState {
        match self.pieces.count() {
            0 => QueueState::IDLE,
            in_flight => QueueState {
                in_flight,
                wake: Wake::Poll,
            },
        }
    }

    fn cancel(&mut self, tag: u64) {
        self.pieces.cancel(tag);
    }
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
        if len > MAX_INLINE_BYTES {
            return None;
        }
        let bytes = &self.bytes;
        let checked = check_range(op, offset, len, bytes.size, 1, bytes.read_only);
        Some(checked.and_then(|()| bytes.copy(op, offset, data)))
    }

    fn prefetches(&self) -> bool {
        true
    }

    fn prefetch(&mut self, _: Op, offset: u64, len: u64) {
        self.bytes.memory.prefetch::<AHEAD>(offset, len);
    }
}
