//! Framing of PDUs in both directions: headers, padding, data and digests.

use crate::digest::{RunningDigest, crc32c};
use crate::pdu::{CommonHeader, DIGEST, flags};
use crate::violation::Violation;
use zerocopy::FromBytes;

/// Digests (of headers and of data) that were negotiated for a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Digests {
    pub header: bool,
    pub data: bool,
}

/// Valid values of the header fields of one type of PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Header length (HLEN) of the PDU type in bytes.
    pub hlen: u8,
    pub data: DataRule,
    /// Digests apply; they do not to the PDUs that begin and end a connection.
    pub digests: bool,
}

/// Whether data may follow the header of a PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataRule {
    Never,
    Maybe,
    Always,
    /// At most this number of bytes of data may follow, and they are discarded.
    Skipped(u32),
}

impl Shape {
    pub(crate) const fn new(hlen: usize, data: DataRule) -> Self {
        // A constant of at most 128.
        let hlen = hlen as u8;
        Self {
            hlen,
            data,
            digests: true,
        }
    }

    pub(crate) const fn without_digests(self) -> Self {
        Self {
            digests: false,
            ..self
        }
    }
}

/// Header of a PDU that was received completely.
#[derive(Debug)]
pub(crate) struct Head<'a> {
    pub ch: CommonHeader,
    /// Bytes of the header without its digest.
    pub header: &'a [u8],
    /// Number of received bytes that the header has used.
    pub used: usize,
    /// Padding and data that follow the header.
    pub body: Body,
}

impl Head<'_> {
    pub(crate) fn has(&self, flag: u8) -> bool {
        self.ch.flags & flag != 0
    }

    pub(crate) fn field(&self, field: &'static str, at: u8, value: u32) -> Violation {
        let kind = self.ch.kind;
        Violation::Field {
            kind,
            field,
            at,
            value,
        }
    }
}

/// Progress of receiving the padding and data that follow a PDU header.
#[derive(Debug, Clone, Default)]
pub(crate) struct Body {
    /// Number of padding bytes that are still to be received.
    padding: u32,
    /// Number of data bytes that are still to be received.
    pub left: u32,
    /// Digest of the data received so far, if a digest follows.
    digest: Option<RunningDigest>,
}

/// Part of a PDU's padding and data that the received bytes contain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BodyContent<'a> {
    /// No result yet, because more bytes are needed.
    Nothing,
    /// This number of padding bytes.
    Padding(usize),
    /// Data.
    Data(&'a [u8]),
    /// End of the body: number of consumed digest bytes, and whether the digest matches or is
    /// absent.
    End { used: usize, matches: bool },
}

impl Body {
    /// Returns whether data follows that has no digest, so that it can be received directly.
    pub(crate) fn is_direct(&self) -> bool {
        self.padding == 0 && self.left > 0 && self.digest.is_none()
    }

    /// Records that `len` bytes of data were received directly.
    pub(crate) fn took(&mut self, len: u32) {
        self.left = self.left.saturating_sub(len);
    }

    /// Returns the next part of the padding or data that `input` contains.
    pub(crate) fn next<'a>(&mut self, input: &'a [u8]) -> BodyContent<'a> {
        if self.padding > 0 {
            let used = input.len().min(self.padding as usize);
            self.padding -= used as u32;
            return match used {
                0 => BodyContent::Nothing,
                used => BodyContent::Padding(used),
            };
        }
        if self.left > 0 {
            let bytes = input.get(..self.left as usize).unwrap_or(input);
            if bytes.is_empty() {
                return BodyContent::Nothing;
            }
            // No longer than `left`.
            self.left -= bytes.len() as u32;
            if let Some(digest) = &mut self.digest {
                digest.update(bytes);
            }
            return BodyContent::Data(bytes);
        }
        let Some(digest) = &self.digest else {
            return BodyContent::End {
                used: 0,
                matches: true,
            };
        };
        match input.first_chunk() {
            None => BodyContent::Nothing,
            Some(bytes) => BodyContent::End {
                used: DIGEST,
                matches: u32::from_le_bytes(*bytes) == digest.value(),
            },
        }
    }
}

/// Parses the header of a PDU; `None` while it is incomplete.
///
/// # Errors
/// [`Violation`] when `shape` does not accept the type of the PDU, or a field of the header is
/// invalid.
pub(crate) fn head(
    input: &[u8],
    digests: Digests,
    shape: impl FnOnce(u8) -> Option<Shape>,
) -> Result<Option<Head<'_>>, Violation> {
    let Ok((ch, _)) = CommonHeader::read_from_prefix(input) else {
        return Ok(None);
    };
    let kind = ch.kind;
    let shape = shape(kind).ok_or(Violation::Kind(kind))?;
    let wrong = |field, at, value| Violation::Field {
        kind,
        field,
        at,
        value,
    };
    if ch.hlen != shape.hlen {
        return Err(wrong("header length", 2, ch.hlen.into()));
    }
    let has_digest = shape.digests && digests.header;
    if has_digest != (ch.flags & flags::HDGST != 0) {
        return Err(wrong("flag for a header digest", 1, ch.flags.into()));
    }
    let hlen = usize::from(ch.hlen);
    let behind = hlen + if has_digest { DIGEST } else { 0 };
    let Some(bytes) = input.get(..behind) else {
        return Ok(None);
    };
    let (header, digest) = bytes.split_at_checked(hlen).unwrap_or((bytes, &[]));
    if let Some(digest) = digest.first_chunk() {
        let digest = u32::from_le_bytes(*digest);
        if digest != crc32c(header) {
            return Err(Violation::HeaderDigest { kind, digest });
        }
    }
    let plen = ch.plen.get();
    let length = wrong("length", 4, plen);
    // No longer than 132.
    let behind = behind as u32;
    let rest = plen.checked_sub(behind).ok_or(length)?;
    let body = match shape.data {
        DataRule::Never if rest > 0 => return Err(length),
        DataRule::Always if rest == 0 => return Err(length),
        DataRule::Never | DataRule::Always | DataRule::Maybe if rest > 0 => {
            let pdo = u32::from(ch.pdo);
            let padding = pdo.checked_sub(behind).filter(|_| pdo % 4 == 0);
            let padding = padding.ok_or(wrong("data offset", 3, pdo))?;
            let data_digest = digests.data;
            if data_digest != (ch.flags & flags::DDGST != 0) {
                return Err(wrong("flag for a data digest", 1, ch.flags.into()));
            }
            let digest = if data_digest { DIGEST as u32 } else { 0 };
            let left = rest.checked_sub(padding.saturating_add(digest));
            Body {
                padding,
                left: left.filter(|left| *left > 0).ok_or(length)?,
                digest: data_digest.then(RunningDigest::new),
            }
        }
        DataRule::Skipped(most) if rest > most => return Err(length),
        DataRule::Skipped(_) => Body {
            padding: rest,
            ..Body::default()
        },
        _ => Body::default(),
    };
    Ok(Some(Head {
        ch,
        header,
        used: behind as usize,
        body,
    }))
}
