//! Wire format: header, commands, payloads, flags.
//!
//! Names and offsets are the specification's. Every type is plain data, so that an unknown value is
//! valid and not undefined behaviour. The code that uses a value interprets it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major version of the vfio-user protocol that this crate implements.
pub const VERSION_MAJOR: u16 = 0;
/// Highest minor version of the vfio-user protocol that this crate implements.
pub const VERSION_MINOR: u16 = 0;

/// Size of a message's [`Header`] in bytes.
pub const HEADER_SIZE: usize = size_of::<Header>();

/// Maximum number of descriptors in one message in either direction.
///
/// QEMU refuses a server that announces more than 16, and sends at most that many.
pub const MAX_MSG_FDS: usize = 16;

/// Maximum transfer size in bytes (`max_data_xfer_size`) that is assumed of a peer that does not
/// state it.
pub const DEFAULT_MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// Maximum number of descriptors in a message (`max_msg_fds`) that is assumed of a peer that does
/// not state it.
pub const DEFAULT_MAX_MSG_FDS: u64 = 1;

/// Maximum number of data bytes in one entry of `VFIO_USER_REGION_WRITE_MULTI`.
pub const MULTI_DATA: usize = 8;
/// Maximum number of entries of a `VFIO_USER_REGION_WRITE_MULTI`. QEMU sends 200 at most.
pub const MULTI_ENTRIES: u64 = 256;

/// Number of a vfio-user command. Unknown numbers are kept as they are.
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
    /// `VFIO_USER_MIG_DATA_READ`: reads the state of a device that migrates.
    pub const MIG_DATA_READ: Self = Self(17);
    /// `VFIO_USER_MIG_DATA_WRITE`: writes the state of a device that migrates.
    pub const MIG_DATA_WRITE: Self = Self(18);

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

/// Header of every vfio-user message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of the command, echoed in the reply; need not be unique.
    pub message_id: u16,
    /// Command of the message, which a reply repeats.
    pub command: Command,
    /// Size of the whole message in bytes, including the header.
    pub message_size: u32,
    /// Message type in bits 3:0, and the flags [`flags::NO_REPLY`] and [`flags::ERROR`].
    pub flags: u32,
    /// Error number of a reply with [`flags::ERROR`], otherwise zero.
    pub error: u32,
}

/// Bits of the header field [`Header::flags`].
pub mod flags {
    /// Mask of the message type in the flags of a header.
    pub const TYPE_MASK: u32 = 0xf;
    /// Message type of a command.
    pub const COMMAND: u32 = 0;
    /// Message type of a reply.
    pub const REPLY: u32 = 1;
    /// Flag of a command for which no reply is requested.
    pub const NO_REPLY: u32 = 1 << 4;
    /// Flag of a reply: the command has failed, and there is no payload.
    pub const ERROR: u32 = 1 << 5;
}

/// Fixed part of a `VFIO_USER_VERSION` message; JSON text that ends with NUL follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Version {
    /// Major version of the protocol that the sender supports.
    pub major: u16,
    /// Minor version of the protocol that the sender supports.
    pub minor: u16,
}

/// Payload of `VFIO_USER_DMA_MAP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure in bytes.
    pub argsz: u32,
    /// Access of the device: [`dma::READ`], [`dma::WRITE`].
    pub flags: u32,
    /// Byte offset of the range in the descriptor's file.
    pub offset: u64,
    /// First guest address (IOVA) of the range.
    pub address: u64,
    /// Length of the range in bytes.
    pub size: u64,
}

/// Payload of `VFIO_USER_DMA_UNMAP` and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaUnmap {
    /// Maximum size in bytes of the reply's payload.
    pub argsz: u32,
    /// Flags of the request: [`dma::UNMAP_DIRTY_BITMAP`], [`dma::UNMAP_ALL`].
    pub flags: u32,
    /// First guest address (IOVA) of the range.
    pub address: u64,
    /// Length of the range in bytes; in the reply, total length of the removed mappings.
    pub size: u64,
}

/// Flags of the payloads `DmaMap` and `DmaUnmap` (`<linux/vfio.h>`).
pub mod dma {
    /// Flag of `DmaMap`: the device may read the memory.
    pub const READ: u32 = 1 << 0;
    /// Flag of `DmaMap`: the device may write the memory.
    pub const WRITE: u32 = 1 << 1;
    /// Flag of `DmaUnmap`: the reply has to contain a bitmap of dirty pages.
    pub const UNMAP_DIRTY_BITMAP: u32 = 1 << 0;
    /// Flag of `DmaUnmap`: all mappings are removed; address and size are zero.
    pub const UNMAP_ALL: u32 = 1 << 1;
}

/// Payload of `VFIO_USER_DEVICE_GET_INFO` and of its reply (`struct vfio_device_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct DeviceInfo {
    /// Size in bytes of the payload that the request allows, or that the reply needs.
    pub argsz: u32,
    /// Properties of the device: [`device::RESET`], [`device::PCI`].
    pub flags: u32,
    /// Number of regions of the device.
    pub num_regions: u32,
    /// Number of interrupt types of the device.
    pub num_irqs: u32,
}

/// Flags of the payload `DeviceInfo` (`<linux/vfio.h>`).
pub mod device {
    /// Flag of `DeviceInfo`: the device can be reset.
    pub const RESET: u32 = 1 << 0;
    /// Flag of `DeviceInfo`: the device is a PCI device.
    pub const PCI: u32 = 1 << 1;
}

/// Payload of `VFIO_USER_DEVICE_GET_REGION_INFO` and of its reply (`struct vfio_region_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct RegionInfo {
    /// Size in bytes of the payload that the request allows, or that the reply needs.
    pub argsz: u32,
    /// Properties of the region, see [`region`].
    pub flags: u32,
    /// Index of the region.
    pub index: u32,
    /// Byte offset of the first capability from the start of this structure; 0 for none.
    pub cap_offset: u32,
    /// Size of the region in bytes; 0 for a region that does not exist.
    pub size: u64,
    /// Offset to pass to mmap for the region's first byte.
    pub offset: u64,
}

/// Flags of the payload `RegionInfo` (`<linux/vfio.h>`).
pub mod region {
    /// Flag of `RegionInfo`: the region can be read.
    pub const READ: u32 = 1 << 0;
    /// Flag of `RegionInfo`: the region can be written.
    pub const WRITE: u32 = 1 << 1;
    /// Flag of `RegionInfo`: the region, or the areas of its sparse-mmap capability, can be
    /// mapped.
    pub const MMAP: u32 = 1 << 2;
    /// Flag of `RegionInfo`: capabilities follow the structure.
    pub const CAPS: u32 = 1 << 3;
}

/// Header of a capability in a region information reply (`struct vfio_info_cap_header`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CapHeader {
    /// Type of the capability: [`CAP_SPARSE_MMAP`] or another.
    pub id: u16,
    /// Version of the capability's format.
    pub version: u16,
    /// Byte offset of the next capability from the start of `RegionInfo`; 0 after the last.
    pub next: u32,
}

/// Capability ID of the list of areas that can be mapped (`VFIO_REGION_INFO_CAP_SPARSE_MMAP`).
pub const CAP_SPARSE_MMAP: u16 = 1;

/// Fixed part of the sparse-mmap capability after its [`CapHeader`]; [`SparseArea`]s follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SparseMmap {
    /// Number of areas that follow.
    pub nr_areas: u32,
    /// Reserved field, zero.
    pub reserved: u32,
}

/// Area of a region that can be mapped (`struct vfio_region_sparse_mmap_area`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SparseArea {
    /// Byte offset of the area in the region.
    pub offset: u64,
    /// Length of the area in bytes.
    pub size: u64,
}

/// Payload of `VFIO_USER_DEVICE_GET_IRQ_INFO` and of its reply (`struct vfio_irq_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct IrqInfo {
    /// Size in bytes of the payload that the request allows, or that the reply needs.
    pub argsz: u32,
    /// Properties of the interrupts, see [`irq`].
    pub flags: u32,
    /// Number of the interrupt type.
    pub index: u32,
    /// Number of interrupts of the type.
    pub count: u32,
}

/// Flags of the payload `IrqInfo` (`<linux/vfio.h>`).
pub mod irq {
    /// Flag of `IrqInfo`: an eventfd signals the interrupts.
    pub const EVENTFD: u32 = 1 << 0;
    /// Flag of `IrqInfo`: the interrupts can be masked and unmasked.
    pub const MASKABLE: u32 = 1 << 1;
    /// Flag of `IrqInfo`: an interrupt is masked automatically when it is triggered.
    pub const AUTOMASKED: u32 = 1 << 2;
    /// Flag of `IrqInfo`: all interrupts of the type must be set up together.
    pub const NORESIZE: u32 = 1 << 3;
}

/// Fixed part of `VFIO_USER_DEVICE_SET_IRQS` (`struct vfio_irq_set`); an array of
/// boolean bytes may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IrqSet {
    /// Size of the payload in bytes.
    pub argsz: u32,
    /// Flags of the request: one for the data and one for the action, see [`irq_set`].
    pub flags: u32,
    /// Number of the interrupt type.
    pub index: u32,
    /// Number of the first interrupt.
    pub start: u32,
    /// Number of interrupts from `start` on.
    pub count: u32,
}

/// Flags of the payload `IrqSet` (`<linux/vfio.h>`).
pub mod irq_set {
    /// Data flag of `IrqSet`: no data, so all interrupts of the range are selected.
    pub const DATA_NONE: u32 = 1 << 0;
    /// Data flag of `IrqSet`: a byte for each interrupt; a nonzero byte selects it.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// Data flag of `IrqSet`: a descriptor for each interrupt, or none to remove the eventfds.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Action flag of `IrqSet`: mask the interrupts.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// Action flag of `IrqSet`: unmask the interrupts.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// Action flag of `IrqSet`: trigger the interrupts, or assign their eventfds.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// Mask of all data flags of `IrqSet`.
    pub const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    /// Mask of all action flags of `IrqSet`.
    pub const ACTION_BITS: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;
}

/// Fixed part of `VFIO_USER_REGION_READ`, `VFIO_USER_REGION_WRITE` and their
/// replies; data may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegionAccess {
    /// Byte offset of the access in the region.
    pub offset: u64,
    /// Index of the region.
    pub region: u32,
    /// Number of bytes to access.
    pub count: u32,
}

/// An entry of `VFIO_USER_REGION_WRITE_MULTI`, which begins with the number of entries as a u64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MultiWrite {
    /// Byte offset of the write in the region.
    pub offset: u64,
    /// Index of the region.
    pub region: u32,
    /// Number of bytes to write, 1 to 8.
    pub count: u32,
    /// Bytes to write; those after `count` are ignored.
    pub data: [u8; MULTI_DATA],
}

/// Fixed part of `VFIO_USER_DEVICE_FEATURE` and of its reply (`struct vfio_device_feature`); the
/// value of the feature follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DeviceFeature {
    /// Size in bytes of the payload that the request allows, or that the reply has.
    pub argsz: u32,
    /// Number of the feature, and the operation, see [`feature`].
    pub flags: u32,
}

/// Flags and numbers of the payload `DeviceFeature` (`<linux/vfio.h>`).
pub mod feature {
    /// Mask of the feature's number in the flags.
    pub const MASK: u32 = 0xffff;
    /// Operation: return the value of the feature.
    pub const GET: u32 = 1 << 16;
    /// Operation: set the value of the feature.
    pub const SET: u32 = 1 << 17;
    /// Flag: only tell whether the feature and the other operations are supported.
    pub const PROBE: u32 = 1 << 18;
    /// Feature: kind of migration, as a u64 of flags, see [`super::migration`].
    pub const MIGRATION: u32 = 1;
    /// Feature: migration state, as a [`super::MigState`].
    pub const MIG_DEVICE_STATE: u32 = 2;
    /// Feature: begin of the log of written pages, with a [`super::DmaLoggingControl`].
    pub const DMA_LOGGING_START: u32 = 6;
    /// Feature: end of the log of written pages.
    pub const DMA_LOGGING_STOP: u32 = 7;
    /// Feature: pages in the log, by [`super::DmaLoggingReport`].
    pub const DMA_LOGGING_REPORT: u32 = 8;
}

/// Flags of the feature [`feature::MIGRATION`].
pub mod migration {
    /// The states STOP, STOP_COPY and RESUMING are supported.
    pub const STOP_COPY: u64 = 1 << 0;
}

/// Value of the feature [`feature::MIG_DEVICE_STATE`] (`struct vfio_device_feature_mig_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MigState {
    /// Number of the state (`enum vfio_device_mig_state`).
    pub device_state: u32,
    /// Unused in vfio-user, where messages transfer the state.
    pub data_fd: i32,
}

/// Value of the feature [`feature::DMA_LOGGING_START`]; [`DmaLoggingRange`]s follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaLoggingControl {
    /// Wanted page size in bytes; in the reply, the selected one.
    pub page_size: u64,
    /// Number of ranges that follow.
    pub num_ranges: u32,
    /// Reserved field, zero.
    pub reserved: u32,
}

/// Range of addresses in which written pages are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaLoggingRange {
    /// First address (IOVA) of the range.
    pub iova: u64,
    /// Length of the range in bytes.
    pub length: u64,
}

/// Value of the feature [`feature::DMA_LOGGING_REPORT`]; in the reply, a bitmap of u64 follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaLoggingReport {
    /// First address (IOVA) of the range.
    pub iova: u64,
    /// Length of the range in bytes.
    pub length: u64,
    /// Number of bytes that each bit stands for.
    pub page_size: u64,
}

/// Fixed part of `VFIO_USER_MIG_DATA_READ`, `VFIO_USER_MIG_DATA_WRITE` and their replies; data may
/// follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MigData {
    /// Size in bytes of this structure and the data.
    pub argsz: u32,
    /// Number of bytes to transfer.
    pub size: u32,
}

const _: () = {
    assert!(size_of::<DeviceFeature>() == 8);
    assert!(size_of::<MigState>() == 8);
    assert!(size_of::<DmaLoggingControl>() == 16);
    assert!(size_of::<DmaLoggingRange>() == 16);
    assert!(size_of::<DmaLoggingReport>() == 24);
    assert!(size_of::<MigData>() == 8);
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
