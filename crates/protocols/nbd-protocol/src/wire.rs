//! Constants of the NBD protocol (doc/proto.md of the NBD project). All fields are big-endian.

/// First magic number of the handshake, which every NBD server sends (NBDMAGIC).
pub const INIT_PASSWD: [u8; 8] = *b"NBDMAGIC";
/// Second magic number of the newstyle handshake (IHAVEOPT), which also precedes each option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Second magic number of the oldstyle handshake, which is not supported.
pub const OLDSTYLE: u64 = 0x0000_4202_8186_1253;
/// Magic number of a server's reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Magic number of a request to the server.
pub const REQUEST: u32 = 0x2560_9513;
/// Magic number of a simple reply to a request.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Magic number of a chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Handshake flags of the server.
pub mod handshake_flags {
    /// Handshake flag NBD_FLAG_FIXED_NEWSTYLE: the server answers unknown options.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// Handshake flag NBD_FLAG_NO_ZEROES: no padding follows NBD_OPT_EXPORT_NAME.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Transmission flags of an export.
pub mod export_flags {
    /// Transmission flag NBD_FLAG_HAS_FLAGS, which is always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Transmission flag NBD_FLAG_READ_ONLY: the export refuses writes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Transmission flag NBD_FLAG_SEND_FLUSH: the export supports NBD_CMD_FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Transmission flag NBD_FLAG_SEND_FUA: the export supports NBD_CMD_FLAG_FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Transmission flag NBD_FLAG_SEND_TRIM: the export supports NBD_CMD_TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Transmission flag NBD_FLAG_SEND_WRITE_ZEROES: the export supports NBD_CMD_WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Transmission flag NBD_FLAG_CAN_MULTI_CONN: a flush on one connection covers all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Options that a client sends during the handshake.
pub mod option {
    /// Handshake option NBD_OPT_EXPORT_NAME, which selects an export and ends the handshake.
    pub const EXPORT_NAME: u32 = 1;
    /// Handshake option NBD_OPT_ABORT, which ends the connection.
    pub const ABORT: u32 = 2;
    /// Handshake option NBD_OPT_LIST, which asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Handshake option NBD_OPT_INFO, which asks for the properties of an export.
    pub const INFO: u32 = 6;
    /// Handshake option NBD_OPT_GO, which selects an export and reports errors.
    pub const GO: u32 = 7;
    /// Handshake option NBD_OPT_STRUCTURED_REPLY, which enables structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Handshake option NBD_OPT_LIST_META_CONTEXT, which asks for metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Handshake option NBD_OPT_SET_META_CONTEXT, which selects metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of a server's replies to handshake options.
pub mod option_reply {
    /// Reply type NBD_REP_ACK: the option has succeeded.
    pub const ACK: u32 = 1;
    /// Reply type NBD_REP_SERVER: the name of an export.
    pub const SERVER: u32 = 2;
    /// Reply type NBD_REP_INFO: information about the export.
    pub const INFO: u32 = 3;
    /// Reply type NBD_REP_META_CONTEXT: a metadata context of the export.
    pub const META_CONTEXT: u32 = 4;
    /// Bit that is set in the types of all error replies.
    pub const ERROR: u32 = 1 << 31;
    /// Error reply NBD_REP_ERR_UNSUP: the server does not know the option.
    pub const UNSUPPORTED: u32 = ERROR | 1;
    /// Error reply NBD_REP_ERR_POLICY: the server's configuration forbids the option.
    pub const POLICY: u32 = ERROR | 2;
    /// Error reply NBD_REP_ERR_INVALID: the option's data is malformed.
    pub const INVALID: u32 = ERROR | 3;
    /// Error reply NBD_REP_ERR_TLS_REQD: the server requires TLS.
    pub const TLS_REQUIRED: u32 = ERROR | 5;
    /// Error reply NBD_REP_ERR_UNKNOWN: the export does not exist.
    pub const UNKNOWN: u32 = ERROR | 6;
}

/// Types of information in a reply NBD_REP_INFO.
pub mod info {
    /// Information type NBD_INFO_EXPORT: size and transmission flags of the export.
    pub const EXPORT: u16 = 0;
    /// Information type NBD_INFO_NAME: the export's canonical name.
    pub const NAME: u16 = 1;
    /// Information type NBD_INFO_DESCRIPTION: a description of the export for people.
    pub const DESCRIPTION: u16 = 2;
    /// Information type NBD_INFO_BLOCK_SIZE: minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands of the transmission phase, and command flags.
pub mod command {
    /// Command NBD_CMD_READ.
    pub const READ: u16 = 0;
    /// Command NBD_CMD_WRITE.
    pub const WRITE: u16 = 1;
    /// Command NBD_CMD_DISC, which ends the connection.
    pub const DISCONNECT: u16 = 2;
    /// Command NBD_CMD_FLUSH.
    pub const FLUSH: u16 = 3;
    /// Command NBD_CMD_TRIM, which deallocates a range.
    pub const TRIM: u16 = 4;
    /// Command NBD_CMD_WRITE_ZEROES.
    pub const WRITE_ZEROES: u16 = 6;
    /// Command NBD_CMD_BLOCK_STATUS, which asks for the state of a range in the metadata contexts.
    pub const BLOCK_STATUS: u16 = 7;
    /// Command flag NBD_CMD_FLAG_FUA: the changes are durable before the reply.
    pub const FUA: u16 = 1;
    /// Command flag NBD_CMD_FLAG_NO_HOLE: a zeroed range stays allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Command flag NBD_CMD_FLAG_REQ_ONE: the reply has one extent for each metadata context.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Flags of an extent in the metadata context `base:allocation`.
pub mod allocation {
    /// Name of the metadata context.
    pub const CONTEXT: &str = "base:allocation";
    /// NBD_STATE_HOLE: no storage is allocated for the extent.
    pub const HOLE: u32 = 1;
    /// NBD_STATE_ZERO: the extent reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Chunk types and chunk flags of structured replies.
pub mod chunk {
    /// Chunk flag NBD_REPLY_FLAG_DONE: the chunk is the last of its reply.
    pub const DONE: u16 = 1;
    /// Chunk type NBD_REPLY_TYPE_NONE: no content, only the end of the reply.
    pub const NONE: u16 = 0;
    /// Chunk type NBD_REPLY_TYPE_OFFSET_DATA: data of a read.
    pub const OFFSET_DATA: u16 = 1;
    /// Chunk type NBD_REPLY_TYPE_OFFSET_HOLE: a range of zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Chunk type NBD_REPLY_TYPE_BLOCK_STATUS: extents in a metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Chunk type NBD_REPLY_TYPE_ERROR: the request has failed.
    pub const REQUEST_ERROR: u16 = ERROR | 1;
    /// Bit that is set in all chunk types for errors.
    pub const ERROR: u16 = 1 << 15;
}

/// Error code NBD_EPERM: the export is read-only.
pub const EPERM: u32 = 1;
/// Error code NBD_EIO: the storage has failed.
pub const EIO: u32 = 5;
/// Error code NBD_ENOMEM: the server has too little memory.
pub const ENOMEM: i32 = 12;
/// Error code NBD_EINVAL: the request is invalid.
pub const EINVAL: i32 = 22;
/// Error code NBD_ENOSPC: the storage is full.
pub const ENOSPC: u32 = 28;
/// Error code NBD_EOVERFLOW: the reply would be too large.
pub const EOVERFLOW: i32 = 75;
/// Error code NBD_ENOTSUP: the request is valid but not supported.
pub const ENOTSUP: u32 = 95;
/// Error code NBD_ESHUTDOWN, which a server sends while it shuts down.
pub const ESHUTDOWN: u32 = 108;

/// Returns the big-endian 16-bit number at byte offset `at`; `None` beyond the end.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*bytes))
}

/// Returns the big-endian 32-bit number at byte offset `at`; `None` beyond the end.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*bytes))
}

/// Returns the big-endian 64-bit number at byte offset `at`; `None` beyond the end.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_be_bytes(*bytes))
}
