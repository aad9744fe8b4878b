//! Blocking access to the files of a chain, for code that opens, resizes and closes images.

use crate::store::{Access, IoOutcome, Store};
use dma::SegmentList;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use volume::{IoError, IoErrorKind, Op};

/// Maximum number of bytes that one blocking copy moves at a time.
const PIECE: usize = 1 << 20;

/// Files of an image's backing chain by layer, accessed with blocking system calls.
#[derive(Debug, Clone)]
pub(crate) struct Blocking(Arc<Vec<File>>);

impl Blocking {
    pub(crate) fn new(files: Vec<File>) -> Self {
        Self(Arc::new(files))
    }

    fn carry_out(&self, access: &Access) -> Result<(), IoError> {
        let file = self.0.get(access.layer).ok_or(IoErrorKind::Invalid)?;
        let write = access.op.changes();
        let failed =
            |error: io::Error| IoError::from_errno(error.raw_os_error().unwrap_or(0), write);
        match access.op {
            Op::Flush => file.sync_data().map_err(failed),
            Op::Read | Op::Write { .. } => transfer(file, access, failed),
            Op::WriteZeroes { .. } | Op::Deallocate => Err(IoErrorKind::Unsupported.into()),
        }
    }
}

fn transfer(
    file: &File,
    access: &Access,
    failed: impl Fn(io::Error) -> IoError,
) -> Result<(), IoError> {
    let len = access.data.len_bytes();
    let mut piece = vec![0; PIECE.min(usize::try_from(len).unwrap_or(PIECE))];
    let mut done = 0;
    while done < len {
        let now = (len - done).min(piece.len() as u64) as usize;
        let piece = piece.get_mut(..now).ok_or(IoErrorKind::Invalid)?;
        match access.op {
            Op::Read => {
                fill(file, piece, access.at + done).map_err(&failed)?;
                if access.data.copy_from(done, piece) != now {
                    return Err(IoErrorKind::Memory.into());
                }
            }
            _ => {
                access.data.copy_to(done, piece);
                file.write_all_at(piece, access.at + done)
                    .map_err(&failed)?;
            }
        }
        done += now as u64;
    }
    Ok(())
}

/// Reads all of `bytes` at offset `at`. Bytes behind the file's end read as zeroes.
pub(crate) fn fill(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + done as u64) {
            Ok(0) => {
                rest.fill(0);
                return Ok(());
            }
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Store for Blocking {
    type Shield = ();

    fn start(&self, mut access: Access) -> impl Future<Output = IoOutcome> + 'static {
        let result = self.carry_out(&access);
        let data: SegmentList = std::mem::take(&mut access.data);
        std::future::ready((result, data))
    }

    fn is_cancelled(&self) -> bool {
        false
    }

    fn shield(&self) {}
}

/// Waker that unparks the thread which waits for a future.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to completion on the calling thread.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}
