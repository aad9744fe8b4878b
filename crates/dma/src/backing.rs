//! What a descriptor that came from outside is: memory, or nothing that is touched.
//!
//! A file system may be another process (FUSE) or another machine: whatever is asked of its files
//! may wait for ever, and so may each access to their pages. So a descriptor is asked a question
//! first that the kernel answers itself: F_GET_SEALS succeeds for memory files (tmpfs, memfd,
//! hugetlbfs) and for nothing else. Their pages come from the kernel, too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, statx};

use crate::MapError;
use crate::memory::system;

/// A memory file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backing {
    /// The file system's device number.
    pub(crate) device: (u32, u32),
    pub(crate) inode: u64,
    /// In bytes; not zero.
    pub(crate) size: u64,
}

/// Checks that this is a memory file, and that it backs at least `end` bytes. What is refused may
/// block when it is closed: another thread does that.
///
/// # Errors
/// [`MapError::WrongKind`], [`MapError::OutOfBacking`], [`MapError::Empty`], [`MapError::System`].
pub(crate) fn check(fd: OwnedFd, end: u64) -> Result<(OwnedFd, Backing), MapError> {
    match examine(fd.as_fd(), end) {
        Ok(backing) => Ok((fd, backing)),
        Err(error) => {
            sync::discard(fd);
            Err(error)
        }
    }
}

/// What a file of the user's own is: of any file system.
pub(crate) fn of_file(fd: &OwnedFd) -> Result<Backing, MapError> {
    let flags = AtFlags::EMPTY_PATH;
    backing(fd.as_fd(), flags, 0)
}

fn examine(fd: BorrowedFd<'_>, end: u64) -> Result<Backing, MapError> {
    fcntl_get_seals(fd).map_err(|_| MapError::WrongKind)?;
    // What is known already is enough. A file system on top of another one's memory (overlayfs on
    // tmpfs) would otherwise be free to ask a third.
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
