//! The part of the kernel's ublk interface that is used (`linux/ublk_cmd.h`). Native byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Returns the ioctl number of a ublk command for any direction (`_IOR` or `_IOWR` with type
/// `'u'`): direction in bits 31:30, argument size in 29:16, type in 15:8, and number `nr`.
const fn command(direction: u32, nr: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | nr
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;
const CONTROL: usize = size_of::<CtrlCmd>();
const IO: usize = size_of::<IoCmd>();

pub(crate) const GET_DEV_INFO: u32 = command(READ, 0x02, CONTROL);
pub(crate) const ADD_DEV: u32 = command(READ_WRITE, 0x04, CONTROL);
pub(crate) const DEL_DEV: u32 = command(READ_WRITE, 0x05, CONTROL);
pub(crate) const START_DEV: u32 = command(READ_WRITE, 0x06, CONTROL);
pub(crate) const STOP_DEV: u32 = command(READ_WRITE, 0x07, CONTROL);
pub(crate) const SET_PARAMS: u32 = command(READ_WRITE, 0x08, CONTROL);
pub(crate) const GET_PARAMS: u32 = command(READ, 0x09, CONTROL);
pub(crate) const START_USER_RECOVERY: u32 = command(READ_WRITE, 0x10, CONTROL);
pub(crate) const END_USER_RECOVERY: u32 = command(READ_WRITE, 0x11, CONTROL);
pub(crate) const GET_FEATURES: u32 = command(READ, 0x13, CONTROL);
pub(crate) const UPDATE_SIZE: u32 = command(READ_WRITE, 0x15, CONTROL);

pub(crate) const FETCH_REQ: u32 = command(READ_WRITE, 0x20, IO);
pub(crate) const COMMIT_AND_FETCH_REQ: u32 = command(READ_WRITE, 0x21, IO);

/// Result of a fetch command with a request. Any other result means that no further request will
/// follow.
pub(crate) const RES_OK: i32 = 0;

/// Feature: the device waits for another server after its server has died.
pub(crate) const F_USER_RECOVERY: u64 = 1 << 3;
/// Feature: the next server repeats the unfinished requests.
pub(crate) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Feature: commands are encoded as ioctl numbers.
pub(crate) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// Feature: the size may change ([`UPDATE_SIZE`]).
pub(crate) const F_UPDATE_SIZE: u64 = 1 << 10;

/// Device state: served. The next state means waiting for another server after its server has died;
/// 0 means neither.
pub(crate) const STATE_LIVE: u16 = 1;
pub(crate) const STATE_QUIESCED: u16 = 2;

/// Maximum number of requests of a queue; the mapped descriptors have room for that many.
pub(crate) const MAX_DEPTH: u16 = 4096;

pub(crate) const OP_READ: u8 = 0;
pub(crate) const OP_WRITE: u8 = 1;
pub(crate) const OP_FLUSH: u8 = 2;
pub(crate) const OP_DISCARD: u8 = 3;
pub(crate) const OP_WRITE_ZEROES: u8 = 5;
pub(crate) const IO_F_FUA: u32 = 1 << 13;
pub(crate) const IO_F_NOUNMAP: u32 = 1 << 15;

pub(crate) const ATTR_READ_ONLY: u32 = 1 << 0;
pub(crate) const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
pub(crate) const ATTR_FUA: u32 = 1 << 3;
pub(crate) const PARAM_BASIC: u32 = 1 << 0;
pub(crate) const PARAM_DISCARD: u32 = 1 << 1;

/// Argument of a control command (`struct ublksrv_ctrl_cmd`).
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct CtrlCmd {
    pub dev_id: u32,
    /// Index of the queue; -1 if the command concerns no queue.
    pub queue_id: u16,
    /// Length of the buffer in bytes.
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    pub dev_path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}

/// Properties of a ublk device (`struct ublksrv_ctrl_dev_info`).
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct DevInfo {
    pub nr_hw_queues: u16,
    pub queue_depth: u16,
    pub state: u16,
    pub pad0: u16,
    pub max_io_buf_bytes: u32,
    pub dev_id: u32,
    pub ublksrv_pid: i32,
    pub pad1: u32,
    pub flags: u64,
    pub ublksrv_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved1: u64,
    pub reserved2: u64,
}

/// Description of a request to a ublk device (`struct ublksrv_io_desc`).
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IoDesc {
    /// Operation of the request in bits 7:0, and flags above them.
    pub op_flags: u32,
    /// Length of the request in sectors of 512 bytes.
    pub nr_sectors: u32,
    pub start_sector: u64,
    pub addr: u64,
}

/// Argument of a fetch or commit command (`struct ublksrv_io_cmd`).
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IoCmd {
    pub q_id: u16,
    pub tag: u16,
    /// Result of the request: number of bytes transferred, or a negative error number.
    pub result: i32,
    /// Address of the data buffer for the tag's next request.
    pub addr: u64,
}

/// Beginning of `struct ublk_params`, up to the last parameter that is used.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Params {
    pub len: u32,
    pub types: u32,
    pub attrs: u32,
    pub logical_bs_shift: u8,
    pub physical_bs_shift: u8,
    pub io_opt_shift: u8,
    pub io_min_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub dev_sectors: u64,
    pub virt_boundary_mask: u64,
    pub discard_alignment: u32,
    pub discard_granularity: u32,
    pub max_discard_sectors: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_discard_segments: u16,
    pub reserved0: u16,
    /// Start of the kernel's further fields, which are unset.
    pub rest: u32,
}

const _: () = {
    assert!(size_of::<CtrlCmd>() == 32);
    assert!(size_of::<DevInfo>() == 64);
    assert!(size_of::<IoDesc>() == 24);
    assert!(size_of::<IoCmd>() == 16);
    assert!(size_of::<Params>() == 64);
    assert!(ADD_DEV == 0xc020_7504);
    assert!(GET_FEATURES == 0x8020_7513);
    assert!(FETCH_REQ == 0xc010_7520);
};
