//! Sections of bytes that their owners interpret.

use crate::layout::Kind;
use crate::{StateError, StateMemory};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

/// Bytes for the identity or the session. Initially zero.
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

    /// Bytes that there are.
    pub fn len(&self) -> usize {
        self.state.section(self.kind).len
    }

    /// There is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the offset of a range in the file, if it lies in the section.
    fn place(&self, offset: usize, len: usize) -> Option<usize> {
        let section = self.state.section(self.kind);
        let end = offset.checked_add(len)?;
        (end <= section.len).then(|| section.offset + offset)
    }

    /// Copies bytes out of it.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`].
    pub fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<(), StateError> {
        let at = self.place(offset, bytes.len());
        let at = at.ok_or(StateError::OutOfRange)?;
        Ok(self.state.memory().read(at, bytes)?)
    }

    /// Copies bytes into it.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`], [`StateError::Memory`].
    pub fn store(&self, offset: usize, bytes: &[u8]) -> Result<(), StateError> {
        let at = self.place(offset, bytes.len());
        let at = at.ok_or(StateError::OutOfRange)?;
        self.prepare(offset + bytes.len())?;
        Ok(self.state.memory().write(at, bytes)?)
    }

    /// The word at a byte offset, a multiple of 8. Its page is allocated by
    /// [`Area::prepare`] or [`Area::store`].
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let at = self.place(offset, 8)?;
        self.state.memory().atomic_u64(at)
    }

    /// Allocates the first `end` bytes, so that no store there can fail.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`], [`StateError::Memory`].
    pub fn prepare(&self, end: usize) -> Result<(), StateError> {
        self.state.prepare(self.kind, end)
    }

    /// Receives into the section by recv(2): the kernel has moved the bytes here, or left them in
    /// the socket, even if this process dies meanwhile. Returns the number of bytes.
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
