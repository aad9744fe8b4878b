//! Server of one export: handshake and transmission phase with one client over any stream.
//!
//! The client is not trusted. The server holds one option of at most 64 KiB, or one window of at
//! most 1 MiB of data, whatever the client sends; it reads a request only after it has answered the
//! one before.

mod handshake;
#[cfg(test)]
mod tests;
mod transmission;

pub use handshake::negotiate;
pub use transmission::transmit;

use crate::wire;
use std::io::{self, Read};

/// Maximum number of data bytes of a request, which the server announces to clients.
pub const MAX_REQUEST: u32 = 32 << 20;

/// Properties of the served export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Name of the export. The empty name selects the export, too.
    pub name: String,
    /// Description for people, or an empty text.
    pub description: String,
    /// Size in bytes, a multiple of `block_size`.
    pub size: u64,
    /// Smallest unit of writes in bytes, a power of two of at most 64 KiB. Reads may begin and end
    /// anywhere.
    pub block_size: u32,
    /// Preferred unit of I/O in bytes, a power of two and at least `block_size`.
    pub preferred: u32,
    /// Whether changes are refused.
    pub read_only: bool,
}

impl ExportInfo {
    /// Returns the transmission flags of the export ([`wire::export_flags`]).
    fn flags(&self) -> u16 {
        use wire::export_flags as flags;
        let always = flags::HAS_FLAGS | flags::CAN_MULTI_CONN;
        if self.read_only {
            return always | flags::READ_ONLY;
        }
        let changes = flags::SEND_FUA | flags::SEND_TRIM | flags::SEND_WRITE_ZEROES;
        always | flags::SEND_FLUSH | changes
    }
}

/// Error of a request to a [`Storage`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageError {
    /// The storage has failed.
    Failed,
    /// The storage is full.
    NoSpace,
    /// The storage cannot do that.
    Unsupported,
    /// The export is being ended.
    Shutdown,
}

impl StorageError {
    fn code(self) -> u32 {
        match self {
            Self::Failed => wire::EIO,
            Self::NoSpace => wire::ENOSPC,
            Self::Unsupported => wire::ENOTSUP,
            Self::Shutdown => wire::ESHUTDOWN,
        }
    }
}

/// State of a range of the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// Storage is allocated, or may be.
    Data,
    /// No storage is allocated, and the range reads as zeroes.
    Hole,
}

/// Storage of an export. Ranges lie within the export. Reads and changes cover whole blocks
/// ([`ExportInfo::block_size`]), and at most 1 MiB of data. Calls block until the request is over.
pub trait Storage {
    /// Reads the bytes from `offset` on.
    ///
    /// # Errors
    /// The request failed; so also below.
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), StorageError>;

    /// Writes `data` at `offset`. With `fua`, the data is durable on success.
    ///
    /// # Errors
    /// See [`Storage::read`].
    fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<(), StorageError>;

    /// Makes `len` bytes read as zeroes. With `deallocate`, their space may be freed.
    ///
    /// # Errors
    /// See [`Storage::read`].
    fn zero(
        &mut self,
        offset: u64,
        len: u64,
        deallocate: bool,
        fua: bool,
    ) -> Result<(), StorageError>;

    /// Frees the space of `len` bytes, whose contents are undefined afterwards.
    ///
    /// # Errors
    /// See [`Storage::read`].
    fn trim(&mut self, offset: u64, len: u64) -> Result<(), StorageError>;

    /// Makes all completed changes durable.
    ///
    /// # Errors
    /// See [`Storage::read`].
    fn flush(&mut self) -> Result<(), StorageError>;

    /// Returns the state at `offset`, and the number of bytes from there that have it: at least 1,
    /// at most `len`.
    fn allocation(&mut self, offset: u64, len: u64) -> (Allocation, u64);
}

/// Reason why a connection has ended before the client wanted it.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The connection broke, or timed out.
    #[error("the connection ended early")]
    Io(#[from] io::Error),
    /// The client violates the protocol.
    #[error("the client breaks the protocol: {0}")]
    Violation(&'static str),
    /// A read failed after a part of its data was sent, and simple replies have no way to say so.
    #[error("a read failed after its reply had begun")]
    HalfRead,
}

/// Result of a client's handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// Whether structured replies were negotiated.
    structured: bool,
    /// Whether the client has selected the metadata context `base:allocation`.
    allocation: bool,
}

fn read<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], io::Error> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
