//! Blocking reads of a volume, for control paths without a worker.

use crate::{Io, IoError, IoErrorKind, IoOptions, Op, OpenQueue, Request, Volume, VolumeError};
use dma::{Buffer, SegmentList};
use std::time::Duration;

/// Sleep between two polls for an outstanding read, in a thread without a worker's loop.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Error of a blocking read.
#[derive(Debug)]
pub enum ReadError {
    /// The volume could not be opened for reading.
    Open(VolumeError),
    /// The read failed.
    Read(IoError),
}

impl From<VolumeError> for ReadError {
    fn from(error: VolumeError) -> Self {
        Self::Open(error)
    }
}

impl From<IoError> for ReadError {
    fn from(error: IoError) -> Self {
        Self::Read(error)
    }
}

/// Reads `len` bytes of `volume` from byte `offset` on, both multiples of its block size, and waits
/// for them on the calling thread. For control paths; makes a ring of its own for volumes without
/// [`Volume::read_at`].
///
/// # Errors
/// [`ReadError`] when the volume cannot be opened or read.
pub fn read_blocking(volume: &dyn Volume, offset: u64, len: usize) -> Result<Vec<u8>, ReadError> {
    Reader::new(volume).read(offset, len)
}

/// Blocking reader of a volume, for example for partition tables; one read at a time.
pub(crate) struct Reader<'a> {
    volume: &'a dyn Volume,
    /// Queue into the volume; `None` if the volume can be read without one.
    queue: Option<Queue>,
}

struct Queue {
    io: Io,
    queue: OpenQueue,
}

impl<'a> Reader<'a> {
    /// Creates a blocking reader of `volume`.
    pub(crate) fn new(volume: &'a dyn Volume) -> Self {
        let queue = None;
        Self { volume, queue }
    }

    /// Reads `len` bytes from byte `offset` on, both multiples of the volume's block size.
    ///
    /// # Errors
    /// [`ReadError`] when the volume cannot be opened or read.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, ReadError> {
        let mut buffer = Buffer::new(len);
        if let Some(read) = self.volume.read_at(offset, &mut buffer) {
            read?;
            return Ok(buffer.to_vec());
        }
        let queue = match &mut self.queue {
            Some(queue) => queue,
            none => none.insert(Queue::open(self.volume)?),
        };
        Ok(queue.read(offset, buffer)?)
    }
}

impl Queue {
    fn open(volume: &dyn Volume) -> Result<Self, VolumeError> {
        let io = Io::new(IoOptions {
            capacity: 4,
            ..IoOptions::default()
        });
        let queue = volume.open(&io)?;
        Ok(Self { io, queue })
    }

    fn read(&mut self, offset: u64, buffer: Buffer) -> Result<Vec<u8>, IoError> {
        let request = Request::transfer(0, Op::Read, offset, SegmentList::owned(buffer));
        let mut done = self.queue.submit(request);
        while done.is_none() {
            self.io.flush();
            self.io.poll(&mut |completion| done = Some(completion));
            self.queue.poll(&mut |completion| done = Some(completion));
            if done.is_none() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        let completion = done.ok_or(IoErrorKind::Gone)?;
        completion.result?;
        let buffer = completion.data.into_buffer().ok_or(IoErrorKind::Memory)?;
        Ok(buffer.to_vec())
    }
}
