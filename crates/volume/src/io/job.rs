//! The state machine of one request in the kernel: its next operation, and its end.
//!
//! No system call happens here, so that every way a kernel can answer is tested without one.

use crate::{AtomicWrites, IoError, IoErrorKind, Op, Request};
use dma::{Buffer, SegmentList};
use std::sync::atomic::{AtomicBool, Ordering};

/// Limit of repetitions of an operation that the kernel could not carry out for now.
const MAX_RETRIES: u16 = 1000;

/// Features that a file turned out to support; shared by all queues into it, so that they are found
/// out once.
#[derive(Debug)]
pub(crate) struct Abilities {
    punch: AtomicBool,
    zero_range: AtomicBool,
    /// Bytes behind the file's end read as zeroes.
    endless: bool,
    /// Writes that the kernel does as a whole with `RWF_ATOMIC`.
    atomic: AtomicWrites,
}

impl Abilities {
    /// Creates the abilities that are known when the file is opened.
    pub(crate) fn new(punch: bool, zero_range: bool) -> Self {
        Self {
            punch: AtomicBool::new(punch),
            zero_range: AtomicBool::new(zero_range),
            endless: false,
            atomic: AtomicWrites::NONE,
        }
    }

    /// Sets the writes that are atomic.
    pub(crate) fn atomic(self, atomic: AtomicWrites) -> Self {
        Self { atomic, ..self }
    }

    /// Returns the writes that are atomic.
    pub(crate) fn atomic_writes(&self) -> AtomicWrites {
        self.atomic
    }

    /// Sets whether reads behind the file's end return zeroes.
    pub(crate) fn endless(self, endless: bool) -> Self {
        Self { endless, ..self }
    }

    /// Zeroes follow behind its end.
    pub(crate) fn is_endless(&self) -> bool {
        self.endless
    }

    /// Holes can be punched.
    pub(crate) fn punch(&self) -> bool {
        // Relaxed: a hint that stands for itself; an outdated value costs one refused operation.
        self.punch.load(Ordering::Relaxed)
    }

    /// Ranges can be zeroed in place.
    pub(crate) fn zero_range(&self) -> bool {
        self.zero_range.load(Ordering::Relaxed)
    }

    /// Records that no holes can be punched.
    pub(crate) fn cannot_punch(&self) {
        self.punch.store(false, Ordering::Relaxed);
    }

    /// Records that ranges cannot be zeroed in place.
    pub(crate) fn cannot_zero(&self) {
        self.zero_range.store(false, Ordering::Relaxed);
    }
}

/// The kernel operation that a request needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Read or write between the file and the request's own memory.
    Data,
    /// [`Step::Data`] for a write that is to be durable.
    Durable,
    /// Read or write through a bounce buffer, a piece at a time.
    Bounce,
    /// Write zeroes from the shared zero buffer, a piece at a time.
    Zeroes,
    /// Punch a hole.
    Punch,
    /// Zero the range without writing it.
    ZeroRange,
    /// Make the written data durable.
    Sync,
}

/// Continuation after an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Another operation: [`RingJob::step`].
    Again,
    /// The request ends.
    Done(Result<(), IoError>),
}

/// A request in flight.
#[derive(Debug)]
pub(crate) struct RingJob {
    pub(crate) request: Request,
    /// Index of its file in the ring's table.
    pub(crate) file: usize,
    pub(crate) step: Step,
    /// Bytes of the range that are finished.
    pub(crate) done: u64,
    /// Memory that the device can reach, while `step` is [`Step::Bounce`].
    pub(crate) bounce: Option<Buffer>,
    /// The caller wants it to end.
    pub(crate) cancelled: bool,
    /// A durable write that is made so by a later fsync, together with others.
    pub(crate) synced_later: bool,
    /// The kernel works on a write of it that is durable when it ends.
    pub(crate) is_durable_write: bool,
    /// A write that the kernel is to do as a whole or not at all: one operation, which is never
    /// continued where it ended.
    pub(crate) atomic: bool,
    retries: u16,
}

impl RingJob {
    /// A request at its first step. `reachable`: the file can be read into its memory without a
    /// copy.
    pub(crate) fn new(request: Request, file: usize, reachable: bool, can: &Abilities) -> Self {
        let atomic = matches!(request.op, Op::Write { .. })
            && can.atomic.covers(request.offset, request.len);
        // The kernel takes one piece of memory only.
        let reachable = reachable && (!atomic || request.data.segments().len() == 1);
        let step = match request.op {
            Op::Write { fua: true } if reachable => Step::Durable,
            Op::Read | Op::Write { .. } if reachable => Step::Data,
            Op::Read | Op::Write { .. } => Step::Bounce,
            Op::Flush => Step::Sync,
            Op::Deallocate => Step::Punch,
            Op::WriteZeroes {
                deallocate: true, ..
            } if can.punch() => Step::Punch,
            Op::WriteZeroes { .. } if can.zero_range() => Step::ZeroRange,
            Op::WriteZeroes { .. } => Step::Zeroes,
        };
        Self {
            atomic,
            ..Self::at(step, request, file)
        }
    }

    /// A request at that step.
    #[inline(always)]
    pub(crate) fn at(step: Step, request: Request, file: usize) -> Self {
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

    /// Returns whether the kernel's first answer ends the request: all of its data has moved. It
    /// agrees with [`RingJob::advance`] and covers nearly all answers.
    #[inline(always)]
    pub(crate) fn is_done_by(&self, answer: i32) -> bool {
        self.step == Step::Data
            && self.done == 0
            && u64::try_from(answer).is_ok_and(|moved| moved == self.request.len)
    }

    /// Bytes of the range that remain.
    pub(crate) fn left(&self) -> u64 {
        self.request.len.saturating_sub(self.done)
    }

    /// Takes the kernel's answer to the current step (bytes moved, or a negative error number).
    ///
    /// `unit` is the granularity at which the file is accessed: a transfer that ended between two
    /// units is repeated from the unit that it did not finish.
    pub(crate) fn advance(&mut self, answer: i32, unit: u64, can: &Abilities) -> Next {
        let Ok(moved) = u64::try_from(answer) else {
            return self.failed(answer.saturating_neg(), unit, can);
        };
        match self.step {
            Step::Data | Step::Durable | Step::Bounce | Step::Zeroes => {
                self.moved(moved, unit, can)
            }
            Step::Punch | Step::ZeroRange => self.changed(),
            Step::Sync => Next::Done(Ok(())),
        }
    }

    fn moved(&mut self, moved: u64, unit: u64, can: &Abilities) -> Next {
        let moved = moved.min(self.left());
        if self.atomic && moved < self.left() {
            // The rest would be another write.
            return Next::Done(Err(IoErrorKind::MediaWrite.into()));
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
                return Next::Done(Err(IoErrorKind::MediaRead.into()));
            };
            if !self.copy_in(data) {
                return Next::Done(Err(IoErrorKind::Memory.into()));
            }
        }
        self.done += whole;
        if self.left() == 0 {
            return self.changed();
        }
        if ends {
            let mut rest = SegmentList::new();
            let len = self.request.data.slice(self.done, self.left(), &mut rest);
            return Next::Done(match rest.fill(0) == len {
                true => Ok(()),
                false => Err(IoErrorKind::Memory.into()),
            });
        }
        if whole == 0 {
            // A read behind the end of the file; a write of nothing is no progress either.
            let kind = if self.request.op == Op::Read {
                IoErrorKind::Truncated
            } else {
                IoErrorKind::MediaWrite
            };
            return Next::Done(Err(kind.into()));
        }
        self.retries = 0;
        self.again()
    }

    /// The range is as it should be; only durability may be missing.
    fn changed(&mut self) -> Next {
        let zeroes = matches!(self.request.op, Op::WriteZeroes { fua: true, .. });
        if zeroes || self.synced_later {
            self.step = Step::Sync;
            self.again()
        } else {
            Next::Done(Ok(()))
        }
    }

    fn failed(&mut self, errno: i32, unit: u64, can: &Abilities) -> Next {
        let write = self.request.op.changes();
        match (errno, self.step) {
            (libc::EINTR | libc::EAGAIN, _) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                self.again()
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, Step::Punch) => {
                can.cannot_punch();
                match self.request.op {
                    Op::WriteZeroes { .. } if can.zero_range() => self.step = Step::ZeroRange,
                    Op::WriteZeroes { .. } => self.step = Step::Zeroes,
                    _ => return Next::Done(Err(IoError::from_errno(errno, true))),
                }
                self.again()
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, Step::ZeroRange) => {
                can.cannot_zero();
                self.step = Step::Zeroes;
                self.again()
            }
            // The file is stricter about memory than it reported: a page aligned buffer satisfies
            // every device.
            (libc::EINVAL, Step::Data | Step::Durable) => {
                self.step = Step::Bounce;
                self.again()
            }
            (_, Step::Sync) => Next::Done(Err(IoError::of_sync(errno))),
            (_, Step::Durable | Step::Bounce)
                if matches!(self.request.op, Op::Write { fua: true }) =>
            {
                Next::Done(Err(IoError::of_durable(errno, unit)))
            }
            _ => Next::Done(Err(IoError::from_errno(errno, write))),
        }
    }

    fn again(&self) -> Next {
        if self.cancelled {
            Next::Done(Err(IoErrorKind::Aborted.into()))
        } else {
            Next::Again
        }
    }

    /// Copies the data that was read for the current position into the request's memory.
    fn copy_in(&self, data: &[u8]) -> bool {
        self.request.data.copy_from(self.done, data) == data.len()
    }

    /// Fills the bounce buffer with the data to write from the current position on. Returns the
    /// number of bytes that the next operation moves, or `None` when memory is missing.
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
