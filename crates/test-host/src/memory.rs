//! Guest memory, as the host reads and writes it.

use crate::{Error, Result};
use dma::Memory;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Guest memory by IOVA.
pub trait GuestMemory {
    /// Copies from memory.
    ///
    /// # Errors
    /// [`Error::Memory`].
    fn read(&self, iova: u64, data: &mut [u8]) -> Result;

    /// Copies into memory.
    ///
    /// # Errors
    /// [`Error::Memory`].
    fn write(&self, iova: u64, data: &[u8]) -> Result;

    /// Returns a dword of memory for atomic access.
    ///
    /// # Errors
    /// [`Error::Memory`], also where memory is not mapped.
    fn cell(&self, iova: u64) -> Result<&AtomicU32>;

    /// Loads a dword that the controller stores after what it announces.
    ///
    /// # Errors
    /// [`Error::Memory`].
    fn load(&self, iova: u64) -> Result<u32> {
        let mut data = [0; 4];
        self.read(iova, &mut data)?;
        fence(Ordering::Acquire);
        Ok(u32::from_le_bytes(data))
    }
}

/// Guest memory that is mapped into this process.
pub trait Mapped {
    /// Returns the mapping at an IOVA and the offset in it.
    fn at(&self, iova: u64) -> Option<(&Memory, usize)>;
}

impl<T: Mapped> GuestMemory for T {
    fn read(&self, iova: u64, data: &mut [u8]) -> Result {
        let len = data.len();
        let read = self
            .at(iova)
            .and_then(|(memory, at)| memory.read(at, data).ok());
        read.ok_or(Error::Memory { iova, len })
    }

    fn write(&self, iova: u64, data: &[u8]) -> Result {
        let len = data.len();
        let written = self
            .at(iova)
            .and_then(|(memory, at)| memory.write(at, data).ok());
        written.ok_or(Error::Memory { iova, len })
    }

    fn cell(&self, iova: u64) -> Result<&AtomicU32> {
        let cell = self.at(iova).and_then(|(memory, at)| memory.atomic_u32(at));
        cell.ok_or(Error::Memory { iova, len: 4 })
    }

    fn load(&self, iova: u64) -> Result<u32> {
        Ok(u32::from_le(self.cell(iova)?.load(Ordering::Acquire)))
    }
}

/// Mappings, each with the IOVA of its first byte.
pub struct Windows(Vec<(u64, Memory)>);

impl Windows {
    /// Memory of one mapping.
    pub fn new(iova: u64, memory: Memory) -> Self {
        Self(vec![(iova, memory)])
    }

    /// Adds a mapping, which hides what others have at its addresses.
    pub fn add(&mut self, iova: u64, memory: Memory) {
        self.0.insert(0, (iova, memory));
    }
}

impl Mapped for Windows {
    fn at(&self, iova: u64) -> Option<(&Memory, usize)> {
        let mut windows = self.0.iter();
        windows.find_map(|(base, memory)| {
            let at = usize::try_from(iova.checked_sub(*base)?).ok()?;
            (at < memory.len()).then_some((memory, at))
        })
    }
}
