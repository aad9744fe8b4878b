//! The words of the vhost-user protocol ("Vhost-user Protocol", QEMU interoperability specification): a header, a payload
//! of fixed layout, descriptors beside it. Fields are in the host's byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Largest payload that is taken. The largest that anyone sends is a memory table.
pub(crate) const MAX_PAYLOAD: usize = 4096;
/// Most descriptors that one message carries.
pub(crate) const MAX_FDS: usize = 32;
/// Most regions in one SET_MEM_TABLE: one descriptor each.
pub(crate) const MAX_TABLE: usize = MAX_FDS;
/// Memory slots offered with CONFIGURE_MEM_SLOTS.
pub(crate) const MAX_SLOTS: usize = 128;

/// Header flags.
pub(crate) mod flags {
    pub(crate) const VERSION_MASK: u32 = 0x3;
    pub(crate) const VERSION: u32 = 0x1;
    pub(crate) const REPLY: u32 = 0x4;
    pub(crate) const NEED_REPLY: u32 = 0x8;
}

/// Protocol feature bits ("Protocol features").
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    pub(crate) const ALL: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS;
}

/// Requests from the front-end ("Front-end message types").
pub(crate) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
}

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, the one request that goes to the front-end.
pub(crate) const BACKEND_CONFIG_CHANGE: u32 = 2;

/// In the payload of SET_VRING_KICK, CALL and ERR: the ring's index, and "no descriptor".
pub(crate) const VRING_INDEX_MASK: u64 = 0xff;
pub(crate) const VRING_NOFD: u64 = 0x100;

/// Message header.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) request: u32,
    pub(crate) flags: u32,
    /// Bytes of payload.
    pub(crate) size: u32,
}

pub(crate) const HEADER_SIZE: usize = size_of::<Header>();

/// "Vring state": an index and a number.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct VringState {
    pub(crate) index: u32,
    pub(crate) num: u32,
}

/// "Vring address": addresses are the front-end's own virtual ones.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct VringAddr {
    pub(crate) index: u32,
    pub(crate) flags: u32,
    pub(crate) descriptor: u64,
    pub(crate) used: u64,
    pub(crate) available: u64,
    pub(crate) log: u64,
}

/// "Memory region".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Region {
    pub(crate) guest_address: u64,
    pub(crate) size: u64,
    pub(crate) user_address: u64,
    pub(crate) mmap_offset: u64,
}

/// Before the regions of SET_MEM_TABLE.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct TableHeader {
    pub(crate) regions: u32,
    pub(crate) padding: u32,
}

/// "Single memory region description".
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SingleRegion {
    pub(crate) padding: u64,
    pub(crate) region: Region,
}

/// Before the bytes of GET_CONFIG and SET_CONFIG.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ConfigHeader {
    pub(crate) offset: u32,
    pub(crate) size: u32,
    pub(crate) flags: u32,
}

/// "Inflight description". QEMU sends four bytes of padding after it, others do not.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InflightDescription {
    pub(crate) mmap_size: u64,
    pub(crate) mmap_offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) padding: [u8; 4],
}

/// Size of the description without its padding.
pub(crate) const INFLIGHT_SIZE: usize = 20;

/// Takes a payload of exactly this layout.
pub(crate) fn exactly<T: FromBytes>(payload: &[u8]) -> Option<T> {
    T::read_from_bytes(payload).ok()
}

/// Takes a payload that begins with this layout, and what follows it.
pub(crate) fn prefix<T: FromBytes>(payload: &[u8]) -> Option<(T, &[u8])> {
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
