//! Interface between protocol and device: the calls of a [`Connection`](crate::Connection).

use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::migration::Migration;
use rustix::io::Errno;

/// Device properties in the reply to `VFIO_USER_DEVICE_GET_INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device can be reset. Without it clients send no reset, and a reset is refused.
    pub reset: bool,
    /// Whether the device is a PCI device.
    pub pci: bool,
    /// Number of regions; 9 for a PCI device. QEMU accepts at most 100.
    pub num_regions: u32,
    /// Number of interrupt types; 5 for a PCI device. QEMU accepts at most 50.
    pub num_irqs: u32,
}

/// Region of a device, as clients access it.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo<'a> {
    /// Size of the region in bytes.
    pub size: u64,
    /// Whether the client may read the region.
    pub read: bool,
    /// Whether the client may write the region.
    pub write: bool,
    /// File and areas by which the client may map the region; `None` if it may not.
    pub mmap: Option<RegionMmap<'a>>,
}

/// File and areas by which clients map a region.
#[derive(Clone, Copy, Debug)]
pub struct RegionMmap<'a> {
    /// File to map. Clients accept one descriptor for each region.
    pub fd: BorrowedFd<'a>,
    /// Byte offset in the file of the region's first byte.
    pub offset: u64,
    /// Areas of the region that can be mapped; empty for the whole region.
    pub areas: &'a [MmapArea],
}

/// A part of a region that can be mapped; both values in bytes and multiples of the page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmapArea {
    /// Byte offset of the area in the region.
    pub offset: u64,
    /// Length of the area in bytes.
    pub size: u64,
}

/// Interrupt type of a device, such as INTx or MSI-X.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts of this type.
    pub count: u32,
    /// Whether an eventfd signals the interrupts.
    pub eventfd: bool,
    /// Whether the interrupts can be masked and unmasked.
    pub maskable: bool,
    /// Whether an interrupt is masked automatically when it is triggered.
    pub automasked: bool,
    /// Whether all interrupts of the type must be set up together.
    pub noresize: bool,
}

/// A checked `VFIO_USER_DEVICE_SET_IRQS`: the index exists, and `start + count` is not above
/// its number of interrupts.
#[derive(Debug)]
pub struct SetIrqs {
    /// Number of the interrupt type.
    pub index: u32,
    /// Number of the first interrupt in the range.
    pub start: u32,
    /// Number of interrupts. Zero (with [`IrqAction::Trigger`] and [`IrqData::None`]) tears down
    /// all interrupts of the type.
    pub count: u32,
    /// Action to perform now, or whenever an eventfd is signalled.
    pub action: IrqAction,
    /// Interrupts of the range that the action concerns, or their eventfds.
    pub data: IrqData,
}

impl SetIrqs {
    /// Returns whether the request removes all eventfds of the interrupt type.
    pub fn is_tear_down(&self) -> bool {
        self.count == 0
    }
}

/// Action of a [`SetIrqs`] request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IrqAction {
    /// Mask the interrupts.
    Mask,
    /// Unmask the interrupts.
    Unmask,
    /// Trigger the interrupts.
    Trigger,
}

/// Interrupts or eventfds of a [`SetIrqs`] request.
#[derive(Debug)]
pub enum IrqData {
    /// All interrupts of the range are selected.
    None,
    /// The interrupts with the value `true` are selected; `count` entries.
    Bool(Vec<bool>),
    /// The eventfd of each interrupt, `None` de-assigns; `count` entries, either all given or none.
    ///
    /// The descriptors may be of any kind: the device must check that they are eventfds.
    Eventfd(Vec<Option<OwnedFd>>),
}

/// A checked `VFIO_USER_DMA_MAP`: not empty, and neither the address range
/// nor the file range wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMapping {
    /// First guest address (IOVA) of the mapping.
    pub iova: u64,
    /// Length of the mapping in bytes.
    pub size: u64,
    /// Byte offset in the descriptor's file.
    pub offset: u64,
    /// Whether the device may read the memory.
    pub read: bool,
    /// Whether the device may write the memory.
    pub write: bool,
}

/// Mappings that `VFIO_USER_DMA_UNMAP` removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmapping {
    /// All mappings inside the range: none, one or several.
    Range {
        /// First guest address (IOVA) of the range.
        iova: u64,
        /// Length of the range in bytes, not zero.
        size: u64,
    },
    /// All mappings of the client.
    All,
}

/// Result of [`Device::dma_unmap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped {
    /// Sum of the lengths of the removed mappings, in bytes; 0 if there was none.
    pub size: u64,
    /// Whether the device has stopped accessing the memory, or has yet to.
    pub outcome: OperationOutcome,
}

/// Whether an operation of the device is complete, or will complete later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum OperationOutcome {
    /// Complete: the reply is sent now.
    Done,
    /// Incomplete: [`Connection::complete`](crate::Connection::complete) will report the end. No
    /// other message is handled until then.
    Pending,
}

/// The device behind a connection.
///
/// Errors are answered with the error number and never close the connection. They are dropped for
/// messages that request no reply. No call may block, since the caller serves other clients on the
/// same thread.
pub trait Device {
    /// Returns the number of regions and interrupt types of the device.
    fn info(&self) -> DeviceInfo;

    /// Returns a region; `None` if the index does not exist. Called for every access, so it must be
    /// cheap.
    fn region(&self, index: u32) -> Option<RegionInfo<'_>>;

    /// Reads from a region. The range is inside it and `data` is not empty.
    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes to a region. The range is inside it and `data` is not empty.
    ///
    /// Several writes of one message may follow each other while one is incomplete.
    /// [`Connection::complete`](crate::Connection::complete) then reports the end of all of them.
    fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<OperationOutcome, Errno>;

    /// Returns the properties of interrupt type `index`; `None` if the type does not exist.
    fn irq(&self, index: u32) -> Option<IrqInfo>;

    /// Assigns, masks, unmasks or triggers interrupts. The answer must wait until no removed
    /// eventfd can be signalled any more.
    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno>;

    /// Makes client memory accessible. `fd` is missing for memory that cannot be
    /// shared, for example ROMs.
    ///
    /// A range that overlaps a mapped one is refused with `EEXIST`. A pending mapping is dropped
    /// when the connection ends.
    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<OperationOutcome, Errno>;

    /// Repeats [`Device::dma_map`] for a mapping that a previous process may have made; an
    /// identical existing mapping counts as success.
    fn dma_map_again(
        &mut self,
        map: DmaMapping,
        fd: Option<OwnedFd>,
    ) -> Result<OperationOutcome, Errno> {
        self.dma_map(map, fd)
    }

    /// Returns the sum that [`Device::dma_unmap`] will return, and changes nothing. Called only
    /// when a later process may need it.
    fn dma_mapped(&self, _unmap: DmaUnmapping) -> Result<u64, Errno> {
        Ok(0)
    }

    /// Announces the numbers under which the descriptors of the next call are kept, if they are.
    fn descriptors_kept(&mut self, _numbers: &[Option<NonZeroU32>]) {}

    /// Returns the file of the region's [`RegionMmap`], if clients can map the region.
    fn sent_file(&self, _region: u32) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns whether the device still uses the descriptor that the keeper holds under this
    /// number.
    fn needs_kept(&self, _number: NonZeroU32) -> bool {
        false
    }

    /// Removes client memory. The answer must wait until the memory is no longer accessed.
    ///
    /// A range without mappings is no error. A range that covers a mapping in part is refused with
    /// `EINVAL`, and removes nothing.
    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno>;

    /// Resets the device, as a PCI function-level reset does.
    fn reset(&mut self) -> Result<OperationOutcome, Errno>;

    /// Returns the device's interface for live migration; `None` if it cannot migrate, which the
    /// client is then told.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// Ends the connection, closed by either side; called once. A pending operation must no longer
    /// be completed.
    fn disconnected(&mut self);
}
