//! The lock under which a socket is made at a path: of servers that start at the same time, one
//! finds out whether the socket that is there is stale, while the others wait.
//!
//! It is a file beside the socket that only its owner can open. A lock on anything that others can
//! open, the directory for example, would be theirs to take and to keep. The file is removed with
//! the lock; one that a killed server left behind is used again.

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

/// How often, and how far apart, the lock is tried: others hold it for less than a millisecond.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// The lock of a socket's path, until it is dropped.
#[derive(Debug)]
pub(crate) struct PathLock {
    path: PathBuf,
    _file: OwnedFd,
}

/// Why the lock could not be taken this time.
enum Busy {
    /// Another process of this user holds it.
    Held,
    /// The file was removed, and perhaps made anew, before it was locked.
    Replaced,
    /// Another user's server is making a socket there, or that user has left the file.
    Foreign(u32),
}

impl PathLock {
    /// Takes the lock of the socket at `socket`; waits for others for a second.
    ///
    /// # Errors
    /// [`ListenError::Locked`], [`ListenError::ForeignLock`] and [`ListenError::NotALock`];
    /// [`ListenError::System`].
    pub(crate) fn take(socket: &Path) -> Result<PathLock, ListenError> {
        let mut name = OsString::from(socket);
        name.push(".lock");
        let path = PathBuf::from(name);
        let mut busy = Busy::Held;
        for _ in 0..TRIES {
            match try_lock(&path)? {
                Ok(file) => return Ok(PathLock { path, _file: file }),
                Err(why) => busy = why,
            }
            if !matches!(busy, Busy::Replaced) {
                std::thread::sleep(PAUSE);
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
        // Who waits for the lock finds that the file has gone, and makes it anew.
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
                _ => Err(failed("make the lock file")(errno)),
            };
        }
        Err(errno) => return Err(failed("make the lock file")(errno)),
    };
    let stat = fstat(&file).map_err(failed("examine the lock file"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(ListenError::NotALock(path.to_owned()));
    }
    // Its owner could hold it for ever.
    if !is_ours(&stat) {
        return Ok(Err(Busy::Foreign(stat.st_uid)));
    }
    // Another name of a file that is ours and something else: everybody who may write to the
    // directory can make one.
    if stat.st_nlink > 1 {
        return Err(ListenError::NotALock(path.to_owned()));
    }
    // So could all who may open it. The umask has taken bits away, if anything: a wider mode is not
    // from here.
    if Mode::from_raw_mode(stat.st_mode) != Mode::RUSR | Mode::WUSR {
        fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(failed("set the lock file's mode"))?;
    }
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Err(Busy::Held)),
        Err(errno) => return Err(failed("lock the lock file")(errno)),
    }
    // The one who held it may have removed it: a lock on a file without a name keeps nobody out.
    match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(now) if (now.st_dev, now.st_ino) == (stat.st_dev, stat.st_ino) => Ok(Ok(file)),
        Ok(_) | Err(Errno::NOENT) => Ok(Err(Busy::Replaced)),
        Err(errno) => Err(failed("examine the lock file")(errno)),
    }
}

fn is_ours(stat: &Stat) -> bool {
    stat.st_uid == geteuid().as_raw()
}
