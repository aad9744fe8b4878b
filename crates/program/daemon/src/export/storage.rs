//! Storage of an export: the requests of one client, executed by the export's pump.

use super::pump::{Done, Order, PIECE, PumpLink};
use dma::Buffer;
use nbd_protocol::server::{Allocation, Storage, StorageError};
use std::sync::{Arc, mpsc};
use volume::{IoErrorKind, Op};

/// Maximum number of bytes that one request zeroes. Some volumes write zeroes for lack of a
/// command, and only so many.
const MAX_ZEROED: usize = 1 << 30;

/// Storage of an export for one client.
pub(super) struct VolumeStorage {
    link: Arc<PumpLink>,
    done: mpsc::Sender<Done>,
    results: mpsc::Receiver<Done>,
}

impl VolumeStorage {
    pub(super) fn new(link: Arc<PumpLink>) -> Self {
        let (done, results) = mpsc::channel();
        Self {
            link,
            done,
            results,
        }
    }

    /// Executes orders, waits for all, and passes the results to `each`.
    ///
    /// # Errors
    /// The error of the first order that failed.
    fn execute(
        &self,
        orders: Vec<Order>,
        mut each: impl FnMut(usize, Buffer),
    ) -> Result<(), StorageError> {
        let count = orders.len();
        self.link.send(orders);
        let mut result = Ok(());
        for _ in 0..count {
            // Each order reports a result, and this value has a sender itself.
            let Ok(done) = self.results.recv() else {
                return Err(StorageError::Shutdown);
            };
            match done.result {
                Ok(()) => {
                    if let Some(buffer) = done.buffer {
                        each(done.index, buffer);
                    }
                }
                Err(error) => {
                    let error = match error.kind {
                        IoErrorKind::Gone => StorageError::Shutdown,
                        IoErrorKind::NoSpace => StorageError::NoSpace,
                        IoErrorKind::Unsupported => StorageError::Unsupported,
                        _ => StorageError::Failed,
                    };
                    result = result.and(Err(error));
                }
            }
        }
        result
    }

    fn execute_one(&self, op: Op, offset: u64, len: u64) -> Result<(), StorageError> {
        let order = Order::without_data(op, offset, len, 0, &self.done);
        self.execute(vec![order], |_, _| {})
    }
}

impl Storage for VolumeStorage {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), StorageError> {
        let pieces = (offset..).step_by(PIECE).zip(data.chunks(PIECE));
        let orders = pieces.enumerate().map(|(index, (offset, piece))| {
            let buffer = Buffer::new(piece.len());
            Order::transfer(Op::Read, offset, buffer, index, &self.done)
        });
        self.execute(orders.collect(), |index, buffer| {
            let mut pieces = data.chunks_mut(PIECE);
            if let Some(piece) = pieces.nth(index)
                && piece.len() == buffer.len()
            {
                piece.copy_from_slice(&buffer);
            }
        })
    }

    fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<(), StorageError> {
        let pieces = (offset..).step_by(PIECE).zip(data.chunks(PIECE));
        let orders = pieces.enumerate().map(|(index, (offset, piece))| {
            let buffer = Buffer::from_slice(piece);
            Order::transfer(Op::Write { fua }, offset, buffer, index, &self.done)
        });
        self.execute(orders.collect(), |_, _| {})
    }

    fn zero(
        &mut self,
        offset: u64,
        len: u64,
        deallocate: bool,
        fua: bool,
    ) -> Result<(), StorageError> {
        let end = offset.saturating_add(len);
        (offset..end).step_by(MAX_ZEROED).try_for_each(|offset| {
            let len = (end - offset).min(MAX_ZEROED as u64);
            self.execute_one(Op::WriteZeroes { deallocate, fua }, offset, len)
        })
    }

    fn trim(&mut self, offset: u64, len: u64) -> Result<(), StorageError> {
        match self.execute_one(Op::Deallocate, offset, len) {
            // The client only gives a hint.
            Err(StorageError::Unsupported) => Ok(()),
            result => result,
        }
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        self.execute_one(Op::Flush, 0, 0)
    }

    fn allocation(&mut self, offset: u64, len: u64) -> (Allocation, u64) {
        let volume = self.link.volume();
        match volume.and_then(|volume| volume.allocation(offset, len)) {
            Some((volume::Allocation::Hole, run)) => (Allocation::Hole, run),
            Some((volume::Allocation::Data, run)) => (Allocation::Data, run),
            None => (Allocation::Data, len),
        }
    }
}
