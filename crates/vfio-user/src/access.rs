//! Access control of a socket: owner, group and mode of its file (unix(7), "Pathname socket
//! ownership and permissions").

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawMode, Stat, Uid, chmod, chownat, fstat, open,
};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Permission bits of a mode.
const BITS: RawMode = 0o777;

/// Owner, group and mode of a Unix socket's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// User that owns the socket's file; `None` for the process's own user.
    pub owner: Option<Uid>,
    /// Group of the socket's file; `None` for the process's own group.
    pub group: Option<Gid>,
    /// Permissions of the socket's file. A user with the right to write may connect.
    pub mode: Mode,
}

impl Access {
    /// Access to a socket for the process's own user only.
    pub const OWNER_ONLY: Self = Self {
        owner: None,
        group: None,
        mode: Mode::from_bits_truncate(0o600),
    };
}

impl Default for Access {
    fn default() -> Self {
        Self::OWNER_ONLY
    }
}

/// Gives the socket's file at `path` its owner, group and mode. No client can connect meanwhile,
/// since the socket does not listen yet. `file` is the device and inode of the socket; a different
/// file at `path` is left alone.
pub(crate) fn give(path: &Path, file: (u64, u64), access: &Access) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = open(path, flags, Mode::empty())?;
    let stat = fstat(&fd)?;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        && (stat.st_dev, stat.st_ino) == file;
    if !is_ours {
        return Err(Errno::STALE);
    }
    // The owner is first: changing it may clear bits of the mode.
    let owner = access.owner.filter(|uid| uid.as_raw() != stat.st_uid);
    let group = access.group.filter(|gid| gid.as_raw() != stat.st_gid);
    if owner.is_some() || group.is_some() {
        chownat(&fd, "", owner, group, AtFlags::EMPTY_PATH)?;
    }
    set_mode(&fd, &fstat(&fd)?, access.mode)
}

/// Restores the bits of the mode that the umask has cleared.
fn set_mode(fd: &OwnedFd, stat: &Stat, mode: Mode) -> Result<(), Errno> {
    if stat.st_mode & BITS == mode.as_raw_mode() & BITS {
        return Ok(());
    }
    // A descriptor that only stands for a path has no fchmod (open(2), O_PATH).
    chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), mode)
}
