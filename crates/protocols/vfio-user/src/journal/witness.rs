//! A descriptor with a lock that shows whether it was sent.
//!
//! The lock belongs to an open file description (F_OFD_SETLK, fcntl(2)). It lasts until the last
//! descriptor or mapping of that description is closed, including one in a socket that is not read
//! yet.

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{F_UNLCK, F_WRLCK, SEEK_SET, flock, off_t};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Offset of the first lock that serves as a mark, beyond the end of any file.
const FIRST: u64 = 1 << 48;

/// Returns the lock of the reply to the message at this stream offset: one byte.
fn lock(place: u64) -> flock {
    let start = FIRST | (place & (FIRST - 1));
    flock {
        l_type: F_WRLCK as _,
        l_whence: SEEK_SET as _,
        l_start: off_t::try_from(start).unwrap_or(off_t::MAX - 1),
        l_len: 1,
        l_pid: 0,
    }
}

fn errno(errno: nix::Error) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}

/// Opens the same file again, with the lock of the reply to the message at this stream offset.
///
/// # Errors
/// The kernel's error when the file cannot be opened: /proc is missing, or the sandbox forbids it.
pub(super) fn make(file: BorrowedFd<'_>, place: u64) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    fcntl(&opened, FcntlArg::F_OFD_SETLK(&lock(place))).map_err(errno)?;
    Ok(opened)
}

/// Returns whether the witness of the message at this stream offset still exists. `file` must not
/// be the witness itself.
///
/// # Errors
/// The kernel's error when the file supports no locks.
pub(super) fn is_held(file: impl AsFd, place: u64) -> Result<bool, Errno> {
    let mut asked = lock(place);
    fcntl(file.as_fd(), FcntlArg::F_OFD_GETLK(&mut asked)).map_err(errno)?;
    Ok(i32::from(asked.l_type) != F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn witness_is_held_until_last_descriptor_closes() {
        let file = memfd_create("page", MemfdFlags::CLOEXEC).unwrap();
        let one = make(file.as_fd(), 7).unwrap();
        let held = |place| is_held(&file, place).unwrap();
        assert!(held(7) && !held(8));
        let copy = one.try_clone().unwrap();
        drop(one);
        let other = make(file.as_fd(), 8).unwrap();
        assert!(held(7) && held(8));
        drop(copy);
        assert!(!held(7) && held(8));
        drop(other);
        assert!(!held(8));
        // Any place in a stream.
        for place in [0, u64::MAX, u64::from(u32::MAX)] {
            let one = make(file.as_fd(), place).unwrap();
            assert!(held(place));
            drop(one);
            assert!(!held(place));
        }
    }
}
