//! State machine of one request: its next kernel operation, and its result.
//!
//! No system call is made here, so that every result of the kernel can be tested without one.

use crate::{AtomicWrites, IoError, IoErrorKind, Op, Request};
use dma::{Buffer, SegmentList};
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of repetitions of an operation for which the kernel temporarily lacked resources.
const MAX_RETRIES: u16 = 1000;

/// Operations that a file supports. Shared by all queues into the file, so that a missing one is
/// detected only once.
#[derive(Debug)]
pub(crate) struct Abilities {
    punch: AtomicBool,
    zero_range: AtomicBool,
    /// Whether reads beyond the end of the file return zeroes.
    endless: bool,
    /// Writes that the kernel promises to execute atomically with `RWF_ATOMIC`.
    atomic: AtomicWrites,
}

impl Abilities {
    /// Creates the abilities of a file: whether holes can be punched, and ranges zeroed in place.
    pub(crate) fn new(punch: bool, zero_range: bool) -> Self {
        Self {
            punch: AtomicBool::new(punch),
            zero_range: AtomicBool::new(zero_range),
            endless: false,
            atomic: AtomicWrites::NONE,
        }
    }

    /// Sets the writes that the kernel promises to execute atomically.
    pub(crate) fn atomic(self, atomic: AtomicWrites) -> Self {
        Self { atomic, ..self }
    }

    /// Returns the writes that the kernel promises to execute atomically.
    pub(crate) fn atomic_writes(&self) -> AtomicWrites {
        self.atomic
    }

    /// Sets whether reads beyond the end of the file return zeroes.
    pub(crate) fn endless(self, endless: bool) -> Self {
        Self { endless, ..self }
    }

    /// Returns whether reads beyond the end of the file return zeroes.
    pub(crate) fn is_endless(&self) -> bool {
        self.endless
    }

    /// Returns whether holes can be punched into the file.
    pub(crate) fn punch(&self) -> bool {
        // Relaxed: a hint that stands for itself; an outdated value costs one refused operation.
        self.punch.load(Ordering::Relaxed)
    }

    /// Returns whether ranges of the file can be zeroed in place.
    pub(crate) fn zero_range(&self) -> bool {
        self.zero_range.load(Ordering::Relaxed)
    }

    /// Records that punching a hole has failed, so that it is not tried again.
    pub(crate) fn cannot_punch(&self) {
        self.punch.store(false, Ordering::Relaxed);
    }

    /// Records that zeroing in place has failed, so that it is not tried again.
    pub(crate) fn cannot_zero(&self) {
        self.zero_range.store(false, Ordering::Relaxed);
    }
}

/// Kernel operation that a request needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelOp {
    /// Read or write between the file and the memory of the request.
    Data,
    /// A write that is durable when it completes (`RWF_DSYNC`); otherwise like [`KernelOp::Data`].
    Durable,
    /// Read or write through a bounce buffer, in pieces.
    Bounce,
    /// Write of zeroes from a buffer of zeroes, in pieces.
    Zeroes,
    /// Deallocation of the range by punching a hole (`FALLOC_FL_PUNCH_HOLE`).
    Punch,
    /// Zeroing of the range without writing it (`FALLOC_FL_ZERO_RANGE`).
    ZeroRange,
    /// Flush that makes the written data durable (`fdatasync`).
    Sync,
}

/// Step of a request after the kernel has completed one of its operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Continuation {
    /// Submit the next operation of the request ([`RingJob::step`]).
    Again,
    /// Complete the request with this result.
    Done(Result<(), IoError>),
}

/// Outstanding request of a ring, with its progress.
#[derive(Debug)]
pub(crate) struct RingJob {
    pub(crate) request: Request,
    /// Index by which the ring knows the request's file.
    pub(crate) file: usize,
    pub(crate) step: KernelOp,
    /// Number of bytes of the request's range that are complete.
    pub(crate) done: u64,
    /// Bounce buffer that the device can access, while `step` is [`KernelOp::Bounce`].
    pub(crate) bounce: Option<Buffer>,
    /// Whether the caller has cancelled the request.
    pub(crate) cancelled: bool,
    /// Whether a later fsync makes this durable write durable, together with others.
    pub(crate) synced_later: bool,
    /// Whether the kernel is executing a durable write of this request.
    pub(crate) is_durable_write: bool,
    /// Whether the write must be atomic: a single operation, which is never continued after a short
    /// result.
    pub(crate) atomic: bool,
    retries: u16,
}

impl RingJob {
    /// Creates the job of a request at its first step. `reachable`: the kernel can access the
    /// request's memory directly, without a bounce buffer.
    pub(crate) fn new(request: Request, file: usize, reachable: bool, can: &Abilities) -> Self {
        let atomic = matches!(request.op, Op::Write { .. })
            && can.atomic.covers(request.offset, request.len);
        // The kernel takes one piece of memory only.
        let reachable = reachable && (!atomic || request.data.segments().len() == 1);
        let step = match request.op {
            Op::Write { fua: true } if reachable => KernelOp::Durable,
            Op::Read | Op::Write { .. } if reachable => KernelOp::Data,
            Op::Read | Op::Write { .. } => KernelOp::Bounce,
            Op::Flush => KernelOp::Sync,
            Op::Deallocate => KernelOp::Punch,
            Op::WriteZeroes {
                deallocate: true, ..
            } if can.punch() => KernelOp::Punch,
            Op::WriteZeroes { .. } if can.zero_range() => KernelOp::ZeroRange,
            Op::WriteZeroes { .. } => KernelOp::Zeroes,
        };
        Self {
            atomic,
            ..Self::at(step, request, file)
        }
    }

    /// Creates the job of a request that begins with the operation `step`.
    #[inline(always)]
    pub(crate) fn at(step: KernelOp, request: Request, file: usize) -> Self {
        Self {
            request,
            file,
            step,
            done: 0,
            bounce: None,
            cancelled: false,
            synced_later: false,
            is_durable_write: false,
            atomic: false,
            retries: 0,
        }
    }

    /// Returns whether this result of the first operation ends the request because all data has
    /// moved. Fast path for nearly all results; agrees with [`RingJob::advance`].
    #[inline(always)]
    pub(crate) fn is_done_by(&self, answer: i32) -> bool {
        self.step == KernelOp::Data
            && self.done == 0
            && u64::try_from(answer).is_ok_and(|moved| moved == self.request.len)
    }

    /// Returns the number of bytes of the request that remain.
    pub(crate) fn left(&self) -> u64 {
        self.request.len.saturating_sub(self.done)
    }

    /// Processes the result of the current step: bytes moved, or a negative error number.
    ///
    /// `unit` is the granularity at which the file is accessed: a transfer that ended between two
    /// units is repeated from the unit that it did not finish.
    pub(crate) fn advance(&mut self, answer: i32, unit: u64, can: &Abilities) -> Continuation {
        let Ok(moved) = u64::try_from(answer) else {
            return self.failed(answer.saturating_neg(), unit, can);
        };
        match self.step {
            KernelOp::Data | KernelOp::Durable | KernelOp::Bounce | KernelOp::Zeroes => {
                self.moved(moved, unit, can)
            }
            KernelOp::Punch | KernelOp::ZeroRange => self.changed(),
            KernelOp::Sync => Continuation::Done(Ok(())),
        }
    }

    fn moved(&mut self, moved: u64, unit: u64, can: &Abilities) -> Continuation {
        let moved = moved.min(self.left());
        if self.atomic && moved < self.left() {
            // The rest would be another write.
            return Continuation::Done(Err(IoErrorKind::MediaWrite.into()));
        }
        let whole = if moved == self.left() {
            moved
        } else {
            moved - moved % unit
        };
        // The file's end, and perhaps a part of a unit before it.
        let ends = whole == 0 && self.request.op == Op::Read && can.is_endless();
        let whole = if ends { moved } else { whole };
        if let (Op::Read, Some(bounce)) = (self.request.op, &self.bounce) {
            let Some(data) = usize::try_from(whole)
                .ok()
                .and_then(|len| bounce.get(..len))
            else {
                return Continuation::Done(Err(IoErrorKind::MediaRead.into()));
            };
            if !self.copy_in(data) {
                return Continuation::Done(Err(IoErrorKind::Memory.into()));
            }
        }
        self.done += whole;
        if self.left() == 0 {
            return self.changed();
        }
        if ends {
            let mut rest = SegmentList::new();
            let len = self.request.data.slice(self.done, self.left(), &mut rest);
            return Continuation::Done(if rest.fill(0) == len {
                Ok(())
            } else {
                Err(IoErrorKind::Memory.into())
            });
        }
        if whole == 0 {
            // A read behind the end of the file; a write of nothing is no progress either.
            let kind = if self.request.op == Op::Read {
                IoErrorKind::Truncated
            } else {
                IoErrorKind::MediaWrite
            };
            return Continuation::Done(Err(kind.into()));
        }
        self.retries = 0;
        self.again()
    }

    /// Continues a request after its range has the new contents; a flush may still be needed.
    fn changed(&mut self) -> Continuation {
        let zeroes = matches!(self.request.op, Op::WriteZeroes { fua: true, .. });
        if zeroes || self.synced_later {
            self.step = KernelOp::Sync;
            self.again()
        } else {
            Continuation::Done(Ok(()))
        }
    }

    fn failed(&mut self, errno: i32, unit: u64, can: &Abilities) -> Continuation {
        let write = self.request.op.changes();
        match (errno, self.step) {
            (libc::EINTR | libc::EAGAIN, _) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                self.again()
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, KernelOp::Punch) => {
                can.cannot_punch();
                match self.request.op {
                    Op::WriteZeroes { .. } if can.zero_range() => self.step = KernelOp::ZeroRange,
                    Op::WriteZeroes { .. } => self.step = KernelOp::Zeroes,
                    _ => return Continuation::Done(Err(IoError::from_errno(errno, true))),
                }
                self.again()
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, KernelOp::ZeroRange) => {
                can.cannot_zero();
                self.step = KernelOp::Zeroes;
                self.again()
            }
            // The file is stricter about memory than it reported: a page aligned buffer satisfies
            // every device.
            (libc::EINVAL, KernelOp::Data | KernelOp::Durable) => {
                self.step = KernelOp::Bounce;
                self.again()
            }
            (_, KernelOp::Sync) => Continuation::Done(Err(IoError::of_sync(errno))),
            (_, KernelOp::Durable | KernelOp::Bounce)
                if matches!(self.request.op, Op::Write { fua: true }) =>
            {
                Continuation::Done(Err(IoError::of_durable(errno, unit)))
            }
            _ => Continuation::Done(Err(IoError::from_errno(errno, write))),
        }
    }

    fn again(&self) -> Continuation {
        if self.cancelled {
            Continuation::Done(Err(IoErrorKind::Aborted.into()))
        } else {
            Continuation::Again
        }
    }

    /// Copies data that was read into a bounce buffer into the request's memory. Returns whether
    /// all of it was copied.
    fn copy_in(&self, data: &[u8]) -> bool {
        self.request.data.copy_from(self.done, data) == data.len()
    }

    /// Fills the bounce buffer with the data to write from the current position on. Returns the
    /// length of the next operation in bytes, or `None` when memory is inaccessible.
    pub(crate) fn load_bounce(&mut self) -> Option<usize> {
        let left = usize::try_from(self.left()).ok()?;
        let bounce = self.bounce.as_mut()?;
        let len = left.min(bounce.len());
        if self.request.op.changes() {
            let piece = bounce.get_mut(..len)?;
            if self.request.data.copy_to(self.done, piece) != len {
                return None;
            }
        }
        Some(len)
    }
}

#[cfg(test)]
mod tests;
