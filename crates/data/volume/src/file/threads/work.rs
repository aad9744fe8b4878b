//! Work of a thread on a file: plain system calls, each of which may hang.

use crate::file::FileDescription;
use crate::io::job::Abilities;
use crate::{IoError, IoErrorKind, Op};
use dma::Buffer;
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::{Errno, ReadWriteFlags, pread, pwritev2};
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Maximum length in bytes of one write of zeroes, for files without another way to zero a range.
const ZEROES: u64 = 256 << 10;

/// File as the threads that access it need it: descriptor, unit and abilities.
#[derive(Debug)]
pub(super) struct WorkFile {
    pub(super) fd: Arc<FileDescription>,
    pub(super) abilities: Arc<Abilities>,
    /// Unit of access in bytes, of which offsets and lengths are multiples.
    pub(super) unit: u64,
}

/// Request to a file, or a piece of one, that a thread executes.
#[derive(Debug)]
pub(super) struct ThreadWork {
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Data to write, or data that was read. The buffer belongs to this process: a thread that
    /// hangs must not have access to guest memory.
    pub(super) buffer: Option<Buffer>,
}

impl ThreadWork {
    /// Returns the number of bytes that the worker copies between guest memory and the thread's
    /// buffer.
    pub(super) fn copied(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.len() as u64)
    }

    /// Executes the work by system calls, which may hang.
    pub(super) fn carry_out(&mut self, file: &WorkFile) -> Result<(), IoError> {
        let fd = file.fd.as_fd();
        match self.op {
            Op::Read => {
                // At most a piece's length.
                let mut buffer = Buffer::new(self.len as usize);
                match read(fd, &mut buffer, self.offset, file.unit) {
                    // The rest of the buffer is zeroes already.
                    Err(IoError {
                        kind: IoErrorKind::Truncated,
                        ..
                    }) if file.abilities.is_endless() => {}
                    read => read?,
                }
                self.buffer = Some(buffer);
                Ok(())
            }
            Op::Write { fua } => {
                let data = self.buffer.as_deref().ok_or(IoErrorKind::Memory)?;
                write(fd, data, self.offset, fua, file.unit)
            }
            Op::Flush => sync(fd),
            Op::Deallocate => match self.punch(file) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => Err(IoErrorKind::Unsupported.into()),
                result => result.map_err(failed),
            },
            Op::WriteZeroes { deallocate, fua } => {
                self.zero(file, deallocate)?;
                if fua { sync(fd) } else { Ok(()) }
            }
        }
    }

    fn punch(&self, file: &WorkFile) -> Result<(), Errno> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.allocate(file, mode).inspect_err(|&errno| {
            if matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS) {
                file.abilities.cannot_punch();
            }
        })
    }

    fn allocate(&self, file: &WorkFile, mode: FallocateFlags) -> Result<(), Errno> {
        again(|| fallocate(file.fd.as_fd(), mode, self.offset, self.len))
    }

    /// Zeroes the range of the work by the first method that the file supports.
    fn zero(&self, file: &WorkFile, deallocate: bool) -> Result<(), IoError> {
        let unknown = |errno| matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS);
        if deallocate && file.abilities.punch() {
            match self.punch(file) {
                Err(errno) if unknown(errno) => {}
                result => return result.map_err(failed),
            }
        }
        if file.abilities.zero_range() {
            let mode = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            match self.allocate(file, mode) {
                Err(errno) if unknown(errno) => file.abilities.cannot_zero(),
                result => return result.map_err(failed),
            }
        }
        let zeroes = Buffer::new(self.len.min(ZEROES) as usize);
        let mut done = 0;
        while done < self.len {
            let len = (self.len - done).min(ZEROES);
            let piece = zeroes.get(..len as usize).ok_or(IoErrorKind::Memory)?;
            write(file.fd.as_fd(), piece, self.offset + done, false, file.unit)?;
            done += len;
        }
        Ok(())
    }
}

/// Reads all of `buffer`. After a short read, the next read starts at the first incomplete unit.
pub fn read(fd: BorrowedFd<'_>, buffer: &mut [u8], offset: u64, unit: u64) -> Result<(), IoError> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let left = rest.len();
        let moved = again(|| pread(fd, &mut *rest, offset + done as u64));
        let moved = moved.map_err(|errno| IoError::from_errno(errno.raw_os_error(), false))?;
        done += whole(moved, left, unit).ok_or(IoErrorKind::Truncated)?;
    }
    Ok(())
}

/// Writes all of `data`. After a short write, the next write starts at the first incomplete unit.
fn write(fd: BorrowedFd<'_>, data: &[u8], at: u64, fua: bool, unit: u64) -> Result<(), IoError> {
    let flags = if fua {
        ReadWriteFlags::DSYNC
    } else {
        ReadWriteFlags::empty()
    };
    let mut done = 0;
    while let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) {
        let moved = again(|| pwritev2(fd, &[IoSlice::new(rest)], at + done as u64, flags));
        let moved = moved.map_err(|errno| {
            if fua {
                IoError::of_durable(errno.raw_os_error(), unit)
            } else {
                failed(errno)
            }
        })?;
        done += whole(moved, rest.len(), unit).ok_or(IoErrorKind::MediaWrite)?;
    }
    Ok(())
}

/// Returns the number of moved bytes that count, in whole units, where `left` were to be moved;
/// `None`: no progress.
fn whole(moved: usize, left: usize, unit: u64) -> Option<usize> {
    let part = if moved == left {
        moved
    } else {
        moved - moved % (unit as usize).max(1)
    };
    (part > 0).then_some(part)
}

fn sync(fd: BorrowedFd<'_>) -> Result<(), IoError> {
    again(|| fdatasync(fd)).map_err(|errno| IoError::of_sync(errno.raw_os_error()))
}

/// Repeats a system call while it is interrupted by signals.
fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

fn failed(errno: Errno) -> IoError {
    IoError::from_errno(errno.raw_os_error(), true)
}
