//! Guest memory, as the host reads and writes it.

use anyhow::{Context, Result};
use dma::Memory;
use std::sync::atomic::AtomicU32;

/// Guest memory by IOVA, mapped into this process.
pub trait GuestMemory {
    /// Returns the mapping at an IOVA and the offset in it.
    fn at(&self, iova: u64) -> Option<(&Memory, usize)>;

    /// Copies from memory.
    fn read(&self, iova: u64, data: &mut [u8]) -> Result<()> {
        let (memory, at) = self.at(iova).context("the guest has no memory there")?;
        Ok(memory.read(at, data)?)
    }

    /// Copies into memory.
    fn write(&self, iova: u64, data: &[u8]) -> Result<()> {
        let (memory, at) = self.at(iova).context("the guest has no memory there")?;
        Ok(memory.write(at, data)?)
    }

    /// Returns a dword of memory for atomic access.
    fn cell(&self, iova: u64) -> Result<&AtomicU32> {
        let cell = self.at(iova).and_then(|(memory, at)| memory.atomic_u32(at));
        cell.context("the guest has no dword there")
    }
}

/// Mappings of guest memory, each with the IOVA of its first byte.
pub struct Windows(Vec<(u64, Memory)>);

impl Windows {
    /// Creates the guest memory with one mapping, which begins at `iova`.
    pub fn new(iova: u64, memory: Memory) -> Self {
        Self(vec![(iova, memory)])
    }

    /// Adds a mapping at `iova`, which hides other mappings at its addresses.
    pub fn add(&mut self, iova: u64, memory: Memory) {
        self.0.insert(0, (iova, memory));
    }
}

impl GuestMemory for Windows {
    fn at(&self, iova: u64) -> Option<(&Memory, usize)> {
        let mut windows = self.0.iter();
        windows.find_map(|(base, memory)| {
            let at = usize::try_from(iova.checked_sub(*base)?).ok()?;
            (at < memory.len()).then_some((memory, at))
        })
    }
}
