//! Classification of descriptors from other processes: memory files are used, anything else is not
//! accessed.
//!
//! A file system may be another process (FUSE) or another machine: any call on its files, and each
//! access to their pages, may wait for ever. The first call on a descriptor is therefore one that
//! the kernel answers itself. F_GET_SEALS succeeds only for memory files (tmpfs, memfd, hugetlbfs),
//! with pages from the kernel, too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, statx};

use crate::MapError;
use crate::memory::system;

/// Properties of a memory file that a client has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backing {
    /// Device number of the file system that the file is on.
    pub(crate) device: (u32, u32),
    pub(crate) inode: u64,
    /// Size of the file in bytes, not zero.
    pub(crate) size: u64,
}

/// Checks that the descriptor is a memory file with at least `end` bytes. A refused descriptor may
/// block on close, so another thread closes it.
///
/// # Errors
/// * [`MapError::WrongKind`] when it is no memory file.
/// * [`MapError::OutOfBacking`] when it is shorter than `end`.
/// * [`MapError::Empty`] when it has no bytes.
/// * [`MapError::System`] when a system call fails.
pub(crate) fn check(fd: OwnedFd, end: u64) -> Result<(OwnedFd, Backing), MapError> {
    match examine(fd.as_fd(), end) {
        Ok(backing) => Ok((fd, backing)),
        Err(error) => {
            sync::discard(fd);
            Err(error)
        }
    }
}

/// Returns the properties of a file that the user has named, which may be on any file system.
pub(crate) fn of_file(fd: &OwnedFd) -> Result<Backing, MapError> {
    let flags = AtFlags::EMPTY_PATH;
    backing(fd.as_fd(), flags, 0)
}

fn examine(fd: BorrowedFd<'_>, end: u64) -> Result<Backing, MapError> {
    fcntl_get_seals(fd).map_err(|_| MapError::WrongKind)?;
    // Cached attributes are sufficient. A file system on top of another one's memory (overlayfs on
    // tmpfs) could otherwise ask a third one.
    backing(fd, AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, end)
}

fn backing(fd: BorrowedFd<'_>, flags: AtFlags, end: u64) -> Result<Backing, MapError> {
    let wanted = StatxFlags::TYPE | StatxFlags::SIZE | StatxFlags::INO;
    let stat = statx(fd, c"", flags, wanted).map_err(system("statx"))?;
    if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
        return Err(MapError::WrongKind);
    }
    // File offsets are signed.
    let size = stat.stx_size.min(i64::MAX as u64);
    if size < end {
        return Err(MapError::OutOfBacking { end, size });
    }
    if size == 0 {
        return Err(MapError::Empty);
    }
    Ok(Backing {
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        size,
    })
}
