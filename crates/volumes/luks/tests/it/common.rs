//! Requests to a queue, and their completions.

use dma::{Buffer, SegmentList};
use luks::{Header, LuksOptions, LuksVolume, unlock};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Completion, Io, IoError, IoOptions, Op, OpenQueue, Request, Volume};

/// A queue with its ring.
pub struct Disk {
    pub queue: OpenQueue,
    pub io: Io,
}

impl Disk {
    pub fn new(volume: &dyn Volume) -> Self {
        let io = Io::new(IoOptions::default());
        let queue = volume.open(&io).unwrap();
        Self { queue, io }
    }

    /// Calls `done` with the next completions; waits for one at least.
    pub fn wait(&mut self, done: &mut dyn FnMut(Completion)) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            self.io.flush();
            let mut count = self
                .io
                .poll(&mut |_| panic!("a completion of another queue"));
            count += self.queue.poll(done);
            if count > 0 {
                return;
            }
            assert!(Instant::now() < until, "no completion: {:?}", self.queue);
            std::thread::yield_now();
        }
    }

    pub fn execute(&mut self, request: Request) -> Completion {
        let mut found = self.queue.submit(request);
        while found.is_none() {
            self.wait(&mut |completion| found = Some(completion));
        }
        found.unwrap()
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        let data = SegmentList::owned(Buffer::new(len));
        let done = self.execute(Request::transfer(1, Op::Read, offset, data));
        done.result
            .map(|()| done.data.into_buffer().unwrap().to_vec())
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), IoError> {
        let data = SegmentList::owned(Buffer::from_slice(bytes));
        let request = Request::transfer(2, Op::Write { fua }, offset, data);
        self.execute(request).result
    }

    pub fn range(&mut self, op: Op, offset: u64, len: u64) -> Result<(), IoError> {
        self.execute(Request::without_data(3, op, offset, len))
            .result
    }
}

/// Opens the container of a header in bytes over a volume.
pub fn open(below: Arc<dyn Volume>, header: &[u8], passphrase: &[u8], discard: bool) -> LuksVolume {
    let parsed = Header::read(header, true).unwrap();
    let key = unlock(&parsed, header, passphrase).unwrap();
    LuksVolume::new(below, &parsed, &key, LuksOptions { discard }).unwrap()
}
