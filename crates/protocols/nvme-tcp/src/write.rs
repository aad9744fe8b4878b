//! Encoding of PDUs: headers with digest and padding. The sender appends the data and its digest.

use crate::digest::crc32c;
use crate::initialize::ConnectionLimits;
use crate::pdu::{
    CAPSULE, CapsuleCmd, CapsuleResp, CommonHeader, DIGEST, DataPdu, MAX_DATA_OFFSET, SHORT,
    Terminate, data_offset, flags, kind,
};
use crate::violation::{Terminated, Violation};
use nvme::{Command, Completion};
use std::ops::Deref;
use zerocopy::IntoBytes;

/// Bytes of a PDU's header, up to the PDU's data.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    bytes: [u8; MAX_DATA_OFFSET],
    len: usize,
}

impl Deref for Header {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// Encoder of PDU headers for a connection with negotiated digests and alignment.
#[derive(Debug, Clone, Copy)]
pub struct Writer {
    limits: ConnectionLimits,
}

impl Writer {
    /// Creates the encoder of a connection with these negotiated parameters.
    pub const fn new(limits: ConnectionLimits) -> Self {
        Self { limits }
    }

    /// Returns the negotiated parameters of the connection.
    pub const fn limits(&self) -> &ConnectionLimits {
        &self.limits
    }

    /// Returns whether a data digest follows the data of PDUs.
    pub const fn data_digest(&self) -> bool {
        self.limits.data_digest
    }

    /// Encodes a command capsule's header; `data` bytes of in-capsule data must follow.
    pub fn command(&self, command: &Command, data: u32) -> Header {
        let pdu = CapsuleCmd {
            ch: self.common(kind::CAPSULE_CMD, CAPSULE, 0, data),
            command: *command,
        };
        self.header(pdu.as_bytes(), data)
    }

    /// Encodes the header of an H2CData PDU, which answers an R2T. `last`: this data completes it.
    pub fn h2c_data(&self, cid: u16, tag: u16, at: u32, len: u32, last: bool) -> Header {
        let flags = if last { flags::LAST } else { 0 };
        self.piece(kind::H2C_DATA, flags, (cid, tag), (at, len), len)
    }

    /// Encodes a response capsule.
    pub fn completion(&self, completion: &Completion) -> Header {
        let pdu = CapsuleResp {
            ch: self.common(kind::CAPSULE_RESP, SHORT, 0, 0),
            completion: *completion,
        };
        self.header(pdu.as_bytes(), 0)
    }

    /// Encodes the header of a C2HData PDU. `last`: this data is the command's last. `success`: the
    /// command succeeds without a response capsule.
    pub fn c2h_data(&self, cid: u16, at: u32, len: u32, last: bool, success: bool) -> Header {
        let last = if last { flags::LAST } else { 0 };
        let flags = last | if success { flags::SUCCESS } else { 0 };
        self.piece(kind::C2H_DATA, flags, (cid, 0), (at, len), len)
    }

    /// Encodes a request to transfer (R2T).
    pub fn r2t(&self, cid: u16, tag: u16, at: u32, len: u32) -> Header {
        self.piece(kind::R2T, 0, (cid, tag), (at, len), 0)
    }

    fn piece(
        &self,
        kind: u8,
        flags: u8,
        (cid, tag): (u16, u16),
        (at, len): (u32, u32),
        data: u32,
    ) -> Header {
        let pdu = DataPdu {
            ch: self.common(kind, SHORT, flags, data),
            cccid: cid.into(),
            ttag: tag.into(),
            offset: at.into(),
            len: len.into(),
            reserved: [0; 4],
        };
        self.header(pdu.as_bytes(), data)
    }

    fn common(&self, kind: u8, hlen: usize, flags: u8, data: u32) -> CommonHeader {
        let ConnectionLimits {
            header_digest,
            data_digest,
            alignment,
            ..
        } = self.limits;
        let has_digest = data > 0 && data_digest;
        let offset = match data {
            0 if header_digest => hlen + DIGEST,
            0 => hlen,
            _ => data_offset(hlen, header_digest, alignment),
        };
        let digest = if has_digest { DIGEST as u32 } else { 0 };
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        CommonHeader {
            kind,
            flags: flags | flag(header_digest, flags::HDGST) | flag(has_digest, flags::DDGST),
            // At most 72 and 128.
            hlen: hlen as u8,
            pdo: if data == 0 { 0 } else { offset as u8 },
            plen: (offset as u32)
                .saturating_add(data)
                .saturating_add(digest)
                .into(),
        }
    }

    #[inline]
    fn header(&self, header: &[u8], data: u32) -> Header {
        let ConnectionLimits {
            header_digest,
            alignment,
            ..
        } = self.limits;
        let mut bytes = [0; MAX_DATA_OFFSET];
        let mut len = put(&mut bytes, 0, header);
        if header_digest {
            len = put(&mut bytes, len, &crc32c(header).to_le_bytes());
        }
        if data > 0 {
            len = data_offset(header.len(), header_digest, alignment);
        }
        Header { bytes, len }
    }
}

/// Copies `from` into `bytes` from index `at` on, if there is room. Returns the index of its end.
#[inline]
fn put(bytes: &mut [u8; MAX_DATA_OFFSET], at: usize, from: &[u8]) -> usize {
    let end = at + from.len();
    if let Some(to) = bytes.get_mut(at..end) {
        to.copy_from_slice(from);
    }
    end
}

/// Encodes the PDU that terminates the connection after a violation, with the reason. `from_host`:
/// this side is the host.
pub(crate) fn terminate(from_host: bool, why: Terminated) -> Header {
    let kind = if from_host {
        kind::H2C_TERM_REQ
    } else {
        kind::C2H_TERM_REQ
    };
    let pdu = Terminate {
        ch: CommonHeader {
            kind,
            flags: 0,
            hlen: SHORT as u8,
            pdo: 0,
            plen: (SHORT as u32).into(),
        },
        fes: why.fes.into(),
        fei: why.fei.into(),
        reserved: [0; 10],
    };
    let mut bytes = [0; MAX_DATA_OFFSET];
    let len = put(&mut bytes, 0, pdu.as_bytes());
    Header { bytes, len }
}

impl Violation {
    /// Encodes the PDU by which a host reports a controller's violation before closing the
    /// connection.
    pub fn h2c_term_req(&self) -> Header {
        terminate(true, self.terminated())
    }

    /// Encodes the PDU by which a controller reports a host's violation before closing the
    /// connection.
    pub fn c2h_term_req(&self) -> Header {
        terminate(false, self.terminated())
    }

    fn terminated(&self) -> Terminated {
        let (fes, fei) = self.fatal_error();
        Terminated { fes, fei }
    }
}
