//! Protocol violations by the other side.

use crate::pdu::fes;

/// A protocol violation by the other side. The connection is then unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A PDU has a type that is not allowed here.
    #[error("an unexpected PDU of type {0:#04x}")]
    Kind(u8),
    /// A header field has an invalid value.
    #[error("a PDU of type {kind:#04x} whose {field} is {value}")]
    Field {
        /// Type of the PDU with the invalid field.
        kind: u8,
        /// Name of the field.
        field: &'static str,
        /// Byte offset of the field in the header.
        at: u8,
        /// Value of the field.
        value: u32,
    },
    /// The digest of a header does not match.
    #[error("a header with a wrong digest (type {kind:#04x}, digest {digest:#010x})")]
    HeaderDigest {
        /// Type of the PDU with the wrong digest.
        kind: u8,
        /// Digest that was received with the header.
        digest: u32,
    },
    /// No outstanding command has the identifier in the PDU.
    #[error("a reply to a command that was not sent or was already answered (identifier {0:#06x})")]
    Cid(u16),
    /// No requested transfer has the tag in the PDU.
    #[error("data without an outstanding request to transfer (tag {0:#06x})")]
    Tag(u16),
    /// Data is outside the requested range, out of order, or longer than requested.
    #[error(
        "data outside the requested range (from {offset}, {len} bytes, expected from {expected})"
    )]
    Range {
        /// Byte offset that the PDU states.
        offset: u32,
        /// Length that the PDU states, in bytes.
        len: u32,
        /// Byte offset that was expected next.
        expected: u32,
    },
    /// A PDU has more data than the negotiated maximum; the value is its length in bytes.
    #[error("a PDU with {0} bytes of data, more than was agreed")]
    Limit(u32),
    /// A command has succeeded, and not all of its data has been moved.
    #[error("a command was reported as successful with data missing")]
    Incomplete,
    /// The LAST flag is set before the last piece, or missing on it.
    #[error("the end of a command's data is marked at the wrong place")]
    Last,
    /// Negotiated parameters are invalid, for this reason.
    #[error("{0}")]
    Negotiation(&'static str),
}

impl Violation {
    /// Returns Fatal Error Status and Fatal Error Information for the PDU that terminates the
    /// connection.
    pub const fn fatal_error(&self) -> (u16, u32) {
        match *self {
            Self::Kind(_) | Self::Last | Self::Incomplete => (fes::SEQUENCE, 0),
            Self::Field { at, .. } => (fes::HEADER_FIELD, at as u32),
            Self::HeaderDigest { digest, .. } => (fes::HEADER_DIGEST, digest),
            // Offset of the field CCCID or TTAG.
            Self::Cid(_) => (fes::HEADER_FIELD, 8),
            Self::Tag(_) => (fes::HEADER_FIELD, 10),
            Self::Range { .. } => (fes::OUT_OF_RANGE, 0),
            Self::Limit(_) => (fes::LIMIT, 0),
            Self::Negotiation(_) => (fes::UNSUPPORTED, 8),
        }
    }
}

/// Reason with which the other side has terminated a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminated {
    /// Fatal Error Status in the PDU ([`fes`]).
    pub fes: u16,
    /// Fatal Error Information in the PDU.
    pub fei: u32,
}

impl std::fmt::Display for Terminated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { fes, fei } = *self;
        match fes::name(fes) {
            Some(name) => write!(f, "{name}")?,
            None => write!(f, "fatal error {fes:#06x}")?,
        }
        write!(f, " (information {fei:#x})")
    }
}
