//! Requests to a volume, and their completions.

use crate::{Info, IoError, IoErrorKind};
use dma::{SegmentList, View};

/// Longest request that a volume carries out within the call that brings it, in bytes: a worker's
/// other clients wait meanwhile.
pub(crate) const AT_ONCE: u64 = 128 << 10;

/// Operation on a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fill the request's data from the range.
    Read,
    /// Store the request's data into the range.
    Write {
        /// The data is durable before the completion is posted (force unit access).
        fua: bool,
    },
    /// Make every completed write durable. Takes no range and no data.
    Flush,
    /// Make the range read as zeroes. Takes no data.
    WriteZeroes {
        /// The volume may give the space back.
        deallocate: bool,
        /// The zeroes are durable before the completion is posted.
        fua: bool,
    },
    /// Release the range's space. When it succeeds, the range reads as zeroes where
    /// [`Info::zeroes_after_deallocate`] is set. [`IoErrorKind::Unsupported`] where that cannot be
    /// done: the range is unchanged then. Takes no data.
    Deallocate,
}

impl Op {
    /// Returns whether the operation changes the volume's contents or their durability.
    pub const fn changes(self) -> bool {
        !matches!(self, Self::Read)
    }

    /// The operation moves the request's data.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }
}

/// A request. Owns its data segments until its [`Completion`] returns them.
#[derive(Debug)]
pub struct Request {
    /// The caller's name for the request, returned in the completion. Unique among the requests in
    /// flight on one worker, across its volumes.
    pub tag: u64,
    /// Operation of the request.
    pub op: Op,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes. For read and write it equals the length of `data`.
    pub len: u64,
    /// Memory that the data is copied from or to; empty for operations without data.
    pub data: SegmentList,
}

impl Request {
    /// A read or write of all of `data`.
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

    /// The request ends here, with this result.
    pub fn complete(self, result: Result<(), IoError>) -> Completion {
        Completion {
            tag: self.tag,
            result,
            data: self.data,
        }
    }

    /// Checks a request against the volume that it is for: range, alignment, data length, right to
    /// write.
    ///
    /// Volumes call this on the way in; it looks only at sizes, never at the data.
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

    /// Performs [`Request::check`] with the values of `info`.
    pub fn check_info(&self, info: &Info) -> Result<(), IoError> {
        self.check(info.size, info.block_size, info.read_only)
    }
}

/// The part of [`Request::check`] that is about the range and the right to change it.
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

/// The part of [`Request::check`] that is about the data of a read or write.
#[inline]
pub(crate) fn check_data(op: Op, len: u64, data: View<'_>) -> Result<(), IoError> {
    if data.len_bytes() != len || (op == Op::Read && !data.is_writable()) {
        return Err(IoErrorKind::Invalid.into());
    }
    Ok(())
}

/// The end of a [`Request`].
#[derive(Debug)]
#[must_use = "a completion says whether the request worked, and owns its memory"]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// Result of the request. After an error the range of a write holds the old data, the new, or a
    /// mixture of blocks; the data of a read is undefined, but never another volume's.
    pub result: Result<(), IoError>,
    /// The request's data segments.
    pub data: SegmentList,
}
