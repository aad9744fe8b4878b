//! Memory of ours that others map too, or that outlives this process.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::memory::system;
use crate::{MapError, Memory, backing};

/// What it cannot do any more: change its size, or be allowed to.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A memfd of our own: the doorbell page, which a client maps too, and a disk's state memory, which
/// the next process maps after this one. It is sealed, so that nobody can shrink or grow it.
#[derive(Clone, Debug)]
pub struct SharedPages(Memory);

impl SharedPages {
    /// `len` zero bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// [`MapError::Empty`], [`MapError::Overflow`], [`MapError::TableFull`],
    /// [`MapError::AddressSpaceFull`] or [`MapError::System`].
    pub fn new(len: usize) -> Result<SharedPages, MapError> {
        SharedPages::named("vnvme-doorbells", len)
    }

    /// The same with a name of its own, as `/proc/PID/maps` shows it.
    ///
    /// # Errors
    /// As [`SharedPages::new`].
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

    /// Pages that an earlier process made, from their file.
    ///
    /// # Errors
    /// [`MapError::WrongKind`]: it is no file of this kind, or not sealed as those are;
    /// [`MapError::OutOfBacking`]: it has fewer bytes than `len`; those of [`SharedPages::new`].
    pub fn open(fd: OwnedFd, len: usize) -> Result<SharedPages, MapError> {
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| MapError::WrongKind)?;
        if !seals.contains(SEALS) {
            return Err(MapError::WrongKind);
        }
        Memory::from_fd(fd, len as u64, true).map(SharedPages)
    }

    /// Pages of a file of the user's own, on any file system. It is not sealed: where others make
    /// it shorter, what is stored goes nowhere ([`Memory::is_poisoned`] of
    /// [`SharedPages::memory`]). A file that a client has sent is none for this: its file system
    /// may never answer.
    ///
    /// # Errors
    /// [`MapError::WrongKind`]: it is no regular file; those of [`SharedPages::new`].
    pub fn of_file(fd: OwnedFd) -> Result<SharedPages, MapError> {
        let backing = backing::of_file(&fd)?;
        Memory::map_file(fd, backing, true, None).map(SharedPages)
    }

    /// Has the pages of a range allocated, so that no later access can fail for want of memory.
    ///
    /// # Errors
    /// [`MapError::OutOfBacking`], or [`MapError::System`]: there is no memory left.
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

    /// The file to hand to the client, or to keep.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// The pages as a memory, which does not shrink.
    pub fn memory(&self) -> &Memory {
        &self.0
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
