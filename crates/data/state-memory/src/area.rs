//! Sections of bytes with content defined by their owners.

use crate::layout::Kind;
use crate::{StateError, StateMemory};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

/// Bytes of the identity or session section, initially zero.
///
/// [`Area::word`] is for values that become valid by one store: store the data that it refers to
/// first ([`Area::store`]), then the word, with `Ordering::Release`.
#[derive(Clone, Debug)]
pub struct Area {
    state: StateMemory,
    kind: Kind,
}

impl Area {
    pub(crate) fn new(state: StateMemory, kind: Kind) -> Area {
        Area { state, kind }
    }

    /// Returns the size of the section in bytes.
    pub fn len(&self) -> usize {
        self.state.section(self.kind).len
    }

    /// Returns whether the section has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the offset of a range in the file, if it lies in the section.
    fn place(&self, offset: usize, len: usize) -> Option<usize> {
        let section = self.state.section(self.kind);
        let end = offset.checked_add(len)?;
        (end <= section.len).then(|| section.offset + offset)
    }

    /// Copies bytes out of the section.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`] when the range exceeds the section.
    pub fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<(), StateError> {
        let at = self.place(offset, bytes.len());
        let at = at.ok_or(StateError::OutOfRange)?;
        Ok(self.state.memory().read(at, bytes)?)
    }

    /// Copies bytes into the section.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`] when the range exceeds the section, [`StateError::Memory`] when
    /// its pages cannot be allocated.
    pub fn store(&self, offset: usize, bytes: &[u8]) -> Result<(), StateError> {
        let at = self.place(offset, bytes.len());
        let at = at.ok_or(StateError::OutOfRange)?;
        self.prepare(offset + bytes.len())?;
        Ok(self.state.memory().write(at, bytes)?)
    }

    /// Returns the word at a byte offset, which must be a multiple of 8. [`Area::prepare`] or
    /// [`Area::store`] must have allocated its page.
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let at = self.place(offset, 8)?;
        self.state.memory().atomic_u64(at)
    }

    /// Allocates the first `end` bytes, so that no store there can fail.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`] when `end` exceeds the section, [`StateError::Memory`] when its
    /// pages cannot be allocated.
    pub fn prepare(&self, end: usize) -> Result<(), StateError> {
        self.state.prepare(self.kind, end)
    }

    /// Receives bytes from a socket directly into the section (recv(2)), and returns their number.
    /// Even if this process dies meanwhile, each byte is either in the section or still in the
    /// socket.
    ///
    /// # Errors
    /// `EFAULT` when the range exceeds the section; `ENOMEM` when its pages cannot be allocated;
    /// otherwise the error of recv(2).
    pub fn receive(
        &self,
        socket: BorrowedFd<'_>,
        offset: usize,
        len: usize,
        flags: RecvFlags,
    ) -> Result<usize, Errno> {
        let at = self.place(offset, len).ok_or(Errno::FAULT)?;
        self.prepare(offset + len).map_err(|_| Errno::NOMEM)?;
        self.state.memory().receive(socket, at, len, flags)
    }
}
