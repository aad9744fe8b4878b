//! Wire format: header, commands, payloads, flags.
//!
//! Names and offsets are the specification's. Every type is plain data, so that an unknown value is
//! valid and not undefined behaviour. The code that uses a value interprets it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The major version that this crate speaks.
pub const VERSION_MAJOR: u16 = 0;
/// The highest minor version that this crate speaks.
pub const VERSION_MINOR: u16 = 0;

/// Size of [`Header`] in bytes.
pub const HEADER_SIZE: usize = size_of::<Header>();

/// Maximum number of descriptors in one message in either direction.
///
/// QEMU refuses a server that announces more than 16, and sends at most that many.
pub const MAX_MSG_FDS: usize = 16;

/// `max_data_xfer_size` of a peer that does not state it, in bytes.
pub const DEFAULT_MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// `max_msg_fds` of a peer that does not state it.
pub const DEFAULT_MAX_MSG_FDS: u64 = 1;

/// Maximum data of one entry of `VFIO_USER_REGION_WRITE_MULTI`, in bytes.
pub const MULTI_DATA: usize = 8;
/// Maximum number of entries of a `VFIO_USER_REGION_WRITE_MULTI`. QEMU sends 200 at most.
pub const MULTI_ENTRIES: u64 = 256;

/// A command number. Unknown numbers are kept as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub struct Command(pub u16);

impl Command {
    /// `VFIO_USER_VERSION`: negotiation, the first message.
    pub const VERSION: Self = Self(1);
    /// `VFIO_USER_DMA_MAP`: a range of client memory becomes accessible.
    pub const DMA_MAP: Self = Self(2);
    /// `VFIO_USER_DMA_UNMAP`: a range of client memory is removed.
    pub const DMA_UNMAP: Self = Self(3);
    /// `VFIO_USER_DEVICE_GET_INFO`: number of regions and interrupt types.
    pub const DEVICE_GET_INFO: Self = Self(4);
    /// `VFIO_USER_DEVICE_GET_REGION_INFO`: size, flags and mapping of one region.
    pub const DEVICE_GET_REGION_INFO: Self = Self(5);
    /// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`: ioeventfds of one region.
    pub const DEVICE_GET_REGION_IO_FDS: Self = Self(6);
    /// `VFIO_USER_DEVICE_GET_IRQ_INFO`: number and kind of interrupts of one type.
    pub const DEVICE_GET_IRQ_INFO: Self = Self(7);
    /// `VFIO_USER_DEVICE_SET_IRQS`: assign, mask, unmask, trigger interrupts.
    pub const DEVICE_SET_IRQS: Self = Self(8);
    /// `VFIO_USER_REGION_READ`.
    pub const REGION_READ: Self = Self(9);
    /// `VFIO_USER_REGION_WRITE`.
    pub const REGION_WRITE: Self = Self(10);
    /// `VFIO_USER_DMA_READ`: server to client only.
    pub const DMA_READ: Self = Self(11);
    /// `VFIO_USER_DMA_WRITE`: server to client only.
    pub const DMA_WRITE: Self = Self(12);
    /// `VFIO_USER_DEVICE_RESET`.
    pub const DEVICE_RESET: Self = Self(13);
    /// `VFIO_USER_DIRTY_PAGES`: only in older revisions of the specification.
    pub const DIRTY_PAGES: Self = Self(14);
    /// `VFIO_USER_REGION_WRITE_MULTI`: several small writes in one message.
    pub const REGION_WRITE_MULTI: Self = Self(15);
    /// `VFIO_USER_DEVICE_FEATURE`: migration features.
    pub const DEVICE_FEATURE: Self = Self(16);

    /// Returns whether a client may attach descriptors to this command.
    ///
    /// DMA_UNMAP needs none, but one polling host sends the descriptor of the mapping with it.
    pub const fn may_carry_fds(self) -> bool {
        matches!(
            self,
            Self::DMA_MAP | Self::DMA_UNMAP | Self::DEVICE_SET_IRQS
        )
    }
}

/// The header of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of the command, echoed in the reply; need not be unique.
    pub message_id: u16,
    /// The command, also in its reply.
    pub command: Command,
    /// Size of the whole message in bytes, header included.
    pub message_size: u32,
    /// Type in bits 0-3, [`flags::NO_REPLY`], [`flags::ERROR`].
    pub flags: u32,
    /// Positive errno, or zero, in a reply with [`flags::ERROR`].
    pub error: u32,
}

/// Values of [`Header::flags`].
pub mod flags {
    /// Mask of the type bits.
    pub const TYPE_MASK: u32 = 0xf;
    /// Type: a command.
    pub const COMMAND: u32 = 0;
    /// Type: a reply.
    pub const REPLY: u32 = 1;
    /// Command: no reply is requested.
    pub const NO_REPLY: u32 = 1 << 4;
    /// Reply: the command failed, and there is no payload.
    pub const ERROR: u32 = 1 << 5;
}

/// Fixed part of `VFIO_USER_VERSION`; the JSON text ended by NUL follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Version {
    /// Major version.
    pub major: u16,
    /// Minor version.
    pub minor: u16,
}

/// Payload of `VFIO_USER_DMA_MAP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: u32,
    /// [`dma::READ`], [`dma::WRITE`].
    pub flags: u32,
    /// Offset of the range in the descriptor's file, in bytes.
    pub offset: u64,
    /// First DMA address (IOVA).
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Payload of `VFIO_USER_DMA_UNMAP` and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaUnmap {
    /// Maximum payload of the reply.
    pub argsz: u32,
    /// [`dma::UNMAP_DIRTY_BITMAP`], [`dma::UNMAP_ALL`].
    pub flags: u32,
    /// First DMA address (IOVA).
    pub address: u64,
    /// Length in bytes; in the reply, of the removed mappings.
    pub size: u64,
}

/// Flags of [`DmaMap`] and [`DmaUnmap`] (`<linux/vfio.h>`).
pub mod dma {
    /// Map: the device may read the memory.
    pub const READ: u32 = 1 << 0;
    /// Map: the device may write the memory.
    pub const WRITE: u32 = 1 << 1;
    /// Unmap: answer with the bitmap of dirty pages.
    pub const UNMAP_DIRTY_BITMAP: u32 = 1 << 0;
    /// Unmap: everything; address and size are zero.
    pub const UNMAP_ALL: u32 = 1 << 1;
}

/// Payload of `VFIO_USER_DEVICE_GET_INFO` and of its reply (`struct vfio_device_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct DeviceInfo {
    /// Size of the payload: allowed in the request, needed in the reply.
    pub argsz: u32,
    /// [`device::RESET`], [`device::PCI`].
    pub flags: u32,
    /// Number of regions.
    pub num_regions: u32,
    /// Number of interrupt types.
    pub num_irqs: u32,
}

/// Flags of [`DeviceInfo`] (`<linux/vfio.h>`).
pub mod device {
    /// The device can be reset.
    pub const RESET: u32 = 1 << 0;
    /// The device is a PCI device.
    pub const PCI: u32 = 1 << 1;
}

/// Payload of `VFIO_USER_DEVICE_GET_REGION_INFO` and of its reply (`struct vfio_region_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct RegionInfo {
    /// Size of the payload: allowed in the request, needed in the reply.
    pub argsz: u32,
    /// Flags of [`region`].
    pub flags: u32,
    /// Region index.
    pub index: u32,
    /// Offset of the capabilities from the start of this structure; 0 means none.
    pub cap_offset: u32,
    /// Size of the region in bytes; 0 for a region that does not exist.
    pub size: u64,
    /// Offset to give to mmap for the region's first byte.
    pub offset: u64,
}

/// Flags of [`RegionInfo`] (`<linux/vfio.h>`).
pub mod region {
    /// The region can be read.
    pub const READ: u32 = 1 << 0;
    /// The region can be written.
    pub const WRITE: u32 = 1 << 1;
    /// The region, or the areas of its sparse-mmap capability, can be mapped.
    pub const MMAP: u32 = 1 << 2;
    /// Capabilities follow.
    pub const CAPS: u32 = 1 << 3;
}

/// Head of a region capability (`struct vfio_info_cap_header`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CapHeader {
    /// [`CAP_SPARSE_MMAP`] or another.
    pub id: u16,
    /// Version of that capability.
    pub version: u16,
    /// Offset of the next one from the start of [`RegionInfo`]; 0 ends the list.
    pub next: u32,
}

/// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`.
pub const CAP_SPARSE_MMAP: u16 = 1;

/// The sparse-mmap capability's fixed part after [`CapHeader`]; [`SparseArea`]s follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SparseMmap {
    /// Number of areas.
    pub nr_areas: u32,
    /// Zero.
    pub reserved: u32,
}

/// A mappable area of a region (`struct vfio_region_sparse_mmap_area`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SparseArea {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Payload of `VFIO_USER_DEVICE_GET_IRQ_INFO` and of its reply (`struct vfio_irq_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct IrqInfo {
    /// Size of the payload: allowed in the request, needed in the reply.
    pub argsz: u32,
    /// Flags of [`irq`].
    pub flags: u32,
    /// Interrupt type.
    pub index: u32,
    /// Number of interrupts of that type.
    pub count: u32,
}

/// Flags of [`IrqInfo`] (`<linux/vfio.h>`).
pub mod irq {
    /// Interrupts are signalled by eventfd.
    pub const EVENTFD: u32 = 1 << 0;
    /// Interrupts can be masked and unmasked.
    pub const MASKABLE: u32 = 1 << 1;
    /// Interrupts mask themselves when triggered.
    pub const AUTOMASKED: u32 = 1 << 2;
    /// Interrupts are set up as a whole.
    pub const NORESIZE: u32 = 1 << 3;
}

/// Fixed part of `VFIO_USER_DEVICE_SET_IRQS` (`struct vfio_irq_set`); an array of
/// boolean bytes may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IrqSet {
    /// Size of the payload.
    pub argsz: u32,
    /// One data and one action flag of [`irq_set`].
    pub flags: u32,
    /// Interrupt type.
    pub index: u32,
    /// First interrupt.
    pub start: u32,
    /// Number of interrupts.
    pub count: u32,
}

/// Flags of [`IrqSet`] (`<linux/vfio.h>`).
pub mod irq_set {
    /// No data.
    pub const DATA_NONE: u32 = 1 << 0;
    /// Data: a byte for each interrupt; a nonzero byte selects it.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// Data: a descriptor for each interrupt, or none at all to de-assign.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Mask.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// Unmask.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// Trigger, or assign the eventfd to be triggered.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// All data flags.
    pub const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    /// All action flags.
    pub const ACTION_BITS: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;
}

/// Fixed part of `VFIO_USER_REGION_READ`, `VFIO_USER_REGION_WRITE` and their
/// replies; data may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Region index.
    pub region: u32,
    /// Number of bytes.
    pub count: u32,
}

/// An entry of `VFIO_USER_REGION_WRITE_MULTI`, which begins with the number of entries as a u64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MultiWrite {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Region index.
    pub region: u32,
    /// Number of bytes, 1 to 8.
    pub count: u32,
    /// The bytes; those after `count` are ignored.
    pub data: [u8; MULTI_DATA],
}

const _: () = {
    assert!(size_of::<Header>() == 16);
    assert!(size_of::<Version>() == 4);
    assert!(size_of::<DmaMap>() == 32);
    assert!(size_of::<DmaUnmap>() == 24);
    assert!(size_of::<DeviceInfo>() == 16);
    assert!(size_of::<RegionInfo>() == 32);
    assert!(size_of::<CapHeader>() == 8);
    assert!(size_of::<SparseMmap>() == 8);
    assert!(size_of::<SparseArea>() == 16);
    assert!(size_of::<IrqInfo>() == 16);
    assert!(size_of::<IrqSet>() == 20);
    assert!(size_of::<RegionAccess>() == 16);
    assert!(size_of::<MultiWrite>() == 24);
};
