//! Storage of a header: a file of its own, or the beginning of a volume.

use crate::error::LuksError;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use volume::{ReadError, Volume, read_blocking};

/// Storage that a header and its key slots are read from.
pub trait HeaderSource {
    /// Reads `buffer.len()` bytes from byte `offset` on.
    ///
    /// # Errors
    /// [`LuksError`] when there are not as many, or they cannot be read.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), LuksError>;
}

/// Error of a range that lies outside of its storage.
fn too_short() -> LuksError {
    LuksError::Read(io::Error::new(
        ErrorKind::UnexpectedEof,
        "the storage ends within it",
    ))
}

impl HeaderSource for [u8] {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), LuksError> {
        let first = usize::try_from(offset).map_err(|_| too_short())?;
        let bytes = self.get(first..).and_then(|rest| rest.get(..buffer.len()));
        buffer.copy_from_slice(bytes.ok_or_else(too_short)?);
        Ok(())
    }
}

/// Detached header in a file or block device.
#[derive(Debug)]
pub struct HeaderFile(pub File);

impl HeaderSource for HeaderFile {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), LuksError> {
        let read = self.0.read_exact_at(buffer, offset);
        read.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => too_short(),
            _ => LuksError::Read(error),
        })
    }
}

/// Header at the beginning of a volume.
#[derive(Debug)]
pub struct HeaderVolume<'a>(pub &'a dyn Volume);

impl HeaderSource for HeaderVolume<'_> {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), LuksError> {
        let info = self.0.info();
        let block = u64::from(info.block_size.max(1));
        let end = offset.checked_add(buffer.len() as u64);
        let end = end.filter(|end| *end <= info.size).ok_or_else(too_short)?;
        let first = offset - offset % block;
        let len = usize::try_from(end.next_multiple_of(block) - first);
        let bytes = read_blocking(self.0, first, len.map_err(|_| too_short())?);
        let bytes = bytes.map_err(|error| match error {
            ReadError::Open(error) => LuksError::OpenVolume(error),
            ReadError::Read(error) => LuksError::ReadVolume(error),
        })?;
        let skip = usize::try_from(offset - first).map_err(|_| too_short())?;
        let bytes = bytes.get(skip..).and_then(|rest| rest.get(..buffer.len()));
        buffer.copy_from_slice(bytes.ok_or_else(too_short)?);
        Ok(())
    }
}
