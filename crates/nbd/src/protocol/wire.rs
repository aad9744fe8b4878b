//! Constants of the NBD protocol (doc/proto.md of the NBD project). All fields are big-endian.

/// Magic number that every server sends first (NBDMAGIC).
pub const INIT_PASSWD: [u8; 8] = *b"NBDMAGIC";
/// Magic number of the newstyle handshake ("IHAVEOPT"), which also precedes each option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Magic number of the oldstyle handshake.
pub const OLDSTYLE: u64 = 0x0000_4202_8186_1253;
/// Magic number of a reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Magic number of a request.
pub const REQUEST: u32 = 0x2560_9513;
/// Magic number of a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Magic number of a chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Handshake flags of the server.
pub mod handshake_flags {
    /// NBD_FLAG_FIXED_NEWSTYLE.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// NBD_FLAG_NO_ZEROES.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Transmission flags of an export.
pub mod export_flags {
    /// NBD_FLAG_HAS_FLAGS.
    pub const HAS_FLAGS: u16 = 1;
    /// NBD_FLAG_READ_ONLY.
    pub const READ_ONLY: u16 = 1 << 1;
    /// NBD_FLAG_SEND_FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// NBD_FLAG_SEND_FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// NBD_FLAG_SEND_TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// NBD_FLAG_SEND_WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// NBD_FLAG_CAN_MULTI_CONN.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Options of the handshake.
pub mod option {
    /// NBD_OPT_EXPORT_NAME.
    pub const EXPORT_NAME: u32 = 1;
    /// NBD_OPT_GO.
    pub const GO: u32 = 7;
    /// NBD_OPT_STRUCTURED_REPLY.
    pub const STRUCTURED_REPLY: u32 = 8;
}

/// Types of replies to options.
pub mod option_reply {
    /// NBD_REP_ACK.
    pub const ACK: u32 = 1;
    /// NBD_REP_INFO.
    pub const INFO: u32 = 3;
    /// Bit that is set in all error replies.
    pub const ERROR: u32 = 1 << 31;
    /// NBD_REP_ERR_UNSUP.
    pub const UNSUPPORTED: u32 = ERROR | 1;
    /// NBD_REP_ERR_POLICY.
    pub const POLICY: u32 = ERROR | 2;
    /// NBD_REP_ERR_TLS_REQD.
    pub const TLS_REQUIRED: u32 = ERROR | 5;
    /// NBD_REP_ERR_UNKNOWN.
    pub const UNKNOWN: u32 = ERROR | 6;
    /// NBD_REP_ERR_SHUTDOWN.
    pub const SHUTDOWN: u32 = ERROR | 7;
}

/// Information types of NBD_REP_INFO.
pub mod info {
    /// NBD_INFO_EXPORT.
    pub const EXPORT: u16 = 0;
    /// NBD_INFO_BLOCK_SIZE.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands and command flags.
pub mod command {
    /// NBD_CMD_READ.
    pub const READ: u16 = 0;
    /// NBD_CMD_WRITE.
    pub const WRITE: u16 = 1;
    /// NBD_CMD_DISC.
    pub const DISCONNECT: u16 = 2;
    /// NBD_CMD_FLUSH.
    pub const FLUSH: u16 = 3;
    /// NBD_CMD_TRIM.
    pub const TRIM: u16 = 4;
    /// NBD_CMD_WRITE_ZEROES.
    pub const WRITE_ZEROES: u16 = 6;
    /// NBD_CMD_FLAG_FUA.
    pub const FUA: u16 = 1;
    /// NBD_CMD_FLAG_NO_HOLE.
    pub const NO_HOLE: u16 = 1 << 1;
}

/// Chunk types and flags of structured replies.
pub mod chunk {
    /// NBD_REPLY_FLAG_DONE.
    pub const DONE: u16 = 1;
    /// NBD_REPLY_TYPE_NONE.
    pub const NONE: u16 = 0;
    /// NBD_REPLY_TYPE_OFFSET_DATA.
    pub const OFFSET_DATA: u16 = 1;
    /// NBD_REPLY_TYPE_OFFSET_HOLE.
    pub const OFFSET_HOLE: u16 = 2;
    /// Bit that is set in all error chunk types.
    pub const ERROR: u16 = 1 << 15;
}

/// NBD_ENOMEM.
pub const ENOMEM: i32 = 12;
/// NBD_EINVAL.
pub const EINVAL: i32 = 22;
/// NBD_EOVERFLOW.
pub const EOVERFLOW: i32 = 75;
/// NBD_ESHUTDOWN, the error that a server sends while it shuts down.
pub const ESHUTDOWN: u32 = 108;

/// Returns the big-endian number at an offset; `None` beyond the end.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*bytes))
}

/// Returns the big-endian number at an offset; `None` beyond the end.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*bytes))
}

/// Returns the big-endian number at an offset; `None` beyond the end.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_be_bytes(*bytes))
}
