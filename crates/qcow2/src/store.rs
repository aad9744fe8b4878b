//! Interface to the files of a chain for code that works on images, on a worker's ring or by
//! blocking calls.

use dma::{Buffer, SegmentList};
use std::future::Future;
use volume::{IoError, Op};

/// Selects one of the two openings of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Clusters: past the page cache, where that is possible.
    Data,
    /// Tables, and accesses that are not aligned to blocks, through the page cache.
    Tables,
}

/// Operation on a file of the chain. `layer`: 0 is the image itself, which alone is written.
#[derive(Debug)]
pub(crate) struct Access {
    pub(crate) layer: usize,
    pub(crate) part: Part,
    pub(crate) op: Op,
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) data: SegmentList,
}

/// Result of an operation, and the memory that it used.
pub(crate) type Outcome = (Result<(), IoError>, SegmentList);

/// The files of a chain.
pub(crate) trait Store: Clone + 'static {
    /// See [`Store::shield`].
    type Shield;

    /// Starts an operation immediately; the returned future yields its result.
    fn start(&self, access: Access) -> impl Future<Output = Outcome> + 'static;

    /// Returns whether the request of this task was cancelled. A task that waits for anything but
    /// an operation then ends.
    fn is_cancelled(&self) -> bool;

    /// Protects the operations that are started from now on, while the result lives, from the
    /// cancellation of their request. They use no guest memory.
    fn shield(&self) -> Self::Shield;

    /// Reads so many bytes of the tables' file.
    fn read(
        &self,
        layer: usize,
        at: u64,
        len: usize,
    ) -> impl Future<Output = Result<Buffer, IoError>> + 'static {
        let read = self.start(Access {
            layer,
            part: Part::Tables,
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

    /// Writes bytes into the image's tables.
    fn write(&self, at: u64, bytes: &[u8]) -> impl Future<Output = Result<(), IoError>> + 'static {
        let write = self.start(Access {
            layer: 0,
            part: Part::Tables,
            op: Op::Write { fua: false },
            at,
            len: bytes.len() as u64,
            data: SegmentList::owned(Buffer::from_slice(bytes)),
        });
        async move { write.await.0 }
    }

    /// Starts an operation on the image's clusters that transfers no data.
    fn change(
        &self,
        op: Op,
        at: u64,
        len: u64,
    ) -> impl Future<Output = Result<(), IoError>> + 'static {
        let change = self.start(Access {
            layer: 0,
            part: Part::Data,
            op,
            at,
            len,
            data: SegmentList::new(),
        });
        async move { change.await.0 }
    }

    /// Makes all writes to the image durable, data and tables: it is one file.
    fn flush(&self) -> impl Future<Output = Result<(), IoError>> + 'static {
        self.change(Op::Flush, 0, 0)
    }
}
