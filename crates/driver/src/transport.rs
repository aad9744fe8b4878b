//! Interface to a controller: registers, memory, interrupts, reset. Implementations of
//! [`Transport`] are VFIO, a vfio-user socket, a controller in this process, and tests that tamper
//! with one of these.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dma::{Memory, Prot};

use crate::mmio;

/// Reason why a transport call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The device or the connection to it is lost: all later calls fail.
    #[error("the device is gone: {0}")]
    Gone(String),
    /// No mapping can be added, because the limit of the kernel or the server is reached. Unmap a
    /// region first.
    #[error("no more DMA mappings are possible")]
    NoMappings,
    /// The transport cannot reach this kind of memory (see [`DmaLimits::host_ranges`]).
    #[error("this transport needs memory that is a shared file")]
    NeedsSharedMemory,
    /// The requested feature does not exist on this transport.
    #[error("{0} is not supported by this transport")]
    Unsupported(&'static str),
    /// A system call or a message failed.
    #[error("{what}")]
    Io {
        /// Failed operation.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The vfio-user connection failed.
    #[error("vfio-user")]
    VfioUser(#[source] vfio_user::client::ClientError),
    /// The kernel's VFIO refused the operation.
    #[error(transparent)]
    Vfio(crate::vfio::VfioError),
    /// A controller in this process refused memory.
    #[error("memory refused")]
    Memory(#[from] dma::MapError),
}

impl TransportError {
    /// Creates an error of the system during the operation `what`.
    pub fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// Checks that an unmap removed a whole mapping. Servers and the kernel remove all mappings in a
/// range, also if there are none, and return their total length.
pub fn mapped_whole(unmapped: u64, len: u64) -> Result<(), TransportError> {
    if unmapped == len {
        return Ok(());
    }
    Err(TransportError::io(
        "unmapping memory",
        io::Error::other(format!("only {unmapped:#x} of {len:#x} bytes were mapped")),
    ))
}

/// Memory behind a mapping, by the ways in which transports can access it.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Part of a shared memory file. Every transport can map it: VFIO by its address in this
    /// process ([`Source::host`]), the others by descriptor and offset.
    File {
        /// The memory.
        memory: &'a Memory,
        /// Offset in the memory, in bytes.
        offset: u64,
    },
    /// Memory of this process at this address; the owner of the mapping keeps it in place until it
    /// is unmapped. Only for transports with [`DmaLimits::host_ranges`].
    Host {
        /// Address of the first byte.
        address: usize,
    },
}

impl Source<'_> {
    /// Returns the address in this process of `len` bytes of the memory; `None` when the memory is
    /// shorter.
    pub fn host(&self, len: u64) -> Option<usize> {
        match *self {
            Source::File { memory, offset } => {
                let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
                memory
                    .segment(offset, len)
                    .map(|piece| piece.as_ptr().addr())
            }
            Source::Host { address } => Some(address),
        }
    }
}

/// A DMA mapping to be created. Address, length and source are multiples of
/// [`DmaLimits::page_size`].
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// First address as the device sees it.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// The memory.
    pub source: Source<'a>,
    /// Access rights of the device.
    pub prot: Prot,
}

/// Limits of DMA mappings.
#[derive(Clone, Debug)]
pub struct DmaLimits {
    /// IOVAs that the device may use, in order and disjoint.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// Maximum number of simultaneous mappings (VFIO's `dma_entry_limit`: 65,535).
    pub max_mappings: usize,
    /// Granularity in bytes of address, length and source; a power of two, at least 4096.
    pub page_size: u64,
    /// [`Source::Host`] is supported.
    pub host_ranges: bool,
}

/// Interface to a controller, shared by the device handle and its queue pairs, from any thread. The
/// path of a command uses only [`DoorbellCell`]s (or, where there are none, [`Transport::write32`])
/// and [`Transport::pause`].
pub trait Transport: Send + Sync + Debug + Any {
    /// Reads a 32-bit register of BAR0. All ones may mean that the device is lost.
    fn read32(&self, offset: u64) -> Result<u32, TransportError>;

    /// Writes a 32-bit register of BAR0. Memory written before is visible to the
    /// device when the write arrives.
    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError>;

    /// Reads a 64-bit register, by default as two halves, low first (NVMe over
    /// PCIe Transport 1.1, 3.1).
    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        let low = self.read32(offset)?;
        let high = self.read32(offset + 4)?;
        Ok(u64::from(high) << 32 | u64::from(low))
    }

    /// Writes a 64-bit register, by default as two halves, low first.
    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        self.write32(offset, value as u32)?;
        self.write32(offset + 4, (value >> 32) as u32)
    }

    /// Returns the doorbell register at this offset in BAR0, if a plain store can write it.
    /// Otherwise `None`, and [`Transport::write32`] is used.
    fn doorbell(&self, offset: u64) -> Option<DoorbellCell>;

    /// Returns the limits of DMA mappings.
    fn dma_limits(&self) -> DmaLimits;

    /// Makes memory accessible to the device. The transport keeps no reference to it: the caller
    /// keeps it in place until [`Transport::unmap`] has succeeded.
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError>;

    /// Removes exactly one mapping. After success the device can no longer access its memory. After
    /// an error it may, and the caller must leak the memory.
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError>;

    /// Returns the number of MSI-X vectors.
    fn msix_vectors(&self) -> u16;

    /// Assigns eventfds to the vectors from 0 on (`None`: no interrupt), and removes those of the
    /// remaining vectors. An empty list disables MSI-X.
    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError>;

    /// Assigns or removes the eventfd of one vector while MSI-X is enabled; other vectors are
    /// unchanged.
    fn set_vector(
        &self,
        _vector: u16,
        _eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        Err(TransportError::Unsupported("changing one vector"))
    }

    /// Enables or disables DMA: PCI command register, Bus Master Enable. Memory Space Enable and
    /// Interrupt Disable are set in both cases.
    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError>;

    /// Resets the function. Registers are as after power-on; mappings and eventfds stay.
    fn reset(&self) -> Result<(), TransportError>;

    /// Has an eventfd signalled when the system requests the device back. Returns `false` on a
    /// transport without such requests.
    fn set_request(&self, _eventfd: Option<BorrowedFd<'_>>) -> Result<bool, TransportError> {
        Ok(false)
    }

    /// Releases the device although this transport still exists: later calls fail as if it were
    /// lost. Called after the controller was disabled.
    fn release(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Called repeatedly while the driver waits for the controller. A controller in this very
    /// thread does its work here; other transports need nothing.
    fn pause(&self) {
        std::hint::spin_loop();
    }

    /// Returns whether the controller works only inside [`Transport::pause`], so that a wait for an
    /// eventfd would never end.
    fn is_stepped(&self) -> bool {
        false
    }
}

/// A doorbell register that is mapped into this process. Writing it is one store.
#[derive(Clone, Debug)]
pub struct DoorbellCell(Cell);

#[derive(Clone, Debug)]
enum Cell {
    /// Shared memory that the other side polls.
    Pages {
        pages: dma::SharedPages,
        index: usize,
    },
    /// A file of a server that polls it.
    File { memory: Memory, offset: usize },
    /// Registers of a device.
    Mapped {
        registers: Arc<mmio::Registers>,
        offset: usize,
    },
}

impl DoorbellCell {
    /// Returns cell `index` (of 4 bytes) of pages shared with a controller in this process; `None`
    /// when the index is out of range.
    pub fn shared(pages: &dma::SharedPages, index: usize) -> Option<Self> {
        pages.cell(index)?;
        Some(Self(Cell::Pages {
            pages: pages.clone(),
            index,
        }))
    }

    /// Returns the register at `offset` bytes in another process's file; `None` when it exceeds the
    /// file or is not aligned to 4.
    pub fn in_file(memory: &Memory, offset: usize) -> Option<Self> {
        memory.atomic_u32(offset)?;
        Some(Self(Cell::File {
            memory: memory.clone(),
            offset,
        }))
    }

    /// Returns the register at `offset` bytes in a mapped part of BAR0; `None` when it exceeds the
    /// mapping or is not aligned to 4.
    pub fn mapped(registers: &Arc<mmio::Registers>, offset: usize) -> Option<Self> {
        registers.is_register(offset).then(|| {
            Self(Cell::Mapped {
                registers: registers.clone(),
                offset,
            })
        })
    }

    /// Rings the doorbell: queue entries written before are visible to the device when the value
    /// arrives. Returns `false` if it cannot arrive, because the register's file has shrunk;
    /// [`Transport::write32`] may still work.
    #[inline]
    pub fn ring(&self, value: u32) -> bool {
        match &self.0 {
            Cell::Mapped { registers, offset } => {
                registers.write32(*offset, value);
                true
            }
            Cell::File { memory, offset } => {
                if let Some(cell) = memory.atomic_u32(*offset) {
                    cell.store(value.to_le(), Ordering::Release);
                }
                !memory.is_poisoned()
            }
            Cell::Pages { pages, index } => {
                if let Some(cell) = pages.cell(*index) {
                    AtomicU32::store(cell, value.to_le(), Ordering::Release);
                }
                true
            }
        }
    }
}
