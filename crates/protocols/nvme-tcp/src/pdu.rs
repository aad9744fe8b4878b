//! The protocol data units on the wire: "NVMe over TCP Transport 1.1", 3.6.2. All fields are little
//! endian.

use nvme::{Command, Completion};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size in bytes of a header digest or data digest.
pub const DIGEST: usize = 4;
/// Maximum offset of a PDU's data in bytes: a capsule's header and digest, with the least
/// favourable alignment, 72.
pub const MAX_DATA_OFFSET: usize = 144;
/// Size in bytes of the PDUs ICReq and ICResp ([`Initialize`]).
pub const INITIALIZE: usize = 128;
/// Size in bytes of a command capsule's header, including the command.
pub const CAPSULE: usize = 72;
/// Size in bytes of headers with a data offset, and of response capsules.
pub const SHORT: usize = 24;
/// Maximum length in bytes of a PDU that terminates a connection.
pub const MAX_TERMINATE_LEN: u32 = 152;
/// Minimum value of MAXH2CDATA in bytes.
pub const LEAST_H2C_DATA: u32 = 4096;
/// Maximum PDU data alignment (HPDA, CPDA) in dwords, zero-based.
pub const MAX_ALIGNMENT: u8 = 31;

/// Types of PDUs (field PDU-Type).
pub mod kind {
    /// Type of ICReq, Initialize Connection Request.
    pub const IC_REQ: u8 = 0x00;
    /// Type of ICResp, Initialize Connection Response.
    pub const IC_RESP: u8 = 0x01;
    /// Type of H2CTermReq, with which a host terminates a connection.
    pub const H2C_TERM_REQ: u8 = 0x02;
    /// Type of C2HTermReq, with which a controller terminates a connection.
    pub const C2H_TERM_REQ: u8 = 0x03;
    /// Type of CapsuleCmd, a command capsule.
    pub const CAPSULE_CMD: u8 = 0x04;
    /// Type of CapsuleResp, a response capsule.
    pub const CAPSULE_RESP: u8 = 0x05;
    /// Type of H2CData, data from host to controller.
    pub const H2C_DATA: u8 = 0x06;
    /// Type of C2HData, data from controller to host.
    pub const C2H_DATA: u8 = 0x07;
    /// Type of R2T, a controller's request for data (Ready to Transfer).
    pub const R2T: u8 = 0x09;
}

/// Bits of the field FLAGS in the common header.
pub mod flags {
    /// HDGSTF: a header digest follows the header.
    pub const HDGST: u8 = 1;
    /// DDGSTF: a data digest follows the data.
    pub const DDGST: u8 = 1 << 1;
    /// LAST_PDU: the last data of an R2T, or of a command.
    pub const LAST: u8 = 1 << 2;
    /// SUCCESS: the command has succeeded, and no Capsule Response follows.
    pub const SUCCESS: u8 = 1 << 3;
}

/// Bits of the field DGST in [`Initialize`].
pub mod digests {
    /// Bit HDGST_ENABLE: PDU headers have digests.
    pub const HEADER: u8 = 1;
    /// Bit DDGST_ENABLE: PDU data has digests.
    pub const DATA: u8 = 1 << 1;
}

/// Fatal Error Status of [`Terminate`] ("NVMe over TCP Transport 1.1", 3.6.2.4).
pub mod fes {
    /// Invalid PDU Header Field; the information is the offset of the field.
    pub const HEADER_FIELD: u16 = 1;
    /// Fatal error PDU Sequence Error.
    pub const SEQUENCE: u16 = 2;
    /// Header Digest Error; the information is the received digest.
    pub const HEADER_DIGEST: u16 = 3;
    /// Fatal error Data Transfer Out of Range.
    pub const OUT_OF_RANGE: u16 = 4;
    /// Fatal error R2T Limit Exceeded, or Data Transfer Limit Exceeded.
    pub const LIMIT: u16 = 5;
    /// Unsupported Parameter; the information is the offset of the parameter.
    pub const UNSUPPORTED: u16 = 6;

    /// Returns the name of a Fatal Error Status in the standard.
    pub const fn name(fes: u16) -> Option<&'static str> {
        match fes {
            HEADER_FIELD => Some("Invalid PDU Header Field"),
            SEQUENCE => Some("PDU Sequence Error"),
            HEADER_DIGEST => Some("Header Digest Error"),
            OUT_OF_RANGE => Some("Data Transfer Out of Range"),
            LIMIT => Some("R2T or Data Transfer Limit Exceeded"),
            UNSUPPORTED => Some("Unsupported Parameter"),
            _ => None,
        }
    }
}

macro_rules! wire {
    ($($(#[$meta:meta])* pub struct $name:ident = $size:literal {
        $($(#[$field_meta:meta])* pub $field:ident @ $offset:literal: $type:ty,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
        $(const _: () = assert!(core::mem::offset_of!($name, $field) == $offset);)*
    )*};
}

wire! {
    /// The first 8 bytes of every PDU.
    #[derive(Default)]
    pub struct CommonHeader = 8 {
        /// Type of the PDU ([`kind`]).
        pub kind @ 0: u8,
        /// Flags of the PDU ([`flags`]).
        pub flags @ 1: u8,
        /// Length of the header in bytes, without its digest (HLEN).
        pub hlen @ 2: u8,
        /// PDU Data Offset in bytes from the start of the PDU; 0 without data.
        pub pdo @ 3: u8,
        /// Length of the whole PDU in bytes, with digests, padding and data (PLEN).
        pub plen @ 4: U32,
    }

    /// PDU with which a connection is initialized: ICReq or ICResp.
    pub struct Initialize = 128 {
        /// Header that all PDUs have.
        pub ch @ 0: CommonHeader,
        /// Version of the PDU format (PFV), 0.
        pub pfv @ 8: U16,
        /// PDU Data Alignment that the sender requires for data it receives: dwords, zero-based, at
        /// most 31 (HPDA in the request, CPDA in the response).
        pub pda @ 10: u8,
        /// Digests that are requested or enabled ([`digests`]).
        pub dgst @ 11: u8,
        /// MAXR2T in the request: maximum number of outstanding R2Ts of a command, zero-based.
        /// MAXH2CDATA in the response: maximum data of one H2CData PDU in bytes.
        pub limit @ 12: U32,
        /// Reserved bytes, zero.
        pub reserved @ 16: [u8; 112],
    }

    /// PDU that terminates a connection (H2CTermReq or C2HTermReq); up to 128 bytes of the invalid
    /// header follow.
    pub struct Terminate = 24 {
        /// Header that all PDUs have.
        pub ch @ 0: CommonHeader,
        /// Fatal Error Status ([`fes`]).
        pub fes @ 8: U16,
        /// Fatal Error Information.
        pub fei @ 10: U32,
        /// Reserved bytes, zero.
        pub reserved @ 14: [u8; 10],
    }

    /// PDU with a command (CapsuleCmd); in-capsule data may follow.
    pub struct CapsuleCmd = 72 {
        /// Header that all PDUs have.
        pub ch @ 0: CommonHeader,
        /// Submission queue entry of the command.
        pub command @ 8: Command,
    }

    /// PDU with a completion (CapsuleResp).
    pub struct CapsuleResp = 24 {
        /// Header that all PDUs have.
        pub ch @ 0: CommonHeader,
        /// Completion queue entry of the command.
        pub completion @ 8: Completion,
    }

    /// Header of H2CData, C2HData and R2T, which describe a piece of a command's data.
    #[derive(Default)]
    pub struct DataPdu = 24 {
        /// Header that all PDUs have.
        pub ch @ 0: CommonHeader,
        /// Identifier of the command that the data belongs to (CCCID).
        pub cccid @ 8: U16,
        /// Transfer Tag that the controller has assigned to the R2T; reserved in C2HData.
        pub ttag @ 10: U16,
        /// Byte offset within the command's data (DATAO or R2TO).
        pub offset @ 12: U32,
        /// Length of the data in bytes (DATAL or R2TL).
        pub len @ 16: U32,
        /// Reserved bytes, zero.
        pub reserved @ 20: [u8; 4],
    }
}

/// Returns the offset of a PDU's data: after the header and its digest, aligned as the receiver
/// requires (`pda`, as in [`Initialize::pda`]).
pub const fn data_offset(hlen: usize, header_digest: bool, pda: u8) -> usize {
    let alignment = (pda as usize + 1) * 4;
    let behind = if header_digest { hlen + DIGEST } else { hlen };
    behind.next_multiple_of(alignment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_offset_respects_receiver_alignment() {
        assert_eq!(data_offset(CAPSULE, false, 0), 72);
        assert_eq!(data_offset(CAPSULE, true, 0), 76);
        assert_eq!(data_offset(SHORT, true, 1), 32);
        assert_eq!(data_offset(SHORT, false, 31), 128);
        assert_eq!(data_offset(CAPSULE, true, 31), 128);
        assert_eq!(data_offset(CAPSULE, true, 2), 84);
        for pda in 0..=MAX_ALIGNMENT {
            for hlen in [SHORT, CAPSULE] {
                let offset = data_offset(hlen, true, pda);
                assert!(offset <= MAX_DATA_OFFSET && offset.is_multiple_of(4));
            }
        }
        assert_eq!(data_offset(CAPSULE, true, 17), MAX_DATA_OFFSET);
    }
}
