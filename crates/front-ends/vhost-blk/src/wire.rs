//! Messages of the vhost-user protocol ("Vhost-user Protocol", QEMU interoperability
//! specification): a header, a payload of fixed layout, and descriptors. Fields are in the host's
//! byte order. Used by both ends: the server here, and front-ends that generate load.
#![allow(missing_docs)] // Names and meanings are the specification's.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum length in bytes of an accepted payload. The longest one in use is a memory table.
pub const MAX_PAYLOAD: usize = 4096;
/// Maximum number of descriptors in one message.
pub const MAX_FDS: usize = 32;
/// Maximum number of regions in one SET_MEM_TABLE message, which has a descriptor for each.
pub const MAX_TABLE: usize = MAX_FDS;
/// Number of memory slots that the back-end offers (CONFIGURE_MEM_SLOTS).
pub const MAX_SLOTS: usize = 128;

/// Flags of a vhost-user message header.
pub mod flags {
    pub const VERSION_MASK: u32 = 0x3;
    pub const VERSION: u32 = 0x1;
    pub const REPLY: u32 = 0x4;
    pub const NEED_REPLY: u32 = 0x8;
}

/// vhost-user protocol feature bits.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// Features of every disk.
    pub const ALL: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS;
}

/// Requests that a front-end sends ("Front-end message types").
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Request VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, the only one that is sent to a front-end.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

/// Mask of the ring index in the payload of SET_VRING_KICK, CALL and ERR.
pub const VRING_INDEX_MASK: u64 = 0xff;
pub const VRING_NOFD: u64 = 0x100;

/// Header of a vhost-user message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    pub request: u32,
    pub flags: u32,
    /// Length of the payload in bytes.
    pub size: u32,
}

pub const HEADER_SIZE: usize = size_of::<Header>();

/// Payload "vring state": index of a queue, and a number.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    pub index: u32,
    pub num: u32,
}

/// Payload "vring address": addresses of a queue's parts, in the front-end's address space.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    pub index: u32,
    pub flags: u32,
    pub descriptor: u64,
    pub used: u64,
    pub available: u64,
    pub log: u64,
}

/// Flag VHOST_VRING_F_LOG of SET_VRING_ADDR: writes to the used ring are logged.
pub const VRING_LOG: u32 = 1;

/// Payload "log description" of SET_LOG_BASE: the bitmap of dirty pages in a file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogDescription {
    pub mmap_size: u64,
    pub mmap_offset: u64,
}

/// Description of a memory region ("Memory region").
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Region {
    pub guest_address: u64,
    pub size: u64,
    pub user_address: u64,
    pub mmap_offset: u64,
}

impl Region {
    /// Returns the required length of the region's file. `None` if the numbers overflow, or those
    /// of the front-end's addresses, by which rings are looked up.
    pub(crate) fn file_end(&self) -> Option<u64> {
        self.user_address.checked_add(self.size)?;
        self.mmap_offset.checked_add(self.size)
    }
}

/// Header of a SET_MEM_TABLE payload, before the regions.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TableHeader {
    pub regions: u32,
    pub padding: u32,
}

/// Payload of ADD_MEM_REG and REM_MEM_REG ("Single memory region description").
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    pub padding: u64,
    pub region: Region,
}

/// Header of a GET_CONFIG or SET_CONFIG payload, before the bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    pub offset: u32,
    pub size: u32,
    pub flags: u32,
}

/// Payload "Inflight description". QEMU sends four bytes of padding after it; other front-ends do
/// not.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightDescription {
    pub mmap_size: u64,
    pub mmap_offset: u64,
    pub queues: u16,
    pub queue_size: u16,
    pub padding: [u8; 4],
}

/// Size in bytes of an inflight description without its padding.
pub const INFLIGHT_SIZE: usize = 20;

/// Parses a payload that has exactly the layout of `T`.
pub fn exactly<T: FromBytes>(payload: &[u8]) -> Option<T> {
    T::read_from_bytes(payload).ok()
}

/// Parses a payload that begins with the layout of `T`. Returns it and the remaining bytes.
pub fn prefix<T: FromBytes>(payload: &[u8]) -> Option<(T, &[u8])> {
    T::read_from_prefix(payload).ok()
}

const _: () = {
    assert!(HEADER_SIZE == 12);
    assert!(size_of::<VringAddr>() == 40);
    assert!(size_of::<Region>() == 32);
    assert!(size_of::<SingleRegion>() == 40);
    assert!(size_of::<ConfigHeader>() == 12);
    assert!(size_of::<InflightDescription>() == 24);
};
