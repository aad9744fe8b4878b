//! Access control of a socket: owner, group and mode of its file (unix(7), "Pathname socket
//! ownership and permissions").

use crate::listener::new_socket;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RawMode, Uid, chmod, chownat, fstat, open};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, accept_with, connect, listen, recv, send,
};
use rustix::process::getpid;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Gives the file of a socket, bound to `path` and not connected to yet, its owner, group and mode.
/// Until the last step only this process's own user may connect.
///
/// Another process may be able to put a different file in the place of the socket's meanwhile. The
/// file is therefore opened once, and is the socket's own if a connection to it arrives there.
pub(crate) fn give(socket: &OwnedFd, path: &Path, access: &Access) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = open(path, flags, Mode::empty())?;
    let stat = fstat(&fd)?;
    // A descriptor that only stands for a path has no fchmod (open(2), O_PATH).
    let file = format!("/proc/self/fd/{}", fd.as_raw_fd());
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || !leads_to(&file, socket)? {
        return Err(Errno::STALE);
    }
    // The owner is last: mode and group are the owner's to change.
    if let Some(group) = access.group.filter(|gid| gid.as_raw() != stat.st_gid) {
        chownat(&fd, "", None, Some(group), AtFlags::EMPTY_PATH)?;
    }
    if stat.st_mode & BITS != access.mode.as_raw_mode() & BITS {
        chmod(&*file, access.mode)?;
    }
    match access.owner.filter(|uid| uid.as_raw() != stat.st_uid) {
        Some(owner) => chownat(&fd, "", Some(owner), None, AtFlags::EMPTY_PATH),
        None => Ok(()),
    }
}

/// Returns whether a connection to this file arrives at the socket, which listens then.
fn leads_to(file: &str, socket: &OwnedFd) -> Result<bool, Errno> {
    static PROBES: AtomicU64 = AtomicU64::new(0);

    listen(socket, 1)?;
    let probe = new_socket()?;
    match connect(&probe, &SocketAddrUnix::new(file)?) {
        // The file has no listener, or one with a full backlog.
        Err(Errno::CONNREFUSED | Errno::AGAIN) => return Ok(false),
        connected => connected?,
    }
    // Another thread of this process may probe, too.
    let number = PROBES.fetch_add(1, Ordering::Relaxed).to_ne_bytes();
    send(&probe, &number, SendFlags::NOSIGNAL)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let client = match accept_with(socket, flags) {
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            client => client?,
        };
        let mut sent = [0; size_of::<u64>()];
        if socket_peercred(&client)?.pid == getpid()
            && recv(&client, &mut sent, RecvFlags::empty()).is_ok()
            && sent == number
        {
            return Ok(true);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by a panic.
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixListener;

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn file_in_place_of_socket_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let access = Access {
            mode: Mode::from_bits_truncate(0o666),
            ..Access::OWNER_ONLY
        };
        let ours = UnixListener::bind(&path).unwrap();
        ours.set_nonblocking(true).unwrap();
        let socket = OwnedFd::from(ours);
        let first = directory.path().join("first");
        std::fs::rename(&path, &first).unwrap();
        // Another server listens, and one has ended.
        for is_living in [true, false] {
            let other = UnixListener::bind(&path).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            let _other = is_living.then_some(other);
            assert_eq!(give(&socket, &path, &access), Err(Errno::STALE));
            assert_eq!(mode(&path), 0o600, "{is_living}");
            std::fs::remove_file(&path).unwrap();
        }
        std::os::unix::fs::symlink(&first, &path).unwrap();
        assert_eq!(give(&socket, &path, &access), Err(Errno::STALE));
        assert_eq!(give(&socket, &first, &access), Ok(()));
        assert_eq!(mode(&first), 0o666);
    }
}
