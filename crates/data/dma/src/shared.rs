//! Memory of this process that other processes map, or that outlives this process.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::memory::system;
use crate::{MapError, Memory, backing};

/// File seals that prevent a change of the size, and of the seals.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A sealed memfd of this process, which can neither shrink nor grow. Used for the doorbell page,
/// which a client maps too, and for a disk's state memory, which the next process maps.
#[derive(Clone, Debug)]
pub struct SharedPages(Memory);

impl SharedPages {
    /// Creates `len` zero bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// [`MapError::Empty`] or [`MapError::Overflow`] for an invalid length, [`MapError::TableFull`]
    /// or [`MapError::AddressSpaceFull`] at the process's limits, [`MapError::System`] when a
    /// system call fails.
    pub fn new(len: usize) -> Result<SharedPages, MapError> {
        SharedPages::named("vnvme-doorbells", len)
    }

    /// Creates pages with a name of their own, visible in `/proc/PID/maps`.
    ///
    /// # Errors
    /// The errors of [`SharedPages::new`].
    pub fn named(name: &str, len: usize) -> Result<SharedPages, MapError> {
        if len == 0 {
            return Err(MapError::Empty);
        }
        let len = len
            .checked_next_multiple_of(rustix::param::page_size())
            .ok_or(MapError::Overflow)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(system("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(system("fcntl"))?;
        Memory::of_our_own(fd).map(SharedPages)
    }

    /// Opens pages of an earlier process from their file.
    ///
    /// # Errors
    /// [`MapError::WrongKind`] when the file is no memory file, or lacks the seals.
    /// [`MapError::OutOfBacking`] when it has fewer bytes than `len`. Otherwise the errors of
    /// [`SharedPages::new`].
    pub fn open(fd: OwnedFd, len: usize) -> Result<SharedPages, MapError> {
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| MapError::WrongKind)?;
        if !seals.contains(SEALS) {
            return Err(MapError::WrongKind);
        }
        Memory::from_fd(fd, len as u64, true).map(SharedPages)
    }

    /// Maps the user's own file, on any file system. It is not sealed: when another process
    /// shortens it, stores are lost ([`Memory::is_poisoned`] of [`SharedPages::memory`]). A file
    /// sent by a client must not be used: its file system may never answer.
    ///
    /// # Errors
    /// [`MapError::WrongKind`] when it is no regular file; otherwise the errors of
    /// [`SharedPages::new`].
    pub fn of_file(fd: OwnedFd) -> Result<SharedPages, MapError> {
        let backing = backing::of_file(&fd)?;
        Memory::map_file(fd, backing, true, None).map(SharedPages)
    }

    /// Allocates the pages of a range, so that no later access can fail for lack of memory.
    ///
    /// # Errors
    /// [`MapError::OutOfBacking`] when the range exceeds the pages, or [`MapError::System`] when no
    /// memory is left.
    pub fn allocate(&self, offset: usize, len: usize) -> Result<(), MapError> {
        let (end, size) = (offset.saturating_add(len) as u64, self.len() as u64);
        if end > size {
            return Err(MapError::OutOfBacking { end, size });
        }
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::empty();
        rustix::fs::fallocate(self.fd(), flags, offset as u64, len as u64)
            .map_err(system("fallocate"))
    }

    /// Returns the file of the pages, to be passed to a client or kept.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Returns the pages as a [`Memory`], which does not shrink.
    pub fn memory(&self) -> &Memory {
        &self.0
    }

    /// Returns the size of the pages in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns false, because there is always at least one page.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the 32-bit cell `i` (at byte offset 4 `i`); `None` when it is out of range.
    #[inline]
    pub fn cell(&self, i: usize) -> Option<&AtomicU32> {
        self.0.atomic_u32(i.checked_mul(4)?)
    }
}
