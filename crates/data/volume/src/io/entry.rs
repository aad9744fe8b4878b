//! Ring entries for the next operation of a job.

use super::IoCounters;
use super::fixed::FixedTable;
use super::job::{KernelOp, RingJob};
use super::pool::BouncePool;
use crate::{IoErrorKind, Op};
use dma::{Buffer, Segment};
use io_uring::{opcode, squeue, types};

/// Maximum number of segments in one operation (`UIO_MAXIOV`). Requests with more take several
/// operations.
const MAX_SEGMENTS: usize = 1024;
/// Maximum number of bytes in one operation: below the kernel's own limit of 2 GiB less a page, and
/// a multiple of every block size.
const MAX_BYTES: u64 = 1 << 30;
/// Size in bytes of the buffer of zeroes from which ranges are zeroed.
const ZEROES: usize = 1 << 20;

/// Memory for ring operations that do not use the memory of the request itself.
pub(super) struct Sources<'a> {
    /// Pool of bounce buffers, for memory that direct I/O cannot use.
    pub(super) bounce: &'a mut BouncePool,
    /// Buffer of zeroes that zeroing requests write from, created at first use.
    pub(super) zeroes: &'a mut Option<Buffer>,
    /// Table of pinned memory. `None` for an operation that a kernel thread executes: the thread
    /// looks the buffer up when it begins, and the entry may be empty by then.
    pub(super) fixed: Option<&'a FixedTable>,
    pub(super) counters: &'a mut IoCounters,
}

/// Builds the entry for the job's current step. The entry points to the job's memory, to `vectors`
/// and to the zeroes: the caller keeps all of them in place until the operation has completed.
pub(super) fn entry(
    job: &mut RingJob,
    vectors: &mut Vec<libc::iovec>,
    target: FileTarget,
    sources: Sources<'_>,
) -> Result<squeue::Entry, IoErrorKind> {
    let offset = job
        .request
        .offset
        .checked_add(job.done)
        .ok_or(IoErrorKind::OutOfRange)?;
    let op = match job.request.op {
        Op::Write { .. } if job.synced_later => Op::Write { fua: false },
        op => op,
    };
    let (write, flags) = direction(op);
    let flags = if job.atomic {
        flags | libc::RWF_ATOMIC
    } else {
        flags
    };
    Ok(match job.step {
        KernelOp::Data | KernelOp::Durable => {
            let data = &job.request.data;
            match data.segments() {
                // The kernel does no write from pinned memory as a whole.
                [one] if job.atomic => {
                    target.contiguous(write, one.as_ptr(), job.request.len, offset, flags)
                }
                [one] if job.done == 0 => match in_one(one.len() as u64) {
                    Some(bytes) => {
                        let at = one.as_ptr();
                        let place = sources
                            .fixed
                            .and_then(|fixed| fixed.find(at.addr(), one.len()));
                        sources.counters.fixed += u64::from(place.is_some());
                        let transfer = Transfer {
                            at,
                            bytes,
                            offset,
                            op,
                            place,
                        };
                        transfer.entry(target)
                    }
                    None => target.contiguous(write, one.as_ptr(), MAX_BYTES, offset, flags),
                },
                many if job.done == 0 && many.len() <= MAX_SEGMENTS => {
                    target.transfer(write, data.as_iovecs(), many.len(), offset, flags)
                }
                many => {
                    remaining(vectors, many, job.done);
                    target.transfer(write, vectors.as_ptr(), vectors.len(), offset, flags)
                }
            }
        }
        KernelOp::Bounce => {
            if job.bounce.is_none() {
                job.bounce = Some(sources.bounce.take(job.left()));
                sources.counters.bounced += 1;
            }
            let len = job.load_bounce().ok_or(IoErrorKind::Memory)?;
            if job.atomic && len as u64 != job.request.len {
                return Err(IoErrorKind::Memory);
            }
            let buffer = job.bounce.as_mut().ok_or(IoErrorKind::Memory)?;
            target.contiguous(write, buffer.as_mut_ptr(), len as u64, offset, flags)
        }
        KernelOp::Zeroes => {
            let zeroes = sources.zeroes.get_or_insert_with(|| Buffer::new(ZEROES));
            let len = job.left().min(zeroes.len() as u64);
            target.contiguous(true, zeroes.as_mut_ptr(), len, offset, flags)
        }
        KernelOp::Punch => target.fallocate(
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            job.left(),
        ),
        KernelOp::ZeroRange => target.fallocate(
            libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            job.left(),
        ),
        KernelOp::Sync => target.sync(),
    })
}

/// Returns `len` as the length of one operation, or `None` if it is too long for one.
#[inline(always)]
pub(super) fn in_one(len: u64) -> Option<u32> {
    // At most MAX_BYTES.
    (len <= MAX_BYTES).then_some(len as u32)
}

/// Read or write of one memory segment by a single ring operation.
pub(super) struct Transfer {
    pub(super) at: *mut u8,
    /// Length in bytes, as returned by [`in_one`].
    pub(super) bytes: u32,
    pub(super) offset: u64,
    /// Operation of the transfer: a read or a write.
    pub(super) op: Op,
    /// Index of the fixed buffer that contains all of the memory, if there is one.
    pub(super) place: Option<u16>,
}

impl Transfer {
    /// Builds the ring entry of the transfer.
    #[inline(always)]
    pub(super) fn entry(self, target: FileTarget) -> squeue::Entry {
        let Self {
            at,
            bytes,
            offset,
            op,
            place,
        } = self;
        let (write, flags) = direction(op);
        match place {
            Some(place) => target.fixed(write, at, bytes, place, offset, flags),
            None => target.contiguous(write, at, bytes.into(), offset, flags),
        }
    }
}

/// Returns whether the operation writes, and the `RWF_*` flags that it needs.
#[inline(always)]
fn direction(op: Op) -> (bool, i32) {
    match op {
        Op::Read => (false, 0),
        Op::Write { fua: true } => (true, libc::RWF_DSYNC),
        _ => (true, 0),
    }
}

/// Fills `vectors` with the segments that are left after the first `done` bytes.
fn remaining(vectors: &mut Vec<libc::iovec>, segments: &[Segment], done: u64) {
    vectors.clear();
    let mut skip = done;
    for segment in segments {
        if vectors.len() == MAX_SEGMENTS {
            break;
        }
        let len = segment.len() as u64;
        if skip >= len {
            skip -= len;
            continue;
        }
        // `skip` is less than the segment's length.
        let (base, rest) = (
            segment.as_ptr().wrapping_add(skip as usize),
            segment.len() - skip as usize,
        );
        vectors.push(libc::iovec {
            iov_base: base.cast(),
            iov_len: rest,
        });
        skip = 0;
    }
}

/// Reference by which a ring entry names a file.
#[derive(Clone, Copy)]
pub(super) enum FileTarget {
    /// Index of the file in the kernel's table of registered files.
    Place(u32),
    /// Number of the file's descriptor.
    Descriptor(i32),
}

/// Builds a ring entry for a file that is named by index or by descriptor.
macro_rules! entry {
    ($target:expr, |$file:ident| $build:expr) => {
        match $target {
            FileTarget::Place(place) => {
                let $file = types::Fixed(place);
                $build
            }
            FileTarget::Descriptor(descriptor) => {
                let $file = types::Fd(descriptor);
                $build
            }
        }
    };
}

impl FileTarget {
    /// Builds the ring entry of a read or write of several memory segments.
    fn transfer(
        self,
        write: bool,
        first: *const libc::iovec,
        count: usize,
        offset: u64,
        flags: i32,
    ) -> squeue::Entry {
        // At most MAX_SEGMENTS.
        let count = count as u32;
        if write {
            entry!(self, |file| opcode::Writev::new(file, first, count)
                .offset(offset)
                .rw_flags(flags)
                .build())
        } else {
            entry!(self, |file| opcode::Readv::new(file, first, count)
                .offset(offset)
                .rw_flags(flags)
                .build())
        }
    }

    /// Builds the ring entry of a read or write of one memory segment, limited to its first
    /// [`MAX_BYTES`].
    fn contiguous(
        self,
        write: bool,
        at: *mut u8,
        len: u64,
        offset: u64,
        flags: i32,
    ) -> squeue::Entry {
        let len = len.min(MAX_BYTES) as u32;
        if write {
            entry!(self, |file| opcode::Write::new(file, at, len)
                .offset(offset)
                .rw_flags(flags)
                .build())
        } else {
            entry!(self, |file| opcode::Read::new(file, at, len)
                .offset(offset)
                .rw_flags(flags)
                .build())
        }
    }

    /// Builds a read or write of one memory segment that lies in the fixed buffer at `place`.
    fn fixed(
        self,
        write: bool,
        at: *mut u8,
        len: u32,
        place: u16,
        offset: u64,
        flags: i32,
    ) -> squeue::Entry {
        if write {
            entry!(self, |file| opcode::WriteFixed::new(file, at, len, place)
                .offset(offset)
                .rw_flags(flags)
                .build())
        } else {
            entry!(self, |file| opcode::ReadFixed::new(file, at, len, place)
                .offset(offset)
                .rw_flags(flags)
                .build())
        }
    }

    fn fallocate(self, mode: i32, offset: u64, len: u64) -> squeue::Entry {
        entry!(self, |file| opcode::Fallocate::new(file, len)
            .offset(offset)
            .mode(mode)
            .build())
    }

    fn sync(self) -> squeue::Entry {
        entry!(self, |file| opcode::Fsync::new(file)
            .flags(types::FsyncFlags::DATASYNC)
            .build())
    }
}
