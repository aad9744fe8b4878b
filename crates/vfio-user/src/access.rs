//! Who may connect to a socket: owner, group and mode of its file (unix(7), "Pathname socket
//! ownership and permissions").

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawMode, Stat, Uid, chmod, chownat, fstat, open,
};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// The bits of a mode that say who may do what.
const BITS: RawMode = 0o777;

/// Owner, group and mode of a socket's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// User; the process's own if not given.
    pub owner: Option<Uid>,
    /// Group; the process's own if not given.
    pub group: Option<Gid>,
    /// Who has the right to write may connect.
    pub mode: Mode,
}

impl Access {
    /// Nobody but the process's own user.
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

/// Gives the socket's file at `path` its owner, group and mode. Nobody can connect meanwhile: the
/// socket does not listen yet. `file` is its device and inode; what else has come to stand there is
/// left alone.
pub(crate) fn give(path: &Path, file: (u64, u64), access: &Access) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = open(path, flags, Mode::empty())?;
    let stat = fstat(&fd)?;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        && (stat.st_dev, stat.st_ino) == file;
    if !is_ours {
        return Err(Errno::STALE);
    }
    // First: a change of the owner may take bits of the mode away.
    let owner = access.owner.filter(|uid| uid.as_raw() != stat.st_uid);
    let group = access.group.filter(|gid| gid.as_raw() != stat.st_gid);
    if owner.is_some() || group.is_some() {
        chownat(&fd, "", owner, group, AtFlags::EMPTY_PATH)?;
    }
    set_mode(&fd, &fstat(&fd)?, access.mode)
}

/// The umask has taken bits away that were asked for.
fn set_mode(fd: &OwnedFd, stat: &Stat, mode: Mode) -> Result<(), Errno> {
    if stat.st_mode & BITS == mode.as_raw_mode() & BITS {
        return Ok(());
    }
    // A descriptor that only stands for a path has no fchmod (open(2), O_PATH).
    chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), mode)
}
