//! NBD handshake: fixed newstyle, `NBD_OPT_STRUCTURED_REPLY`, `NBD_OPT_GO` with block sizes, and
//! `NBD_OPT_EXPORT_NAME` for servers without `NBD_OPT_GO`.

use super::wire::{
    self, IHAVEOPT, INIT_PASSWD, OLDSTYLE, OPTION_REPLY, info, option, option_reply,
};
use super::wire::{export_flags, handshake_flags, u16_at, u32_at, u64_at};
use std::io::{self, Read, Write};

/// Maximum length in bytes of a server's reply to an option.
const MAX_REPLY_LEN: u32 = 64 << 10;
/// Maximum number of a server's replies to one option.
const MAX_REPLIES: usize = 256;
/// Maximum length in bytes of a request or reply with data, if the server announces none.
const DEFAULT_MAXIMUM: u32 = 32 << 20;
/// Maximum in bytes of the minimum block size that a server may require.
const LARGEST_MINIMUM: u32 = 64 << 10;

/// Properties of an export, as its NBD server describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags of the export ([`export_flags`]).
    pub flags: u16,
    /// Minimum block size: offsets and lengths are multiples of it; a power of two, at most 64 KiB.
    pub minimum: u32,
    /// Preferred block size in bytes; a power of two, at least `minimum`.
    pub preferred: u32,
    /// Maximum number of data bytes of a request, a multiple of `minimum`.
    pub maximum: u32,
    /// Whether structured replies were negotiated.
    pub structured: bool,
}

impl Export {
    /// Returns whether the export has this transmission flag ([`export_flags`]).
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Reason why the NBD handshake has failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection broke, or timed out.
    #[error("the handshake ended early: {0}")]
    Io(io::Error),
    /// The peer is not an NBD server.
    #[error("not an NBD server")]
    NotNbd,
    /// The server uses the oldstyle handshake of before 2011.
    #[error("the server speaks only the oldstyle or unfixed handshake of NBD")]
    TooOld,
    /// The server violates the protocol.
    #[error("the server breaks the protocol: {0}")]
    Violation(&'static str),
    /// The server has no export with the requested name.
    #[error("the server has no export \"{name}\"{}", said(.text))]
    NoExport {
        /// Name of the requested export.
        name: String,
        /// Error text that the server has sent.
        text: String,
    },
    /// The server requires TLS.
    #[error(
        "the server demands TLS, which is not supported; reach it through a TLS tunnel on this host"
    )]
    Tls,
    /// The server refuses the export for another reason.
    #[error("the server refuses the export \"{name}\" (reply {reply:#x}){}", said(.text))]
    Refused {
        /// Name of the requested export.
        name: String,
        /// Type of the error reply (`NBD_REP_ERR_*`).
        reply: u32,
        /// Error text that the server has sent.
        text: String,
    },
    /// The name of the export is too long for the protocol.
    #[error("the name of the export is longer than 4096 bytes")]
    LongName,
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Returns the server's error text with control characters escaped for a terminal.
fn said(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!(": {}", text.escape_debug()),
    }
}

fn violation<T>(what: &'static str) -> Result<T, HandshakeError> {
    Err(HandshakeError::Violation(what))
}

/// Performs the handshake on a new connection and selects the export `name`. The stream must
/// enforce a time limit on reads and writes.
///
/// # Errors
/// [`HandshakeError`] when the connection fails, or the server violates the protocol or refuses the
/// export.
pub fn negotiate(stream: &mut (impl Read + Write), name: &str) -> Result<Export, HandshakeError> {
    if name.len() > 4096 {
        return Err(HandshakeError::LongName);
    }
    let greeting: [u8; 16] = read(stream)?;
    if !greeting.starts_with(&INIT_PASSWD) {
        return Err(HandshakeError::NotNbd);
    }
    match u64_at(&greeting, 8) {
        Some(IHAVEOPT) => {}
        Some(OLDSTYLE) => return Err(HandshakeError::TooOld),
        _ => return Err(HandshakeError::NotNbd),
    }
    let flags = u16::from_be_bytes(read(stream)?);
    if flags & handshake_flags::FIXED_NEWSTYLE == 0 {
        return Err(HandshakeError::TooOld);
    }
    let known = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
    let ours = u32::from(flags & known);
    stream.write_all(&ours.to_be_bytes())?;
    let structured = structured_replies(stream)?;
    let export = match go(stream, name)? {
        Some(export) => export,
        None => by_name(stream, name, flags)?,
    };
    if export.flags & export_flags::HAS_FLAGS == 0 {
        return violation("an export has no flags");
    }
    if i64::try_from(export.size).is_err() {
        return violation("an export is larger than any file");
    }
    Ok(Export {
        structured,
        ..export
    })
}

fn read<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], HandshakeError> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn send(stream: &mut impl Write, option: u32, data: &[u8]) -> Result<(), HandshakeError> {
    // The data is at most a name and some numbers.
    let len = data.len() as u32;
    let mut message = IHAVEOPT.to_be_bytes().to_vec();
    message.extend_from_slice(&option.to_be_bytes());
    message.extend_from_slice(&len.to_be_bytes());
    message.extend_from_slice(data);
    Ok(stream.write_all(&message)?)
}

/// Reads the server's reply to an option; returns the reply's type and data.
fn reply(stream: &mut impl Read, option: u32) -> Result<(u32, Vec<u8>), HandshakeError> {
    let head: [u8; 20] = read(stream)?;
    let fields = (u64_at(&head, 0), u32_at(&head, 8), u32_at(&head, 12));
    let ((Some(magic), Some(of), Some(kind)), Some(len)) = (fields, u32_at(&head, 16)) else {
        return violation("a reply to an option is too short");
    };
    if magic != OPTION_REPLY || of != option {
        return violation("unexpected reply to an option");
    }
    if len > MAX_REPLY_LEN {
        return violation("a reply to an option is too long");
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

fn structured_replies(stream: &mut (impl Read + Write)) -> Result<bool, HandshakeError> {
    send(stream, option::STRUCTURED_REPLY, &[])?;
    match reply(stream, option::STRUCTURED_REPLY)? {
        (option_reply::ACK, _) => Ok(true),
        (option_reply::TLS_REQUIRED, _) => Err(HandshakeError::Tls),
        (kind, _) if kind & option_reply::ERROR != 0 => Ok(false),
        _ => violation("structured replies are neither granted nor refused"),
    }
}

/// Requests the export by `NBD_OPT_GO`. Returns `None` if the server does not know the option.
fn go(stream: &mut (impl Read + Write), name: &str) -> Result<Option<Export>, HandshakeError> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&1u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    send(stream, option::GO, &data)?;
    let mut told = None;
    let mut sizes = None;
    for _ in 0..MAX_REPLIES {
        let (kind, data) = reply(stream, option::GO)?;
        match kind {
            option_reply::ACK => {
                let Some((size, flags)) = told else {
                    return violation("an export is granted and not described");
                };
                return Ok(Some(describe(size, flags, sizes)?));
            }
            option_reply::INFO => match u16_at(&data, 0) {
                Some(info::EXPORT) => match (u64_at(&data, 2), u16_at(&data, 10)) {
                    (Some(size), Some(flags)) => told = Some((size, flags)),
                    _ => return violation("an export's description is too short"),
                },
                Some(info::BLOCK_SIZE) => {
                    let fields = (u32_at(&data, 2), u32_at(&data, 6), u32_at(&data, 10));
                    match fields {
                        (Some(min), Some(best), Some(max)) => sizes = Some((min, best, max)),
                        _ => return violation("block sizes are too short"),
                    }
                }
                _ => {}
            },
            option_reply::UNSUPPORTED => return Ok(None),
            kind if kind & option_reply::ERROR != 0 => return Err(refused(name, kind, &data)),
            _ => {}
        }
    }
    violation("an export is described without end")
}

fn refused(name: &str, reply: u32, data: &[u8]) -> HandshakeError {
    let text = data.get(..data.len().min(200)).unwrap_or_default();
    let text = remote::printable(text);
    let name = name.to_owned();
    match reply {
        option_reply::TLS_REQUIRED => HandshakeError::Tls,
        option_reply::UNKNOWN => HandshakeError::NoExport { name, text },
        _ => HandshakeError::Refused { name, reply, text },
    }
}

/// Requests the export by `NBD_OPT_EXPORT_NAME`, which reports errors only by closing the
/// connection.
fn by_name(
    stream: &mut (impl Read + Write),
    name: &str,
    flags: u16,
) -> Result<Export, HandshakeError> {
    send(stream, option::EXPORT_NAME, name.as_bytes())?;
    let answer: [u8; 10] = match read(stream) {
        Err(HandshakeError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(HandshakeError::NoExport {
                name: name.to_owned(),
                text: String::new(),
            });
        }
        other => other?,
    };
    if flags & handshake_flags::NO_ZEROES == 0 {
        read::<124>(stream)?;
    }
    match (u64_at(&answer, 0), wire::u16_at(&answer, 8)) {
        (Some(size), Some(flags)) => describe(size, flags, None),
        _ => violation("an export's description is too short"),
    }
}

/// Checks the properties of an export. `sizes` are the server's minimum, preferred and maximum
/// block sizes.
fn describe(
    size: u64,
    flags: u16,
    sizes: Option<(u32, u32, u32)>,
) -> Result<Export, HandshakeError> {
    let (minimum, preferred, maximum) = sizes.unwrap_or((512, 4096, DEFAULT_MAXIMUM));
    if !minimum.is_power_of_two() || minimum > LARGEST_MINIMUM {
        return violation("its minimum block size is not a power of two up to 64 KiB");
    }
    if maximum < minimum {
        return violation("its largest block is smaller than its smallest");
    }
    let preferred = if preferred.is_power_of_two() {
        preferred.clamp(minimum, DEFAULT_MAXIMUM)
    } else {
        minimum.max(4096)
    };
    Ok(Export {
        size,
        flags,
        minimum,
        preferred,
        maximum: maximum.min(DEFAULT_MAXIMUM) / minimum * minimum,
        structured: false,
    })
}

#[cfg(test)]
mod tests;
