//! Descriptor chains: bounded walk from a head index to the buffers of a request (virtio 1.2,
//! 2.7.5).

use crate::ring::{Descriptor, Ring, flag};
use dma::{DmaError, DmaMap};

/// Maximum number of descriptors in a chain, direct and indirect together.
pub(crate) const MAX_CHAIN: usize = 1026;
const DESCRIPTOR_BYTES: usize = 16;

/// Buffer of a descriptor chain in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    /// Whether the device may write the buffer; otherwise it may read it.
    pub(crate) writable: bool,
}

/// Reason why a descriptor chain of the guest is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChainError {
    #[error("descriptor {0} is outside the table")]
    Index(u16),
    #[error("longer than its table, or longer than {MAX_CHAIN}")]
    Loop,
    #[error("indirect descriptor where none may be")]
    Indirect,
    #[error("indirect table of {0} bytes")]
    TableSize(u32),
    #[error("readable buffer after a writable one")]
    Order,
    #[error("indirect table: {0}")]
    Memory(DmaError),
}

impl From<DmaError> for ChainError {
    fn from(error: DmaError) -> Self {
        Self::Memory(error)
    }
}

/// Parser of descriptor chains, which reuses its buffers.
#[derive(Debug, Default)]
pub(crate) struct Walker {
    buffers: Vec<Buffer>,
    table: Vec<u8>,
}

impl Walker {
    /// Returns the buffers of the chain that begins at `head`, in order, readable ones first; empty
    /// ones are left out.
    pub(crate) fn walk(
        &mut self,
        head: u16,
        ring: &Ring,
        size: u16,
        indirect: bool,
        map: &DmaMap,
    ) -> Result<&[Buffer], ChainError> {
        self.buffers.clear();
        let mut index = head;
        // A chain that is longer than the table has met a descriptor twice.
        for _ in 0..size {
            let descriptor = ring.descriptor(index).ok_or(ChainError::Index(index))?;
            if descriptor.flags & flag::INDIRECT != 0 {
                if !indirect || descriptor.flags & flag::NEXT != 0 {
                    return Err(ChainError::Indirect);
                }
                self.walk_table(&descriptor, map)?;
                return Ok(&self.buffers);
            }
            self.push(&descriptor)?;
            if descriptor.flags & flag::NEXT == 0 {
                return Ok(&self.buffers);
            }
            index = descriptor.next;
        }
        Err(ChainError::Loop)
    }

    /// Walks the chain in an indirect table, which is copied once, before any entry is examined.
    fn walk_table(&mut self, descriptor: &Descriptor, map: &DmaMap) -> Result<(), ChainError> {
        let bytes = descriptor.len as usize;
        let entries = bytes / DESCRIPTOR_BYTES;
        if !bytes.is_multiple_of(DESCRIPTOR_BYTES) || entries == 0 || entries > MAX_CHAIN {
            return Err(ChainError::TableSize(descriptor.len));
        }
        self.table.resize(bytes, 0);
        map.read(descriptor.addr, &mut self.table)?;
        let mut index = 0u16;
        for _ in 0..entries {
            let descriptor = self.entry(index).ok_or(ChainError::Index(index))?;
            if descriptor.flags & flag::INDIRECT != 0 {
                return Err(ChainError::Indirect);
            }
            self.push(&descriptor)?;
            if descriptor.flags & flag::NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(ChainError::Loop)
    }

    fn entry(&self, index: u16) -> Option<Descriptor> {
        let at = usize::from(index) * DESCRIPTOR_BYTES;
        let bytes = self.table.get(at..at + DESCRIPTOR_BYTES)?;
        let (low, high) = bytes.split_first_chunk::<8>()?;
        Some(Descriptor::from_words(
            u64::from_le_bytes(*low),
            u64::from_le_bytes(*high.first_chunk::<8>()?),
        ))
    }

    #[inline]
    fn push(&mut self, descriptor: &Descriptor) -> Result<(), ChainError> {
        let writable = descriptor.flags & flag::WRITE != 0;
        if self.buffers.len() >= MAX_CHAIN {
            return Err(ChainError::Loop);
        }
        if !writable && self.buffers.last().is_some_and(|last| last.writable) {
            return Err(ChainError::Order);
        }
        if descriptor.len > 0 {
            self.buffers.push(Buffer {
                addr: descriptor.addr,
                len: descriptor.len,
                writable,
            });
        }
        Ok(())
    }
}
