//! The seam between the load generator and what it loads.

use anyhow::{Result, bail};
use std::time::Duration;

/// What a target is.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Usable bytes.
    pub size: u64,
    /// Smallest unit of I/O in bytes.
    pub block_size: u32,
    /// One line for people.
    pub description: String,
}

/// Something to load.
pub trait Target: Sync {
    /// One queue of it.
    type Lane: Lane;

    /// What it is.
    fn geometry(&self) -> Geometry;

    /// Opens a queue for the calling thread, with `depth` buffers of `bytes` bytes: the buffer of
    /// I/O `slot` is number `slot`.
    fn lane(&self, index: u16, depth: u16, bytes: usize) -> Result<Self::Lane>;
}

/// How an I/O ended.
pub type Outcome = Result<(), String>;

/// One queue with the buffers of its I/Os. Stays on the thread that opened it. Called from the hot
/// loop: after the first calls no allocation, no lock, and no system call that the way to the
/// target does not need.
pub trait Lane {
    /// Starts the I/O of `slot`, which is idle, from or into the slot's buffer. Only [`Lane::kick`]
    /// has to be called for it to happen.
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()>;

    /// Starts the deallocation of as many bytes as an I/O has. As [`Lane::submit`], but the slot's
    /// buffer is not used.
    fn trim(&mut self, _slot: u16, _offset: u64) -> Result<()> {
        bail!("this target has no way to deallocate")
    }

    /// Everything that was submitted has to begin now.
    fn kick(&mut self) -> Result<()>;

    /// Passes the I/Os that have ended to `done`.
    fn poll(&mut self, done: &mut impl FnMut(u16, Outcome)) -> Result<usize>;

    /// As [`Lane::poll`], by a thread that looks at other lanes next: without a rest when nothing
    /// has ended.
    fn look(&mut self, done: &mut impl FnMut(u16, Outcome)) -> Result<usize> {
        self.poll(done)
    }

    /// As [`Lane::poll`], but blocks until an I/O has ended, or for about `limit`.
    fn wait(&mut self, limit: Duration, done: &mut impl FnMut(u16, Outcome)) -> Result<usize>;

    /// Writes the slot's buffer.
    fn put(&mut self, slot: u16, data: &[u8]);

    /// Reads the slot's buffer.
    fn get(&self, slot: u16, data: &mut [u8]);
}
