//! Lock of a volume's file that moves between processes, for the migration of a disk's user.

use super::description::FileDescription;
use super::holder;
use super::sys;
use crate::VolumeError;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Exclusive lock of the part of a file that a volume uses ([`Volume::file_lock`]).
///
/// A volume is opened with its lock, or without it when another process is still to have it
/// ([`OpenOptions::incoming`]). Without the lock the volume may not be written; the user of this
/// handle ensures that. No method waits for another process, but each may take as long as the file
/// system needs to answer.
///
/// [`OpenOptions::incoming`]: crate::OpenOptions::incoming
/// [`Volume::file_lock`]: crate::Volume::file_lock
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    /// Not kept open: closing a file may hang, so the volume sees to it where that happens.
    fd: Weak<FileDescription>,
    offset: u64,
    len: Option<u64>,
    held: AtomicBool,
}

impl FileLock {
    pub(super) fn new(
        path: PathBuf,
        fd: &Arc<FileDescription>,
        (offset, len): (u64, Option<u64>),
        held: bool,
    ) -> FileLock {
        FileLock {
            path,
            fd: Arc::downgrade(fd),
            offset,
            len,
            held: AtomicBool::new(held),
        }
    }

    fn is_whole(&self) -> bool {
        (self.offset, self.len) == (0, None)
    }

    /// Returns whether this process has the lock.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire) && self.fd.strong_count() > 0
    }

    /// Locks the file, unless it is locked already. Returns `false` when another process has a
    /// conflicting lock, requests of an ended process are still outstanding, or the volume has been
    /// closed.
    ///
    /// # Errors
    /// [`VolumeError::LockUnsupported`] when the file system cannot lock the file.
    pub fn try_lock(&self) -> Result<bool, VolumeError> {
        if self.is_held() {
            return Ok(true);
        }
        let Some(fd) = self.fd.upgrade() else {
            return Ok(false);
        };
        let fd = fd.as_fd();
        let locked = if self.is_whole() {
            sys::lock_whole(fd, true)
        } else {
            sys::lock_part(fd, true, self.offset, self.len)
        };
        let locked = locked.map_err(|error| self.failed(error))?;
        if locked {
            self.held.store(true, Ordering::Release);
        } else {
            // A part is locked in several steps, of which the last may have failed.
            sys::unlock_all(fd).map_err(|error| self.failed(error))?;
        }
        Ok(locked)
    }

    /// Releases the lock. The caller has ended all requests and made their data durable.
    ///
    /// # Errors
    /// [`VolumeError::LockUnsupported`] when the file system does not unlock the file.
    pub fn unlock(&self) -> Result<(), VolumeError> {
        self.held.store(false, Ordering::Release);
        // A volume that has been closed has no lock.
        let Some(fd) = self.fd.upgrade() else {
            return Ok(());
        };
        sys::unlock_all(fd.as_fd()).map_err(|error| self.failed(error))
    }

    /// Returns the error that names the process with the lock. Takes a while: it looks at all
    /// processes.
    pub fn refusal(&self) -> VolumeError {
        VolumeError::Locked {
            path: self.path.clone(),
            holder: holder::holders(&self.path, self.is_whole()).to_string(),
            read_only: true,
        }
    }

    fn failed(&self, error: io::Error) -> VolumeError {
        VolumeError::LockUnsupported {
            path: self.path.clone(),
            error,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by a panic.
mod tests {
    use crate::{FileOptions, FileVolume, Volume};
    use crate::{OpenOptions, Registry};
    use std::sync::Arc;

    fn disk() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file
    }

    fn incoming(url: &str) -> Arc<dyn Volume> {
        let options = OpenOptions {
            incoming: true,
            ..OpenOptions::default()
        };
        Registry::<()>::new().open(url, options).unwrap().volume
    }

    #[test]
    fn lock_moves_between_openings_and_back() {
        let file = disk();
        for part in ["", "?offset=64K&length=128K"] {
            let source = FileVolume::open_unlocked(file.path(), FileOptions::default()).unwrap();
            if part.is_empty() {
                source.lock(0, None).unwrap();
            } else {
                source.lock(64 << 10, Some(128 << 10)).unwrap();
            }
            let from = source.file_lock().unwrap();
            let target = incoming(&format!("{}{part}", file.path().display()));
            let to = target.file_lock().unwrap();
            for _ in 0..3 {
                assert!(from.is_held() && !to.is_held());
                assert!(!to.try_lock().unwrap());
                // A failed attempt leaves no part of the lock.
                from.unlock().unwrap();
                assert!(to.try_lock().unwrap() && to.is_held());
                assert!(!from.try_lock().unwrap() && !from.is_held());
                to.unlock().unwrap();
                assert!(from.try_lock().unwrap());
            }
        }
    }

    #[test]
    fn handle_does_not_keep_file_open() {
        let file = disk();
        let open = || FileVolume::open(file.path(), FileOptions::default());
        let volume = open().unwrap();
        let lock = volume.file_lock().unwrap();
        drop(volume);
        let other = open().unwrap();
        assert!(!lock.is_held() && !lock.try_lock().unwrap());
        lock.unlock().unwrap();
        assert!(other.file_lock().unwrap().is_held());
    }

    #[test]
    fn volume_without_lock_is_not_resized() {
        let file = disk();
        let target = incoming(&file.path().display().to_string());
        let lock = target.file_lock().unwrap();
        target.resize(2 << 20).unwrap_err();
        assert!(lock.try_lock().unwrap());
        target.resize(2 << 20).unwrap();
        assert_eq!(target.info().size, 2 << 20);
    }

    #[test]
    fn only_exclusively_locked_files_have_handle() {
        let file = disk();
        let unlocked = FileOptions {
            lock: false,
            ..FileOptions::default()
        };
        let read_only = FileOptions {
            read_only: true,
            ..FileOptions::default()
        };
        for options in [unlocked, read_only] {
            let volume = FileVolume::open(file.path(), options).unwrap();
            assert!(volume.file_lock().is_none(), "{options:?}");
        }
        let url = format!("{}?atomic=16K", file.path().display());
        let volume = Registry::<()>::new().open(&url, OpenOptions::default());
        assert!(volume.unwrap().volume.file_lock().is_none(), "journal");
    }
}
