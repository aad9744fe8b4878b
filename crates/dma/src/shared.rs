//! Memory of ours that a client maps too.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::memory::system;
use crate::{MapError, Memory};

/// A memfd of our own, mapped here and by the client: the doorbell page that a guest writes without
/// an exit. It is sealed, so that a client can neither shrink nor grow it.
#[derive(Clone, Debug)]
pub struct SharedPages(Memory);

impl SharedPages {
    /// `len` zero bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// [`MapError::Empty`], [`MapError::Overflow`], [`MapError::TableFull`],
    /// [`MapError::AddressSpaceFull`] or [`MapError::System`].
    pub fn new(len: usize) -> Result<SharedPages, MapError> {
        if len == 0 {
            return Err(MapError::Empty);
        }
        let len = len
            .checked_next_multiple_of(rustix::param::page_size())
            .ok_or(MapError::Overflow)?;
        let fd = rustix::fs::memfd_create(
            "vnvme-doorbells",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(system("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(system("fcntl"))?;
        Memory::of_our_own(fd).map(SharedPages)
    }

    /// The file to hand to the client.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The 32-bit cell `i` (at byte offset 4 `i`), none when it is outside.
    #[inline]
    pub fn cell(&self, i: usize) -> Option<&AtomicU32> {
        self.0.atomic_u32(i.checked_mul(4)?)
    }
}
