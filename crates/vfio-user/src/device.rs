//! The seam between protocol and device: what a [`Connection`](crate::Connection) calls.

use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// What `VFIO_USER_DEVICE_GET_INFO` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device can be reset. Without it a client never sends a reset, and
    /// one that comes is refused.
    pub reset: bool,
    /// The device is a PCI device.
    pub pci: bool,
    /// Number of regions; 9 for PCI. QEMU accepts at most 100.
    pub num_regions: u32,
    /// Number of interrupt types; 5 for PCI. QEMU accepts at most 50.
    pub num_irqs: u32,
}

/// One region of the device.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo<'a> {
    /// Size in bytes.
    pub size: u64,
    /// The client may read it.
    pub read: bool,
    /// The client may write it.
    pub write: bool,
    /// How the client may map it, if it may.
    pub mmap: Option<RegionMmap<'a>>,
}

/// How a region is mapped by the client.
#[derive(Clone, Copy, Debug)]
pub struct RegionMmap<'a> {
    /// The file to map. Clients accept one descriptor for each region.
    pub fd: BorrowedFd<'a>,
    /// Offset in that file of the region's first byte.
    pub offset: u64,
    /// The mappable areas; none means the whole region.
    pub areas: &'a [MmapArea],
}

/// A part of a region that can be mapped; both values in bytes and multiples of the page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmapArea {
    /// Offset in the region.
    pub offset: u64,
    /// Length.
    pub size: u64,
}

/// One interrupt type of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts of this type.
    pub count: u32,
    /// They are signalled by eventfd.
    pub eventfd: bool,
    /// They can be masked and unmasked.
    pub maskable: bool,
    /// They mask themselves when triggered.
    pub automasked: bool,
    /// They are set up as a whole.
    pub noresize: bool,
}

/// A checked `VFIO_USER_DEVICE_SET_IRQS`: the index exists, and `start + count` is not above
/// its number of interrupts.
#[derive(Debug)]
pub struct SetIrqs {
    /// Interrupt type.
    pub index: u32,
    /// First interrupt.
    pub start: u32,
    /// Number of interrupts. Zero (with [`IrqAction::Trigger`] and [`IrqData::None`])
    /// tears all of the type down.
    pub count: u32,
    /// What is to be done, or what the eventfds are to tell.
    pub action: IrqAction,
    /// For which interrupts, or with which eventfds.
    pub data: IrqData,
}

impl SetIrqs {
    /// Whether this takes down every interrupt of the type.
    pub fn is_tear_down(&self) -> bool {
        self.count == 0
    }
}

/// What [`SetIrqs`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IrqAction {
    /// Mask.
    Mask,
    /// Unmask.
    Unmask,
    /// Trigger.
    Trigger,
}

/// What [`SetIrqs`] applies to.
#[derive(Debug)]
pub enum IrqData {
    /// All interrupts of the range.
    None,
    /// Those that are true; `count` entries.
    Bool(Vec<bool>),
    /// The eventfd of each interrupt, `None` de-assigns; `count` entries, either all given or none.
    ///
    /// The descriptors may be of any kind: whether they are eventfds is for the device to check.
    Eventfd(Vec<Option<OwnedFd>>),
}

/// A checked `VFIO_USER_DMA_MAP`: not empty, and neither the address range
/// nor the file range wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMapping {
    /// First address.
    pub iova: u64,
    /// Length in bytes.
    pub size: u64,
    /// Offset in the descriptor's file.
    pub offset: u64,
    /// The device may read the memory.
    pub read: bool,
    /// The device may write the memory.
    pub write: bool,
}

/// What `VFIO_USER_DMA_UNMAP` takes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmapping {
    /// The mappings inside a range: none, one or several.
    Range {
        /// First address.
        iova: u64,
        /// Length in bytes, not zero.
        size: u64,
    },
    /// Every mapping.
    All,
}

/// What [`Device::dma_unmap`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped {
    /// Sum of the lengths of the mappings that were taken away, in bytes; 0 if there was none.
    pub size: u64,
    /// Whether nothing can touch that memory any more.
    pub outcome: Outcome,
}

/// Whether an operation is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// It is: the reply goes out now.
    Done,
    /// It is not: [`Connection::complete`](crate::Connection::complete) will tell; until then no
    /// other message is handled.
    Pending,
}

/// The device behind a connection.
///
/// Errors are answered with the error number; they never close the connection. For
/// messages that want no reply they are dropped. No call may block: the caller serves
/// other clients on the same thread.
pub trait Device {
    /// Number of regions and interrupt types.
    fn info(&self) -> DeviceInfo;

    /// A region; `None` if there is none of that index. Called for every
    /// access, so it must be cheap.
    fn region(&self, index: u32) -> Option<RegionInfo<'_>>;

    /// Reads from a region. The range is inside it and `data` is not empty.
    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes to a region. The range is inside it and `data` is not empty.
    ///
    /// Several writes of one message may follow each other although one is not finished: then
    /// [`Connection::complete`](crate::Connection::complete) tells that all of them are.
    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<Outcome, Errno>;

    /// An interrupt type; `None` if there is none of that index.
    fn irq(&self, index: u32) -> Option<IrqInfo>;

    /// Assigns, masks, unmasks or triggers interrupts. The answer must wait until nothing can
    /// signal an eventfd any more that was taken away.
    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<Outcome, Errno>;

    /// Makes client memory accessible. `fd` is missing for memory that cannot be
    /// shared, for example ROMs.
    ///
    /// A range that overlaps a mapped one is refused with `EEXIST`.
    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<(), Errno>;

    /// As [`Device::dma_map`], of a mapping that a process before may have made already: then this
    /// has done the same.
    fn dma_map_again(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<(), Errno> {
        self.dma_map(map, fd)
    }

    /// The sum that [`Device::dma_unmap`] will tell; nothing is changed. Only asked where a process
    /// that follows has to know.
    fn dma_mapped(&self, _unmap: DmaUnmapping) -> Result<u64, Errno> {
        Ok(0)
    }

    /// The descriptors of the next call are kept under these numbers, where they are.
    fn descriptors_kept(&mut self, _numbers: &[Option<NonZeroU32>]) {}

    /// The file that the [`RegionInfo`] of this region has clients map, if it has one.
    fn sent_file(&self, _region: u32) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether the device still needs the descriptor that is kept under this number.
    fn needs_kept(&self, _number: NonZeroU32) -> bool {
        false
    }

    /// Takes client memory away. The answer must wait until nothing can touch that memory any more.
    ///
    /// A range in which nothing is mapped is no error; one that covers a mapping in part is refused
    /// with `EINVAL`, and takes nothing away.
    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno>;

    /// Resets the device, as a PCI function-level reset does.
    fn reset(&mut self) -> Result<Outcome, Errno>;

    /// The connection has ended, by whichever side; called once. A pending operation is
    /// no longer to be completed.
    fn disconnected(&mut self);
}
