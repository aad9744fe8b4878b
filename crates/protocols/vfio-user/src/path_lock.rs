//! Lock under which a socket is created at a path. Of servers that start at the same time, one
//! checks whether the existing socket is stale, while the rest wait.
//!
//! The lock is a file beside the socket that only its owner can open. A lock on anything that other
//! users can open, the directory for example, could be taken and held by them. The file is removed
//! with the lock; one left by a killed server is reused.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat, fchmod, flock, fstat, open, statat,
    unlink,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::listener::ListenError;

/// Number of attempts to take the lock, and the pause between them: a holder needs less than a
/// millisecond.
const MAX_ATTEMPTS: u32 = 100;
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Action of a process that cannot create the lock file.
const MAKE: &str = "make the lock file";

/// Lock of a socket's path, held until it is dropped.
#[derive(Debug)]
pub(crate) struct PathLock {
    path: PathBuf,
    _file: OwnedFd,
}

/// Reason why the lock of a path could not be taken.
enum Busy {
    /// Another process of this user holds the lock.
    Held,
    /// The file was removed, and perhaps created anew, before it was locked.
    Replaced,
    /// The lock file belongs to another user, with or without a running server.
    Foreign(u32),
}

impl PathLock {
    /// Takes the lock of the socket at `socket`; waits at most a second for another holder.
    ///
    /// # Errors
    /// * [`ListenError::Locked`] when another process of this user holds the lock.
    /// * [`ListenError::ForeignLock`] when the file belongs to another user.
    /// * [`ListenError::NotALock`] when the path is no regular file.
    /// * [`ListenError::NoFolder`] when the folder does not exist.
    /// * [`ListenError::NoPermission`] when the process may not write to the folder.
    /// * [`ListenError::System`] when a system call fails.
    pub(crate) fn take(socket: &Path) -> Result<PathLock, ListenError> {
        let mut name = OsString::from(socket);
        name.push(".lock");
        let path = PathBuf::from(name);
        let mut busy = Busy::Held;
        for _ in 0..MAX_ATTEMPTS {
            let path_of_socket = || socket.to_owned();
            let locked = try_lock(&path).map_err(|error| match error {
                ListenError::System {
                    errno: Errno::NOENT,
                    ..
                } => ListenError::NoFolder {
                    path: path_of_socket(),
                },
                ListenError::System {
                    errno: Errno::ACCESS,
                    action: MAKE,
                    ..
                } => ListenError::NoPermission {
                    path: path_of_socket(),
                },
                error => error,
            });
            match locked? {
                Ok(file) => return Ok(PathLock { path, _file: file }),
                Err(why) => busy = why,
            }
            if !matches!(busy, Busy::Replaced) {
                std::thread::sleep(RETRY_INTERVAL);
            }
        }
        Err(match busy {
            Busy::Held | Busy::Replaced => ListenError::Locked(path),
            Busy::Foreign(owner) => ListenError::ForeignLock { path, owner },
        })
    }
}

impl Drop for PathLock {
    fn drop(&mut self) {
        // A process that waits for the lock finds the file removed, and creates it anew.
        let _ = unlink(&self.path);
    }
}

fn try_lock(path: &Path) -> Result<Result<OwnedFd, Busy>, ListenError> {
    let failed = |action| {
        move |errno| ListenError::System {
            path: path.to_owned(),
            action,
            errno,
        }
    };
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file,
        // A symbolic link, a directory, a socket.
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => {
            return Err(ListenError::NotALock(path.to_owned()));
        }
        Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
            return match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if !is_ours(&stat) => Ok(Err(Busy::Foreign(stat.st_uid))),
                _ => Err(failed(MAKE)(errno)),
            };
        }
        Err(errno) => return Err(failed(MAKE)(errno)),
    };
    let stat = fstat(&file).map_err(failed("examine the lock file"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(ListenError::NotALock(path.to_owned()));
    }
    // A foreign owner could hold the lock for ever.
    if !is_ours(&stat) {
        return Ok(Err(Busy::Foreign(stat.st_uid)));
    }
    // A hard link to another file of this user: any user with write access to the directory can
    // create one.
    if stat.st_nlink > 1 {
        return Err(ListenError::NotALock(path.to_owned()));
    }
    // Any user that may open the file could hold the lock. The umask only clears bits, so a wider
    // mode was not set here.
    if Mode::from_raw_mode(stat.st_mode) != Mode::RUSR | Mode::WUSR {
        fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(failed("set the lock file's mode"))?;
    }
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Err(Busy::Held)),
        Err(errno) => return Err(failed("lock the lock file")(errno)),
    }
    // The former holder may have removed the file: a lock on a file without a name excludes nobody.
    match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(now) if (now.st_dev, now.st_ino) == (stat.st_dev, stat.st_ino) => Ok(Ok(file)),
        Ok(_) | Err(Errno::NOENT) => Ok(Err(Busy::Replaced)),
        Err(errno) => Err(failed("examine the lock file")(errno)),
    }
}

fn is_ours(stat: &Stat) -> bool {
    stat.st_uid == geteuid().as_raw()
}
