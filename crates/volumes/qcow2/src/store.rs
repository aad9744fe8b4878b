//! Interface to the files of a chain, for code that accesses images on a worker's ring or by
//! blocking calls.

use dma::{Buffer, SegmentList};
use std::future::Future;
use volume::{IoError, Op};

/// Selects one of the two openings of a file through which an operation is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileRole {
    /// Opening for I/O to clusters, bypassing the page cache where possible.
    Data,
    /// Opening for accesses through the page cache, for tables and for unaligned ranges.
    Tables,
}

/// An operation on a file of the chain. Only layer 0, the image itself, is ever written.
#[derive(Debug)]
pub(crate) struct Access {
    pub(crate) layer: usize,
    pub(crate) part: FileRole,
    pub(crate) op: Op,
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) data: SegmentList,
}

/// Result of a file operation, and the memory that the operation used.
pub(crate) type IoOutcome = (Result<(), IoError>, SegmentList);

/// Interface to the files of a backing chain, for asynchronous operations.
pub(crate) trait Store: Clone + 'static {
    /// Guard that [`Store::shield`] returns; it protects the task from cancellation.
    type Shield;

    /// Starts a file operation at once. The returned future yields its result.
    fn start(&self, access: Access) -> impl Future<Output = IoOutcome> + 'static;

    /// Returns whether the request of the calling task was cancelled. The task then ends, unless it
    /// waits for an operation.
    fn is_cancelled(&self) -> bool;

    /// Protects operations started while the result lives from the cancellation of their request.
    /// These operations must not use guest memory.
    fn shield(&self) -> Self::Shield;

    /// Reads bytes from a layer's file through its tables opening.
    fn read(
        &self,
        layer: usize,
        at: u64,
        len: usize,
    ) -> impl Future<Output = Result<Buffer, IoError>> + 'static {
        let read = self.start(Access {
            layer,
            part: FileRole::Tables,
            op: Op::Read,
            at,
            len: len as u64,
            data: SegmentList::owned(Buffer::new(len)),
        });
        async move {
            let (result, data) = read.await;
            result?;
            // The operation has ended, and no other owner of the memory is left.
            Ok(data.into_buffer().unwrap_or_else(|| Buffer::new(0)))
        }
    }

    /// Writes bytes at offset `at` of the image, through the opening for tables.
    fn write(&self, at: u64, bytes: &[u8]) -> impl Future<Output = Result<(), IoError>> + 'static {
        let write = self.start(Access {
            layer: 0,
            part: FileRole::Tables,
            op: Op::Write { fua: false },
            at,
            len: bytes.len() as u64,
            data: SegmentList::owned(Buffer::from_slice(bytes)),
        });
        async move { write.await.0 }
    }

    /// Starts an operation without data on the image's clusters, such as zeroing.
    fn change(
        &self,
        op: Op,
        at: u64,
        len: u64,
    ) -> impl Future<Output = Result<(), IoError>> + 'static {
        let change = self.start(Access {
            layer: 0,
            part: FileRole::Data,
            op,
            at,
            len,
            data: SegmentList::new(),
        });
        async move { change.await.0 }
    }

    /// Makes all writes to the image durable, both data and tables, because they are in one file.
    fn flush(&self) -> impl Future<Output = Result<(), IoError>> + 'static {
        self.change(Op::Flush, 0, 0)
    }
}
