//! Interface between the load generator and its targets.

use anyhow::{Result, bail};
use std::time::Duration;

/// Properties of a target.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Usable bytes.
    pub size: u64,
    /// Smallest unit of I/O in bytes.
    pub block_size: u32,
    /// Human-readable description in one line.
    pub description: String,
}

/// A target of the load.
pub trait Target: Sync {
    /// Queue of the target.
    type Lane: Lane;

    /// Returns the target's properties.
    fn geometry(&self) -> Geometry;

    /// Opens a queue for the calling thread, with `depth` buffers of `bytes` bytes: the buffer of
    /// I/O `slot` is number `slot`.
    fn lane(&self, index: u16, depth: u16, bytes: usize) -> Result<Self::Lane>;
}

/// Result of an I/O.
pub type Outcome = Result<(), String>;

/// A queue with the buffers of its I/Os. It stays on the thread that opened it. Its functions run
/// in the hot loop: after the first calls they allocate nothing, take no lock, and make only the
/// system calls that the path to the target needs.
pub trait Lane {
    /// Starts the I/O of `slot`, which is idle, from or into the slot's buffer. Only [`Lane::kick`]
    /// is needed to execute it.
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()>;

    /// Starts the deallocation of the length of an I/O, as [`Lane::submit`], but without the slot's
    /// buffer.
    fn trim(&mut self, _slot: u16, _offset: u64) -> Result<()> {
        bail!("this target has no way to deallocate")
    }

    /// Makes all submitted I/Os begin.
    fn kick(&mut self) -> Result<()>;

    /// Passes completed I/Os to `done`.
    fn poll(&mut self, done: &mut impl FnMut(u16, Outcome)) -> Result<usize>;

    /// Polls as [`Lane::poll`], for a thread that polls further lanes next: without a rest when
    /// there are no completions.
    fn look(&mut self, done: &mut impl FnMut(u16, Outcome)) -> Result<usize> {
        self.poll(done)
    }

    /// Polls as [`Lane::poll`], but blocks until an I/O has completed, or for about `limit`.
    fn wait(&mut self, limit: Duration, done: &mut impl FnMut(u16, Outcome)) -> Result<usize>;

    /// Writes the slot's buffer.
    fn put(&mut self, slot: u16, data: &[u8]);

    /// Reads the slot's buffer.
    fn get(&self, slot: u16, data: &mut [u8]);
}
