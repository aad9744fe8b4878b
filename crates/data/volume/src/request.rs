//! Requests to a volume, and their completions.

use crate::{Info, IoError, IoErrorKind};
use dma::{SegmentList, View};

/// Longest request in bytes that a volume executes immediately, within the submitting call. Longer
/// ones would make the worker's other clients wait.
pub(crate) const MAX_INLINE_BYTES: u64 = 128 << 10;

/// Operation of a request to a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Reads the range into the memory of the request.
    Read,
    /// Writes the memory of the request to the range.
    Write {
        /// Whether the data must be durable before the completion is posted (force unit access).
        fua: bool,
    },
    /// Makes every write that has completed durable. Has no range and no data.
    Flush,
    /// Makes the range read as zeroes. Has no data.
    WriteZeroes {
        /// Whether the volume may free the space of the range.
        deallocate: bool,
        /// Whether the zeroes must be durable before the completion is posted.
        fua: bool,
    },
    /// Frees the space of the range. On success, the range reads as zeroes where
    /// [`Info::zeroes_after_deallocate`] is set. Fails with [`IoErrorKind::Unsupported`] where that
    /// is impossible, and leaves the range unchanged. Takes no data.
    Deallocate,
}

impl Op {
    /// Returns whether the operation changes the volume's contents or their durability.
    pub const fn changes(self) -> bool {
        !matches!(self, Self::Read)
    }

    /// Returns whether the operation transfers data (a read or a write).
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }
}

/// A request to a volume. Owns its data segments until its [`Completion`] returns them.
#[derive(Debug)]
pub struct Request {
    /// Caller's identifier for the request, returned in the completion. Unique among the
    /// outstanding requests of one worker, across its volumes.
    pub tag: u64,
    /// Operation of the request.
    pub op: Op,
    /// Byte offset of the range in the volume.
    pub offset: u64,
    /// Length of the range in bytes. For reads and writes, equal to the length of `data`.
    pub len: u64,
    /// Memory that the data is copied from or to; empty for operations without data.
    pub data: SegmentList,
}

impl Request {
    /// Creates a read or write that transfers all of `data` at byte `offset`.
    #[inline]
    pub fn transfer(tag: u64, op: Op, offset: u64, data: SegmentList) -> Self {
        Self {
            tag,
            op,
            offset,
            len: data.len_bytes(),
            data,
        }
    }

    /// Creates a request on `len` bytes at byte `offset` that transfers no data.
    #[inline]
    pub fn without_data(tag: u64, op: Op, offset: u64, len: u64) -> Self {
        Self {
            tag,
            op,
            offset,
            len,
            data: SegmentList::new(),
        }
    }

    /// Creates a flush.
    #[inline]
    pub fn flush(tag: u64) -> Self {
        Self::without_data(tag, Op::Flush, 0, 0)
    }

    /// Returns the completion of the request with this result.
    pub fn complete(self, result: Result<(), IoError>) -> Completion {
        Completion {
            tag: self.tag,
            result,
            data: self.data,
        }
    }

    /// Checks range, alignment, data length and write permission of a request against the
    /// properties of its volume.
    ///
    /// Each volume calls this for new requests. Only sizes are checked, never the data.
    pub fn check(&self, size: u64, block_size: u32, read_only: bool) -> Result<(), IoError> {
        if self.op == Op::Flush {
            return Ok(());
        }
        check_range(self.op, self.offset, self.len, size, block_size, read_only)?;
        if self.op.has_data() {
            check_data(self.op, self.len, self.data.view())?;
        }
        Ok(())
    }

    /// Performs [`Request::check`] with the size, block size and access in `info`.
    pub fn check_info(&self, info: &Info) -> Result<(), IoError> {
        self.check(info.size, info.block_size, info.read_only)
    }
}

/// Checks the range of a request, and the permission to change it: one part of [`Request::check`].
#[inline]
pub(crate) fn check_range(
    op: Op,
    offset: u64,
    len: u64,
    size: u64,
    block_size: u32,
    read_only: bool,
) -> Result<(), IoError> {
    if read_only && op.changes() {
        return Err(IoErrorKind::ReadOnly.into());
    }
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(IoErrorKind::OutOfRange.into());
    }
    if block_size > 1 && (offset | len) & (u64::from(block_size) - 1) != 0 {
        return Err(IoErrorKind::Invalid.into());
    }
    Ok(())
}

/// Checks that the memory of a read or write has `len` bytes: one part of [`Request::check`].
#[inline]
pub(crate) fn check_data(op: Op, len: u64, data: View<'_>) -> Result<(), IoError> {
    if data.len_bytes() != len || (op == Op::Read && !data.is_writable()) {
        return Err(IoErrorKind::Invalid.into());
    }
    Ok(())
}

/// Completion of a [`Request`].
#[derive(Debug)]
#[must_use = "a completion says whether the request worked, and owns its memory"]
pub struct Completion {
    /// Tag of the request, by which the caller recognises the completion.
    pub tag: u64,
    /// Result of the request. After an error, the range of a write holds old data, new data, or a
    /// mixture of blocks. The data of a failed read is undefined, but never from another volume.
    pub result: Result<(), IoError>,
    /// Memory of the request, returned to the caller.
    pub data: SegmentList,
}
