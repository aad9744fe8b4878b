//! DMA buffers, and the heap from which they are allocated.

use std::sync::{Arc, Mutex, Weak};

use dma::{MapError, Memory, MemoryError};

use crate::iova::{MapFailure, Mapper, RangeEnd, Region, Registration, Space};
use crate::options::MemorySource;
use sync::Unpoisoned;

/// Size in bytes of a chunk of the DMA heap. Each chunk is one DMA mapping.
const CHUNK: u64 = 4 << 20;

/// A contiguous range of DMA memory for the data of commands. Submitting a command moves the buffer
/// into it; its completion returns the buffer. The memory stays mapped as long as the buffer
/// exists. The device (or the process behind a socket) may be hostile, so bytes are copied in and
/// out, never borrowed.
#[derive(Debug)]
pub struct DmaBuffer {
    region: Arc<Region>,
    offset: u64,
    len: u64,
    /// Heap to which the buffer's memory returns, and the index of the chunk that it is from.
    home: Option<(Weak<Heap>, usize)>,
}

impl DmaBuffer {
    /// Creates a buffer for a part of a mapped region; `None` when the part exceeds it.
    pub fn of_region(region: &Arc<Region>, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= region.len()).then(|| Self {
            region: region.clone(),
            offset,
            len,
            home: None,
        })
    }

    /// Creates a buffer for a part of registered memory; `None` when the part exceeds it.
    pub fn of(registration: &Registration, offset: u64, len: u64) -> Option<Self> {
        Self::of_region(registration.region(), offset, len)
    }

    /// Returns the device address (IOVA) of the buffer's first byte.
    #[inline]
    pub fn iova(&self) -> u64 {
        self.region.iova() + self.offset
    }

    /// Returns the length of the buffer in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The shared memory and the offset of the first byte in it; `None` for memory that
    /// was registered by address.
    pub fn memory(&self) -> Option<(&Memory, usize)> {
        let (memory, start) = self.region.memory()?;
        Some((memory, (start + self.offset) as usize))
    }

    /// Copies out of the buffer, from byte `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the range exceeds the buffer, or the memory was registered
    /// by address; its owner reads that itself. [`MemoryError::Poisoned`] when the memory's file
    /// has shrunk.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let at = self.check(offset, bytes.len())?;
        let (memory, start) = self.memory().ok_or(MemoryError::OutOfRange)?;
        memory.read(start + at, bytes)
    }

    /// Copies into the buffer, from byte `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the range exceeds the buffer, or the memory was registered
    /// by address; [`MemoryError::ReadOnly`]; [`MemoryError::Poisoned`] when the memory's file has
    /// shrunk.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let at = self.check(offset, bytes.len())?;
        let (memory, start) = self.memory().ok_or(MemoryError::OutOfRange)?;
        memory.write(start + at, bytes)
    }

    /// Sets every byte of the buffer to `byte`.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory is read-only, was registered by address, or its file has
    /// shrunk.
    pub fn fill(&self, byte: u8) -> Result<(), MemoryError> {
        let (memory, start) = self.memory().ok_or(MemoryError::OutOfRange)?;
        let list = memory
            .segments(start, self.len())
            .ok_or(MemoryError::OutOfRange)?;
        if list.fill(byte) == self.len {
            Ok(())
        } else {
            Err(MemoryError::ReadOnly)
        }
    }

    /// Returns a copy of the buffer's bytes.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory was registered by address, or its file has shrunk.
    pub fn to_vec(&self) -> Result<Vec<u8>, MemoryError> {
        let mut bytes = vec![0; self.len()];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    fn check(&self, offset: usize, len: usize) -> Result<usize, MemoryError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(offset),
            _ => Err(MemoryError::OutOfRange),
        }
    }
}

impl Drop for DmaBuffer {
    fn drop(&mut self) {
        if let Some((heap, chunk)) = self.home.take()
            && let Some(heap) = heap.upgrade()
        {
            heap.free(chunk, self.offset, self.len);
        }
    }
}

struct Chunk {
    region: Arc<Region>,
    space: Space,
}

/// Heap of DMA memory for the driver's queues and PRP lists, and for the user's buffers. Allocation
/// takes a lock, so the data path must not use it.
pub struct Heap {
    mapper: Arc<Mapper>,
    /// Alignment and unit of allocations in bytes: the device's memory page. Offsets in a chunk's
    /// space start at this value, because a [`Space`] excludes address 0.
    page: u64,
    source: MemorySource,
    chunks: Mutex<Vec<Chunk>>,
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Heap")
    }
}

impl Heap {
    /// Creates an empty heap, which takes memory from `source` and maps it through `mapper`. `page`
    /// is the device's memory page in bytes (a power of two, at least 4096).
    pub fn new(mapper: Arc<Mapper>, page: u64, source: MemorySource) -> Arc<Self> {
        Arc::new(Self {
            mapper,
            page,
            source,
            chunks: Mutex::default(),
        })
    }

    /// Allocates at least `len` zero bytes, aligned to a memory page and contiguous for the device.
    ///
    /// # Errors
    /// [`MapFailure`] when memory or address space is exhausted, or the mapping fails.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<DmaBuffer, MapFailure> {
        let wanted = (len.max(1) as u64)
            .checked_next_multiple_of(self.page)
            .ok_or(MapFailure::Range)?;
        let mut chunks = self.chunks.lock().unpoisoned();
        let found = chunks
            .iter_mut()
            .enumerate()
            .find_map(|(i, chunk)| Some((i, chunk.space.allocate(wanted, RangeEnd::Low)?)));
        let (index, at) = match found {
            Some(found) => found,
            None => {
                let granule = self.mapper.limits().page_size;
                let size = wanted
                    .max(CHUNK)
                    .checked_next_multiple_of(granule)
                    .ok_or(MapFailure::Range)?;
                let bytes = usize::try_from(size).map_err(|_| MapFailure::Range)?;
                let memory = self.source.make(bytes)?;
                if !memory.is_writable() {
                    return Err(MapError::System {
                        call: "memory of a source",
                        errno: rustix::io::Errno::ACCESS,
                    }
                    .into());
                }
                let region = self.mapper.map(&memory, 0, size)?;
                let mut space = Space::new(&[self.page..=self.page + size - 1], self.page);
                let at = space
                    .allocate(wanted, RangeEnd::Low)
                    .ok_or(MapFailure::NoSpace { len: wanted })?;
                chunks.push(Chunk { region, space });
                (chunks.len() - 1, at)
            }
        };
        let region = chunks
            .get(index)
            .map(|chunk| chunk.region.clone())
            .ok_or(MapFailure::Range)?;
        drop(chunks);
        let buffer = DmaBuffer {
            region,
            offset: at - self.page,
            len: wanted,
            home: Some((Arc::downgrade(self), index)),
        };
        // The memory may hold data of its previous owner.
        let _ = buffer.fill(0);
        let mut buffer = buffer;
        buffer.len = len as u64;
        Ok(buffer)
    }

    fn free(&self, chunk: usize, offset: u64, len: u64) {
        let mut chunks = self.chunks.lock().unpoisoned();
        if let Some(chunk) = chunks.get_mut(chunk) {
            let len = len.max(1).next_multiple_of(self.page);
            chunk.space.free(self.page + offset, len);
        }
    }
}
