//! The seam to the controller: registers, memory, interrupts, reset. Whatever carries a controller
//! implements [`Transport`]: VFIO, a vfio-user socket, a controller in this process, or a test that
//! tampers with one of these.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dma::{Memory, Prot};

use crate::mmio;

/// Why a transport could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The device is gone, or the connection to it is: nothing will work any more.
    #[error("the device is gone: {0}")]
    Gone(String),
    /// No mapping can be added: the limit of the kernel or of the server is
    /// reached. Unmap something first.
    #[error("no more DMA mappings are possible")]
    NoMappings,
    /// The transport cannot reach this kind of memory (see [`DmaLimits::host_ranges`]).
    #[error("this transport needs memory that is a shared file")]
    NeedsSharedMemory,
    /// What was asked for does not exist on this transport.
    #[error("{0} is not supported by this transport")]
    Unsupported(&'static str),
    /// A system call or a message failed.
    #[error("{what}")]
    Io {
        /// What was being done.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The vfio-user connection failed.
    #[error("vfio-user")]
    VfioUser(#[source] vfio_user::client::ClientError),
    /// The kernel's VFIO refused.
    #[error(transparent)]
    Vfio(crate::vfio::VfioError),
    /// A controller in this process refused memory.
    #[error("memory refused")]
    Memory(#[from] dma::MapError),
}

impl TransportError {
    /// An error of the system while doing `what`.
    pub fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// Servers and the kernel take away what is mapped in a range, if that is nothing, too, and tell
/// how much it was. Of our own mappings it must be all of them.
pub fn mapped_whole(unmapped: u64, len: u64) -> Result<(), TransportError> {
    if unmapped == len {
        return Ok(());
    }
    Err(TransportError::io(
        "unmapping memory",
        io::Error::other(format!("only {unmapped:#x} of {len:#x} bytes were mapped")),
    ))
}

/// The memory behind a mapping, as far as transports differ in what they can reach.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Part of a shared memory file. Every transport can map it: VFIO by its address in this
    /// process ([`Source::host`]), the others by descriptor and offset.
    File {
        /// The memory.
        memory: &'a Memory,
        /// Offset in it, in bytes.
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
    /// The address in this process of `len` bytes of the memory; `None` when
    /// they are out of its range.
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

/// One DMA mapping to be made. Address, length and source are multiples of
/// [`DmaLimits::page_size`].
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// First address as the device sees it.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// The memory.
    pub source: Source<'a>,
    /// What the device may do with it.
    pub prot: Prot,
}

/// What can be mapped for DMA.
#[derive(Clone, Debug)]
pub struct DmaLimits {
    /// IOVAs that the device may use, in order and disjoint.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// How many mappings may exist at one time (VFIO's `dma_entry_limit`: 65,535).
    pub max_mappings: usize,
    /// Granularity in bytes of address, length and source; a power of two, at least 4096.
    pub page_size: u64,
    /// [`Source::Host`] works.
    pub host_ranges: bool,
}

/// What carries a controller. Shared by the device handle and its queue pairs, from any thread; on
/// the path of a command only [`DoorbellCell`]s (or, where there are none, [`Transport::write32`])
/// and [`Transport::pause`] are used.
pub trait Transport: Send + Sync + Debug + Any {
    /// Reads a 32-bit register of BAR0. All ones may mean that the device is gone.
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

    /// The doorbell register at this offset in BAR0, if it can be written by a plain store. `None`:
    /// by [`Transport::write32`].
    fn doorbell(&self, offset: u64) -> Option<DoorbellCell>;

    /// What can be mapped for DMA.
    fn dma_limits(&self) -> DmaLimits;

    /// Makes memory accessible to the device. The transport keeps no reference to it: the caller
    /// keeps it in place until [`Transport::unmap`] has succeeded.
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError>;

    /// Takes exactly one mapping away. After success the device can no longer touch its memory;
    /// after an error that is not known, and the caller must leak the memory.
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError>;

    /// Number of MSI-X vectors.
    fn msix_vectors(&self) -> u16;

    /// Assigns eventfds to the vectors from 0 on (`None`: no interrupt), and takes away those of
    /// all others. An empty list disables MSI-X.
    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError>;

    /// Gives one vector an eventfd, or takes it away, while MSI-X is enabled;
    /// the others stay as they are.
    fn set_vector(
        &self,
        _vector: u16,
        _eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        Err(TransportError::Unsupported("changing one vector"))
    }

    /// Lets the device do DMA (or not): PCI command register, Bus Master Enable, together with
    /// Memory Space Enable and Interrupt Disable, which are set in both cases.
    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError>;

    /// Resets the function. Registers are as after power-on; mappings and eventfds stay.
    fn reset(&self) -> Result<(), TransportError>;

    /// Has an eventfd signalled when the system asks for the device back.
    /// `false`: it never does here.
    fn set_request(&self, _eventfd: Option<BorrowedFd<'_>>) -> Result<bool, TransportError> {
        Ok(false)
    }

    /// Releases the device although this transport still exists: nothing will work from now on, as
    /// if it were gone. Called after the controller was disabled.
    fn release(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Called again and again while the driver waits for the controller. A controller that lives in
    /// this very thread does its work here; others need nothing.
    fn pause(&self) {
        std::hint::spin_loop();
    }

    /// Whether the controller works only inside [`Transport::pause`], so that waiting for an
    /// eventfd would be forever.
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
    /// Cell `index` (of 4 bytes) of pages shared with a controller in this process;
    /// `None` when it is outside.
    pub fn shared(pages: &dma::SharedPages, index: usize) -> Option<Self> {
        pages.cell(index)?;
        Some(Self(Cell::Pages {
            pages: pages.clone(),
            index,
        }))
    }

    /// The register at `offset` bytes in a file of another process's; `None` when it is outside or
    /// not aligned to 4.
    pub fn in_file(memory: &Memory, offset: usize) -> Option<Self> {
        memory.atomic_u32(offset)?;
        Some(Self(Cell::File {
            memory: memory.clone(),
            offset,
        }))
    }

    /// The register at `offset` bytes in a mapped part of BAR0; `None` when it is
    /// outside or not aligned to 4.
    pub fn mapped(registers: &Arc<mmio::Registers>, offset: usize) -> Option<Self> {
        registers.is_register(offset).then(|| {
            Self(Cell::Mapped {
                registers: registers.clone(),
                offset,
            })
        })
    }

    /// Rings: queue entries written before are visible to the device when the value arrives.
    /// `false`: it cannot arrive, for the file that holds the register has shrunk;
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
