//! The files of a chain, as those see them who work on images: on a worker's ring, or by calls that
//! wait.

use dma::{Buffer, SegmentList};
use std::future::Future;
use volume::{IoError, Op};

/// Which of the two openings of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// For clusters: past the page cache, where that is possible.
    Data,
    /// For tables, and for what begins and ends at any byte: through the page cache.
    Tables,
}

/// One operation on a file of the chain. `layer`: 0 is the image itself, which alone is written.
#[derive(Debug)]
pub(crate) struct Access {
    pub(crate) layer: usize,
    pub(crate) part: Part,
    pub(crate) op: Op,
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) data: SegmentList,
}

/// What an operation came to, and the memory that it had.
pub(crate) type Outcome = (Result<(), IoError>, SegmentList);

/// The files of a chain.
pub(crate) trait Store: Clone + 'static {
    /// See [`Store::shield`].
    type Shield;

    /// Starts an operation, now; what it came to is waited for.
    fn start(&self, access: Access) -> impl Future<Output = Outcome> + 'static;

    /// What is being done is not wanted any more: a task that waits for something else than
    /// an operation ends.
    fn is_cancelled(&self) -> bool;

    /// What is begun from now on goes on to its end, while the result lives, although it is not
    /// wanted any more. It has no memory of a guest's.
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
            // It is nobody else's.
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

    /// An operation of the image's data that has none of its own.
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

    /// Makes durable what has been written to the image, data and tables: it is one file.
    fn flush(&self) -> impl Future<Output = Result<(), IoError>> + 'static {
        self.change(Op::Flush, 0, 0)
    }
}
