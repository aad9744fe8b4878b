//! The one system call that no library wraps: locks that belong to an open file.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Locks the whole file for this open file description (`F_OFD_SETLK`): shared, or exclusively. Does not wait.
///
/// Unlike the older POSIX locks these are kept until the last descriptor of this opening is closed, and two openings
/// in one process exclude each other. `false`: someone else holds a lock that excludes this one. Other programs that
/// lock disk images in ranges (QEMU does) are noticed too.
pub(super) fn lock(fd: BorrowedFd<'_>, exclusive: bool) -> io::Result<bool> {
    let kind = if exclusive {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    };
    // SAFETY: all-zero is a valid `flock`: plain integers.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    // Start 0 and length 0 stand for the whole file, and `l_pid` has to be 0.
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open, and `range` is a `flock` that outlives the call.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}
