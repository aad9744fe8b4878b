//! The server's listening socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, fchmod, statat, unlink};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::access::{self, Access};
use crate::path_lock::PathLock;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 16;
/// Number of probes of a socket with a full backlog, and the pause between them.
const PROBE_TRIES: u32 = 20;
const PROBE_PAUSE: Duration = Duration::from_millis(10);
/// Maximum time to wait for another server at the path, which may be ending.
const ENDING: Duration = Duration::from_secs(1);

/// Reason why a socket could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another server is listening there.
    #[error(
        "{}: another server is listening there; stop it, or choose another path", .0.display()
    )]
    InUse(PathBuf),
    /// The path does not fit into a socket's address (unix(7)).
    #[error("{}: too long: the path of a socket has at most 107 bytes", .0.display())]
    TooLong(PathBuf),
    /// The folder of the path does not exist.
    #[error("{}: the folder {} does not exist; make it with: mkdir -p {}", .path.display(), folder(.path), folder(.path))]
    NoFolder {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The process has no permission to create files in the folder of the path.
    #[error(
        "{}: permission denied in the folder {}; run as a user who may write to it, or choose \
         another path", .path.display(), folder(.path)
    )]
    NoPermission {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The existing file is not a socket, and is left alone.
    #[error("{}: exists and is not a socket; choose another path for the socket", .0.display())]
    NotASocket(PathBuf),
    /// Another process of this user holds the lock file under which the socket is created.
    #[error("{}: another process holds this lock", .0.display())]
    Locked(PathBuf),
    /// The lock file under which the socket is created belongs to another user, which could hold it
    /// for ever.
    #[error(
        "{}: this lock file belongs to the user {owner}; remove it, or listen in a directory that \
         only the server may write to",
        .path.display()
    )]
    ForeignLock {
        /// Path of the lock file.
        path: PathBuf,
        /// User ID of the lock file's owner.
        owner: u32,
    },
    /// The existing object at the lock file's path is no regular file, and is left alone.
    #[error("{}: stands where a lock file is to be made, and is none", .0.display())]
    NotALock(PathBuf),
    /// The socket's file cannot be given to that owner or group.
    #[error(
        "{}: the socket cannot be given to that owner or group: a process without the right to \
         (CAP_CHOWN) can only give it to a group that it is a member of",
        .0.display()
    )]
    Access(PathBuf),
    /// A system call failed.
    #[error("{}: cannot {action}", .path.display())]
    System {
        /// Path of the socket.
        path: PathBuf,
        /// Operation that has failed.
        action: &'static str,
        /// Error of the system call.
        #[source]
        errno: Errno,
    },
}

/// Returns the folder of a path, for messages.
fn folder(path: &Path) -> std::path::Display<'_> {
    path.parent().unwrap_or(path).display()
}

/// A listening Unix socket. By default only its owner may connect. Its file is removed when it is
/// dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode number of the socket's file. A different file at the path is not removed.
    file: Option<(u64, u64)>,
    /// Whether this process owns the file; `None` if it always does. See [`Listener::owned_if`].
    is_owner: Option<Arc<AtomicBool>>,
}

impl Listener {
    /// Listens at `path`, with mode 0600.
    ///
    /// A stale socket file is replaced. Servers that start at the same time do not remove each
    /// other's sockets: each holds a lock file meanwhile (`.lock` after the socket's name), which
    /// only its owner can open.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ListenError> {
        Self::bind_for(path, &Access::OWNER_ONLY)
    }

    /// Listens at `path` with this access control. The socket's file has owner, group and mode
    /// before any other user can connect.
    ///
    /// # Errors
    /// [`ListenError::Access`] when the process has no right to change owner or group. Otherwise
    /// the [`ListenError`] of the step that failed.
    pub fn bind_for(path: impl AsRef<Path>, access: &Access) -> Result<Self, ListenError> {
        let path = path.as_ref();
        Self::bind_by(path, || bind_socket(path, access))
    }

    /// Listens at `path` with a socket that `make` returns, bound to it. `make` may leave that to a
    /// process with the right to set the access control ([`bind_socket`]).
    ///
    /// # Errors
    /// The error of `make`. Otherwise the [`ListenError`] of the step that failed.
    pub fn bind_by(
        path: impl AsRef<Path>,
        make: impl FnOnce() -> Result<OwnedFd, ListenError>,
    ) -> Result<Self, ListenError> {
        let path = path.as_ref();
        let address = address(path)?;
        let _lock = PathLock::take(path)?;
        remove_stale(path, &address, Duration::ZERO)?;
        let socket = make()?;
        let failed = |action| system_error(path, action);
        let file = file_identity(path).map_err(failed("examine the new socket"))?;
        let listener = Self {
            socket,
            path: path.to_owned(),
            file: Some(file),
            is_owner: None,
        };
        listen(&listener.socket, BACKLOG).map_err(failed("listen"))?;
        Ok(listener)
    }

    /// Uses an inherited listening socket with a file at `path` that belongs to another process and
    /// is not removed. The process that opened the socket has set its access control.
    ///
    /// # Errors
    /// [`ListenError::System`] when the socket cannot be made non-blocking.
    pub fn inherited(socket: OwnedFd, path: impl AsRef<Path>) -> Result<Self, ListenError> {
        let path = path.as_ref().to_owned();
        match ioctl_fionbio(&socket, true) {
            Ok(()) => Ok(Self {
                socket,
                path,
                file: None,
                is_owner: None,
            }),
            Err(errno) => Err(ListenError::System {
                path,
                action: "use the socket that was handed over",
                errno,
            }),
        }
    }

    /// Uses a socket that a previous process listened on at `path` and that was kept since; its
    /// file is removed at the end. `inode` is the value of [`Listener::own_file`]. Clients see this
    /// process as the server from now on.
    ///
    /// # Errors
    /// [`ListenError::System`] when the socket does not listen, or its file no longer exists.
    pub fn kept(socket: OwnedFd, path: impl AsRef<Path>, inode: u64) -> Result<Self, ListenError> {
        let path = path.as_ref();
        let failed = |action| system_error(path, action);
        let file = file_identity(path).map_err(failed("find the kept socket's file"))?;
        if file.1 != inode {
            return Err(failed("find the kept socket's file")(Errno::STALE));
        }
        ioctl_fionbio(&socket, true).map_err(failed("use the kept socket"))?;
        // The peer credentials are those of the last process that called listen (unix(7),
        // SO_PEERCRED).
        listen(&socket, BACKLOG).map_err(failed("listen"))?;
        Ok(Self {
            socket,
            path: path.to_owned(),
            file: Some(file),
            is_owner: None,
        })
    }

    /// Leaves the file of a kept socket in place at the end, unless `is_owner` is set by then. A
    /// process that fails before it serves leaves the socket to the next process, whose clients
    /// wait in it.
    #[must_use]
    pub fn owned_if(mut self, is_owner: Arc<AtomicBool>) -> Self {
        self.is_owner = Some(is_owner);
        self
    }

    /// Makes the path free for [`Listener::bind`]: removes a stale socket file. Another process
    /// that listens there may be ending, and is waited for, a second at most.
    ///
    /// # Errors
    /// The errors of [`Listener::bind`], including [`ListenError::InUse`].
    pub fn make_room(path: impl AsRef<Path>) -> Result<(), ListenError> {
        let path = path.as_ref();
        let address = address(path)?;
        let _lock = PathLock::take(path)?;
        remove_stale(path, &address, ENDING)
    }

    /// Returns the inode of the socket's file, if this process owns and removes it.
    pub fn own_file(&self) -> Option<u64> {
        self.file.map(|(_, inode)| inode)
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next waiting connection, if there is one. Never blocks.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Some(socket)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let is_owner = self.is_owner.as_ref();
        if let Some(file) = self.file
            && is_owner.is_none_or(|is_owner| is_owner.load(Ordering::Acquire))
            && file_identity(&self.path) == Ok(file)
            && let Err(errno) = unlink(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %errno, "cannot remove the socket");
        }
    }
}

/// Makes a socket at a path where no file exists, with this access control.
///
/// # Errors
/// See [`Listener::bind_for`].
pub fn bind_socket(path: &Path, access: &Access) -> Result<OwnedFd, ListenError> {
    let failed = |action| system_error(path, action);
    let address = address(path)?;
    let socket = new_socket().map_err(failed("create a socket"))?;
    // Linux gives the file the mode of the socket's own inode, less the umask: the file is
    // never accessible to other users, and the process-wide umask is not changed.
    fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed("set the socket's mode"))?;
    bind(&socket, &address).map_err(|errno| match errno {
        Errno::ADDRINUSE => ListenError::InUse(path.to_owned()),
        errno => failed("bind")(errno),
    })?;
    if *access != Access::OWNER_ONLY {
        access::give(&socket, path, access).map_err(|errno| {
            // A file of another process stays.
            if errno != Errno::STALE {
                let _ = unlink(path);
            }
            match errno {
                Errno::PERM => ListenError::Access(path.to_owned()),
                errno => failed("set owner, group and mode")(errno),
            }
        })?;
    }
    Ok(socket)
}

/// Makes the error of a system call on a socket's path.
fn system_error(path: &Path, action: &'static str) -> impl FnOnce(Errno) -> ListenError {
    move |errno| ListenError::System {
        path: path.to_owned(),
        action,
        errno,
    }
}

/// Returns the socket address of a path.
fn address(path: &Path) -> Result<SocketAddrUnix, ListenError> {
    SocketAddrUnix::new(path).map_err(|errno| match errno {
        Errno::NAMETOOLONG => ListenError::TooLong(path.to_owned()),
        errno => ListenError::System {
            path: path.to_owned(),
            action: "use the path",
            errno,
        },
    })
}

pub(crate) fn new_socket() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Removes a stale socket file. A process that listens on it has `limit` to end.
fn remove_stale(path: &Path, address: &SocketAddrUnix, limit: Duration) -> Result<(), ListenError> {
    let failed = |action| system_error(path, action);
    match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed("examine what is there")(errno)),
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    let probe = new_socket().map_err(failed("create a socket"))?;
    let mut connected = connect(&probe, address);
    for _ in 0..PROBE_TRIES {
        if connected != Err(Errno::AGAIN) {
            break;
        }
        std::thread::sleep(PROBE_PAUSE);
        connected = connect(&probe, address);
    }
    if connected == Ok(()) && ends(probe, limit) {
        return remove(path).map_err(failed("remove the stale socket"));
    }
    match connected {
        // A full backlog (EAGAIN) is a live server too.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.to_owned())),
        Err(Errno::CONNREFUSED) => remove(path).map_err(failed("remove the stale socket")),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("probe the socket that is there")(errno)),
    }
}

/// Returns whether the listening process has ended, or ends within the limit. That process is known
/// (since listen(2), unix(7) SO_PEERCRED). A process that loses its keeper is killed a moment
/// later. The receiver process of a killed server may hold the socket for longer.
fn ends(probe: OwnedFd, limit: Duration) -> bool {
    let Ok(peer) = socket_peercred(&probe) else {
        return false;
    };
    let pidfd = match pidfd_open(peer.pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(errno) => return errno == Errno::SRCH,
    };
    // A live server needs its backlog for other clients meanwhile.
    drop(probe);
    let own = peer.pid == getpid();
    let limit = if own { Duration::ZERO } else { limit };
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        // A zombie makes the pidfd readable, too.
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Err(Errno::INTR) => {}
            ended => return ended == Ok(1),
        }
    }
}

fn remove(path: &Path) -> Result<(), Errno> {
    match unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn file_identity(path: &Path) -> Result<(u64, u64), Errno> {
    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((stat.st_dev, stat.st_ino))
}
