//! Errors of containers, with remedies for the user.

use std::io;
use std::path::PathBuf;
use volume::{IoError, VolumeError};

/// Reason why a container cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LuksError {
    /// The header could not be read.
    #[error("the LUKS header cannot be read: {0}")]
    Read(io::Error),
    /// The volume with the header could not be read.
    #[error("the LUKS header cannot be read: {0}")]
    ReadVolume(IoError),
    /// The volume with the header could not be opened for reading: a network volume is read through
    /// a ring, which a process in its sandbox cannot make.
    #[error(
        "the LUKS header cannot be read: {0}; in the sandbox, a header on a server is read at the \
         start only: name a copy of it by luks-header=PATH, or start the daemon again"
    )]
    OpenVolume(VolumeError),
    /// The file with the detached header could not be opened.
    #[error("luks-header={}: {error}", path.display())]
    HeaderFile {
        /// Path of the file.
        path: PathBuf,
        /// Error of opening it.
        error: io::Error,
    },
    /// Memory that keeps the volume key for a later process could not be made.
    #[error("the volume key cannot be kept for a later process: {0}")]
    Keep(io::Error),
    /// There is no LUKS header.
    #[error(
        "there is no LUKS header; create one with: cryptsetup luksFormat, or qemu-img create -f luks"
    )]
    NoHeader,
    /// The version of the header is unknown.
    #[error("LUKS version {0} is not supported; versions 1 and 2 are")]
    Version(u16),
    /// The header violates its specification.
    #[error("the LUKS header is damaged: {0}")]
    Damaged(&'static str),
    /// The header is valid and uses something that is not supported.
    #[error("{what} \"{name}\" is not supported; {supported}")]
    Unsupported {
        /// Kind of the unsupported part, for example `cipher`.
        what: &'static str,
        /// Name of the unsupported part in the header.
        name: String,
        /// Supported alternatives.
        supported: &'static str,
    },
    /// The header demands more work or memory than is allowed.
    #[error("the LUKS header demands too much: {what}, at most {most} are allowed")]
    TooExpensive {
        /// Parameter that exceeds its bound.
        what: &'static str,
        /// Largest value that is allowed.
        most: u64,
    },
    /// The header has no key slot that can be opened.
    #[error("the LUKS header has no usable key slot")]
    NoSlot,
    /// The key opens no slot.
    #[error(
        "the key opens no slot of the LUKS header; check it with: cryptsetup open --test-passphrase \
         --key-file FILE (the whole file is the key, a final line break included)"
    )]
    WrongKey,
    /// The key could not be read.
    #[error("the key of the LUKS volume cannot be read from {source_name}: {error}")]
    Key {
        /// Source of the key, as it was given.
        source_name: String,
        /// Error of reading it.
        error: io::Error,
    },
    /// The payload does not lie in the volume, or not on its blocks.
    #[error("the LUKS payload from byte {offset} on does not fit the volume below: {why}")]
    Payload {
        /// Byte offset of the payload in the volume below.
        offset: u64,
        /// Rule that it violates.
        why: &'static str,
    },
    /// Memory for the key derivation could not be allocated.
    #[error("no memory for the key derivation of the LUKS header ({kib} KiB)")]
    Memory {
        /// Needed memory in KiB.
        kib: u32,
    },
}

impl LuksError {
    /// Creates the error for something that is not supported.
    pub(crate) fn unsupported(what: &'static str, name: &str, supported: &'static str) -> Self {
        // A header's text is shown in logs: no control characters, and not too many.
        let name = name.chars().take(64).flat_map(char::escape_default);
        Self::Unsupported {
            what,
            name: name.collect(),
            supported,
        }
    }
}
