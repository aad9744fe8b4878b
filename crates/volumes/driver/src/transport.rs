//! [`Transport`], the interface to a controller: registers, DMA mappings, interrupts, reset.
//! Implementations exist for VFIO, for a vfio-user socket, for a controller in this process, and
//! for tests that tamper with one of these.

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
    /// No further DMA mapping is possible, because a limit of the kernel or the server is reached.
    /// Unmap a region first.
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
        /// Operation that has failed.
        what: String,
        /// Error of the system call or message.
        #[source]
        source: io::Error,
    },
    /// The vfio-user connection failed.
    #[error("vfio-user")]
    VfioUser(#[source] vfio_user::client::ClientError),
    /// The kernel's VFIO refused the operation.
    #[error(transparent)]
    Vfio(crate::vfio::VfioError),
    /// A controller in this process refused the memory.
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

/// Returns an error unless an unmap removed a mapping of exactly `len` bytes. Servers and the
/// kernel remove all mappings in a range, even if none exist, and return their total length,
/// `unmapped`.
pub fn mapped_whole(unmapped: u64, len: u64) -> Result<(), TransportError> {
    if unmapped == len {
        return Ok(());
    }
    Err(TransportError::io(
        "unmapping memory",
        io::Error::other(format!("only {unmapped:#x} of {len:#x} bytes were mapped")),
    ))
}

/// Memory of a DMA mapping, given by a file or by an address in this process.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Part of a shared memory file. Every transport can map it: VFIO by its address in this
    /// process ([`Source::host`]), the others by descriptor and offset.
    File {
        /// Memory that backs the mapping.
        memory: &'a Memory,
        /// Byte offset in the memory.
        offset: u64,
    },
    /// Memory of this process at an address; the owner keeps it in place until it is unmapped. Only
    /// for transports with [`DmaLimits::host_ranges`].
    Host {
        /// Address of the memory in this process.
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

/// DMA mapping to be created. Its address, length and source are multiples of
/// [`DmaLimits::page_size`].
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// First device address (IOVA) of the mapping.
    pub iova: u64,
    /// Length of the mapping in bytes.
    pub len: u64,
    /// Memory that the device accesses through the mapping.
    pub source: Source<'a>,
    /// Access rights of the device to the memory.
    pub prot: Prot,
}

/// Limits of a transport for DMA mappings.
#[derive(Clone, Debug)]
pub struct DmaLimits {
    /// Ranges of device addresses (IOVAs) that may be used, ascending and disjoint.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// Maximum number of simultaneous mappings (VFIO's `dma_entry_limit`: 65,535).
    pub max_mappings: usize,
    /// Granularity in bytes of address, length and source; a power of two, at least 4096.
    pub page_size: u64,
    /// Whether memory can be mapped by its address in this process ([`Source::Host`]).
    pub host_ranges: bool,
}

/// Interface to a controller. The device handle and its queue pairs share it, from any thread. The
/// data path uses only [`DoorbellCell`]s (or [`Transport::write32`], where there are none) and
/// [`Transport::pause`].
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

    /// Returns the transport's limits for DMA mappings.
    fn dma_limits(&self) -> DmaLimits;

    /// Makes memory accessible to the device. The transport keeps no reference to it: the caller
    /// keeps it in place until [`Transport::unmap`] has succeeded.
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError>;

    /// Removes exactly one mapping. After success the device can no longer access its memory. After
    /// an error it may, and the caller must leak the memory.
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError>;

    /// Returns the number of MSI-X vectors of the controller.
    fn msix_vectors(&self) -> u16;

    /// Assigns eventfds to the MSI-X vectors from 0 on (`None`: no interrupt), and removes the
    /// eventfds of the remaining vectors. An empty list disables MSI-X.
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

    /// Resets the PCI function. Registers return to their power-on values; DMA mappings and
    /// eventfds are kept.
    fn reset(&self) -> Result<(), TransportError>;

    /// Registers an eventfd that is signalled when the system asks for the device. Returns `false`
    /// on a transport without such requests.
    fn set_request(&self, _eventfd: Option<BorrowedFd<'_>>) -> Result<bool, TransportError> {
        Ok(false)
    }

    /// Releases the device although this transport still exists; later calls fail as if the device
    /// were lost. Called after the controller was disabled.
    fn release(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Called repeatedly while the driver waits for the controller. A controller that runs in the
    /// calling thread makes progress here; other transports do nothing.
    fn pause(&self) {
        std::hint::spin_loop();
    }

    /// Returns whether the controller works only inside [`Transport::pause`], so that a wait for an
    /// eventfd would never end.
    fn is_stepped(&self) -> bool {
        false
    }
}

/// A doorbell register or memory cell that is mapped into this process. A write is one store.
#[derive(Clone, Debug)]
pub struct DoorbellCell(Cell);

#[derive(Clone, Debug)]
enum Cell {
    /// Memory shared with a controller in this process, which polls the doorbell.
    Pages {
        pages: dma::SharedPages,
        index: usize,
    },
    /// File of a vfio-user server, which polls the doorbell.
    File { memory: Memory, offset: usize },
    /// Doorbell register of a device, mapped into this process.
    Mapped {
        registers: Arc<mmio::Registers>,
        offset: usize,
    },
}

impl DoorbellCell {
    /// Returns the cell with this index (4 bytes each) in pages shared with a controller in this
    /// process; `None` when the index is out of range.
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

    /// Writes the doorbell. The device sees queue entries written before, when it sees the value.
    /// Returns `false` if the register's file has shrunk, so that the value cannot arrive;
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
