//! Errors of opening and resizing an image.

use crate::format::FormatError;
use std::io;
use std::path::PathBuf;
use volume::VolumeError;

/// Reason why an image cannot be opened or resized.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The image's file cannot be used.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The file does not exist.
    #[error("{}: no such file; create an image with: qemu-img create -f qcow2 {} 10G", path.display(), path.display())]
    Missing {
        /// Path of the image that does not exist.
        path: PathBuf,
    },
    /// The format of the image is invalid or not supported.
    #[error("{}: {why}", path.display())]
    Format {
        /// Path of the image with the unsupported format.
        path: PathBuf,
        /// Reason why the format is refused.
        why: FormatError,
    },
    /// The image cannot be read.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// Path of the image that cannot be read.
        path: PathBuf,
        /// Operation that failed.
        what: &'static str,
        /// Error of the system.
        error: io::Error,
    },
    /// Tables of the image contradict each other.
    #[error("{}: {what}; examine the image with qemu-img check, and serve it with read-only=on to \
             rescue its data", path.display())]
    Damaged {
        /// Path of the damaged image.
        path: PathBuf,
        /// Description of the contradiction.
        what: String,
    },
    /// The tables of the image exceed the memory limit.
    #[error("{}: its {what} would take {mib} MiB of memory, more than 1024 MiB; use an image with \
             larger clusters", path.display())]
    Large {
        /// Path of the image with the large tables.
        path: PathBuf,
        /// Kind of tables that exceed the limit, such as L2 tables.
        what: &'static str,
        /// Size in MiB that the image's tables would need in memory.
        mib: u64,
    },
    /// The backing file of the image may not be opened.
    #[error("{}: its backing file \"{name}\" {why}", path.display())]
    Backing {
        /// Path of the image that names the backing file.
        path: PathBuf,
        /// Name of the backing file, as the image contains it.
        name: String,
        /// Reason why the backing file may not be opened.
        why: String,
    },
    /// The image cannot be resized to this size.
    #[error("{}: cannot have {bytes} bytes: {why}", path.display())]
    Size {
        /// Path of the image that cannot be resized.
        path: PathBuf,
        /// Requested size of the disk in bytes.
        bytes: u64,
        /// Reason why the size is impossible.
        why: &'static str,
    },
}
