//! A volume's open file description, and the release of its locks.

use super::sys;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Descriptor of a volume's file, which releases the locks of its open file description when it is
/// dropped.
///
/// A queue keeps the descriptor until its last request has completed. When it is dropped, no
/// request is on its way to the file, and the file may be opened again. The open file description
/// itself may last longer, because the kernel keeps those of a ring until the ring is gone.
/// Therefore the locks are released explicitly. A killed process drops nothing; its locks last as
/// long as its requests ([`fence`](super::fence)).
#[derive(Debug)]
pub(crate) struct FileDescription(OwnedFd);

impl From<OwnedFd> for FileDescription {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for FileDescription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for FileDescription {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for FileDescription {
    fn drop(&mut self) {
        // On a file system without locks there is nothing to release.
        let _ = sys::unlock_all(self.as_fd());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by a panic.
mod tests {
    use crate::{FileOptions, FileVolume, PreviousProcess};
    use std::os::fd::AsFd;
    use std::time::Duration;

    /// Checks that the lock is released although the kernel keeps a reference to the open file
    /// description for a while after a request.
    #[test]
    fn closed_volume_releases_file_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = FileOptions {
            previous: PreviousProcess {
                limit: Duration::ZERO,
                ..PreviousProcess::default()
            },
            ..FileOptions::default()
        };
        let volume = FileVolume::open(file.path(), options).unwrap();
        let kept = volume.shared.fd.as_fd().try_clone_to_owned().unwrap();
        FileVolume::open(file.path(), options).expect_err("it is in use");
        drop(volume);
        FileVolume::open(file.path(), options).unwrap();
        drop(kept);
    }
}
