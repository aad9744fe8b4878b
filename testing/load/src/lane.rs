//! Interface between the load generator and its targets.

use anyhow::{Result, bail};
use std::time::Duration;

/// Size and block size of a target of the load.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Usable size in bytes.
    pub size: u64,
    /// Smallest unit of I/O in bytes.
    pub block_size: u32,
    /// Human-readable description in one line.
    pub description: String,
}

/// A target of the load, such as a file or an NVMe namespace, which is opened once for each queue.
pub trait Target: Sync {
    /// Queue of the target.
    type Lane: Lane;

    /// Returns the target's properties.
    fn geometry(&self) -> Geometry;

    /// Opens a queue for the calling thread, with `depth` buffers of `bytes` bytes: the buffer of
    /// I/O `slot` is number `slot`.
    fn lane(&self, index: u16, depth: u16, bytes: usize) -> Result<Self::Lane>;
}

/// Result of an I/O; the error is a message for the user of the program.
pub type IoResult = Result<(), String>;

/// A queue with the buffers of its I/Os, which stays on the thread that opened it. Its functions
/// run in the hot loop: after the first calls they allocate nothing, take no lock, and make only
/// the system calls that the path to the target needs.
pub trait Lane {
    /// Starts an I/O with the buffer of `slot`, which must be idle. The target may begin only after
    /// [`Lane::kick`].
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()>;

    /// Starts the deallocation of a range with the length of an I/O, like [`Lane::submit`], but
    /// without the slot's buffer.
    fn trim(&mut self, _slot: u16, _offset: u64) -> Result<()> {
        bail!("this target has no way to deallocate")
    }

    /// Makes all submitted I/Os begin.
    fn kick(&mut self) -> Result<()>;

    /// Passes completed I/Os to `done`.
    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize>;

    /// Polls like [`Lane::poll`], for a thread that polls further lanes next: does not pause when
    /// there are no completions.
    fn look(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        self.poll(done)
    }

    /// Polls like [`Lane::poll`], but blocks until an I/O has completed, or for about `limit`.
    fn wait(&mut self, limit: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize>;

    /// Copies `data` into the slot's buffer.
    fn put(&mut self, slot: u16, data: &[u8]);

    /// Copies the slot's buffer into `data`.
    fn get(&self, slot: u16, data: &mut [u8]);
}
