//! Errors of volumes: of one request ([`IoError`], small and `Copy`), and of opening a volume
//! ([`VolumeError`], with messages for users).

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Class of a failed request's error, by which the caller decides how to react.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoErrorKind {
    /// The medium could not be read (the system's `EIO` for a read, for example).
    MediaRead,
    /// The medium could not be written.
    MediaWrite,
    /// Written data could not be made durable and may be lost. A retry would hide the loss: it
    /// might succeed, because the kernel discards data that it failed to write.
    NotDurable,
    /// The storage has no space left for the write, or a quota or file size limit is reached.
    NoSpace,
    /// The request would change a volume that is open read-only.
    ReadOnly,
    /// The range of the request does not lie within the volume.
    OutOfRange,
    /// The range lies within the volume, but the file or device behind it has become shorter since
    /// it was opened.
    Truncated,
    /// Offset, length and data are inconsistent, or not multiples of the volume's block size.
    Invalid,
    /// The request's own memory could not be accessed (for example a guest memory file that was cut
    /// short).
    Memory,
    /// The request was cancelled before it took effect, or took effect only in part.
    Aborted,
    /// The device behind the volume has been removed (unplugged).
    Gone,
    /// The server behind the volume cannot be reached, even after a wait.
    Unreachable,
    /// The volume does not support this operation.
    Unsupported,
    /// The number of outstanding requests has reached [`Io::capacity`](crate::Io::capacity). The
    /// request has not been started.
    Busy,
}

impl IoErrorKind {
    /// Returns the class as which the counters of front-ends count the failure.
    pub const fn failure(self) -> probes::Failure {
        use probes::Failure;
        match self {
            Self::MediaRead | Self::MediaWrite | Self::NotDurable | Self::Truncated => {
                Failure::Media
            }
            Self::NoSpace => Failure::NoSpace,
            Self::ReadOnly => Failure::ReadOnly,
            Self::OutOfRange => Failure::OutOfRange,
            Self::Memory => Failure::Memory,
            Self::Aborted => Failure::Aborted,
            Self::Busy => Failure::Interrupted,
            Self::Unreachable => Failure::Path,
            Self::Unsupported => Failure::Invalid,
            Self::Invalid | Self::Gone => Failure::Internal,
        }
    }

    /// Returns a short description of the error for log messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MediaRead => "medium could not be read",
            Self::MediaWrite => "medium could not be written",
            Self::NotDurable => "written data could not be made durable",
            Self::NoSpace => "no space left",
            Self::ReadOnly => "volume is read-only",
            Self::OutOfRange => "range outside of the volume",
            Self::Truncated => "volume has become shorter",
            Self::Invalid => "malformed request",
            Self::Memory => "request memory not accessible",
            Self::Aborted => "aborted",
            Self::Gone => "the volume is no longer available",
            Self::Unreachable => "volume cannot be reached",
            Self::Unsupported => "operation not supported",
            Self::Busy => "too many requests in flight",
        }
    }
}

/// Error of one request: its class, and the system's error number for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IoError {
    /// Class of the error, which decides how a caller reacts.
    pub kind: IoErrorKind,
    /// The system's error number (`errno`), or 0 where the failure did not come from the system.
    pub errno: i32,
}

impl IoError {
    /// Creates an error that the volume itself detected, without an error number.
    pub const fn new(kind: IoErrorKind) -> Self {
        Self { kind, errno: 0 }
    }

    /// Creates the error for `errno` (positive) as reported by the system. `write`: the failed
    /// operation changes the volume (write, flush, zeroing, deallocation).
    pub const fn from_errno(errno: i32, write: bool) -> Self {
        let kind = match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoErrorKind::NoSpace,
            libc::EROFS | libc::EPERM | libc::EACCES if write => IoErrorKind::ReadOnly,
            libc::ENODEV | libc::ENXIO | libc::ESHUTDOWN | libc::ENOMEDIUM => IoErrorKind::Gone,
            libc::ECANCELED => IoErrorKind::Aborted,
            libc::EOPNOTSUPP | libc::ENOSYS => IoErrorKind::Unsupported,
            libc::EFAULT => IoErrorKind::Memory,
            _ if write => IoErrorKind::MediaWrite,
            _ => IoErrorKind::MediaRead,
        };
        Self { kind, errno }
    }
}

impl IoError {
    /// Creates the error for `errno` as reported by an operation that makes written data durable.
    pub const fn of_sync(errno: i32) -> Self {
        let Self { kind, errno } = Self::from_errno(errno, true);
        let kind = match kind {
            // Also for want of space: the lost data was written before.
            IoErrorKind::MediaWrite | IoErrorKind::NoSpace => IoErrorKind::NotDurable,
            kind => kind,
        };
        Self { kind, errno }
    }
}

impl IoError {
    /// Creates the error of a durable write (`RWF_DSYNC`) to a file that is accessed in multiples
    /// of `unit` bytes. With unit 1 the page cache is used, and other writes may be lost together
    /// with this one.
    pub(crate) const fn of_durable(errno: i32, unit: u64) -> Self {
        let error = Self::from_errno(errno, true);
        match error.kind {
            // No data was written for this write, and no other write is affected.
            IoErrorKind::NoSpace if unit > 1 => error,
            _ => Self::of_sync(errno),
        }
    }
}

impl From<IoErrorKind> for IoError {
    fn from(kind: IoErrorKind) -> Self {
        Self::new(kind)
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.as_str())?;
        if self.errno != 0 {
            write!(f, ": {}", io::Error::from_raw_os_error(self.errno))?;
        }
        Ok(())
    }
}

impl std::error::Error for IoError {}

/// Error of opening a volume, with a remedy for the user.
///
/// A cause that is part of the message is not a [`source`](std::error::Error::source): it would
/// appear twice when the chain is printed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The path does not exist.
    #[error("{}: no such file; create a raw disk with: truncate -s 1G {}", path.display(), path.display())]
    NotFound {
        /// Path of the file or block device.
        path: PathBuf,
    },
    /// The process has no permission to open the file.
    #[error("{}: permission denied{}", path.display(), if *read_only { "" } else { " (opened for writing; --read-only needs only the right to read)" })]
    Permission {
        /// Path of the file or block device that may not be opened.
        path: PathBuf,
        /// Whether opening read-only was requested.
        read_only: bool,
    },
    /// The path is a directory, which cannot be a disk.
    #[error("{}: is a directory; name a raw disk image or a block device", path.display())]
    IsDirectory {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The path is neither a regular file nor a block device.
    #[error("{}: is a {what}; a volume is a regular file or a block device", path.display())]
    WrongType {
        /// Path that is neither a file nor a block device.
        path: PathBuf,
        /// Kind of the file at the path, for the message.
        what: &'static str,
    },
    /// The file is an image in a format other than raw.
    #[error(
        "{}: is a {format} image, and {}; convert it with: qemu-img convert -O raw {} {}.raw \
         (if these bytes are a raw disk's own, written by its guest: ?format=raw)",
        path.display(), served_as(format), path.display(), path.display()
    )]
    ImageFormat {
        /// Path of the image.
        path: PathBuf,
        /// Name of the image's format.
        format: &'static str,
    },
    /// The volume has a size of 0 bytes.
    #[error("{}: is empty; give it a size with: truncate -s 1G {}", path.display(), path.display())]
    Empty {
        /// Path of the empty file or block device.
        path: PathBuf,
    },
    /// The storage behind the volume has a fixed size; only files can be resized.
    #[error("its size cannot be changed: only whole files can be resized")]
    FixedSize,
    /// The size is not a multiple of the block size.
    #[error(
        "{}: size of {size} bytes is not a multiple of {block_size} bytes; extend it with: truncate -s %{block_size} {}",
        path.display(), path.display()
    )]
    OddSize {
        /// Path of the file with the unsuitable size.
        path: PathBuf,
        /// Size of the file in bytes.
        size: u64,
        /// Block size in bytes that the size must be a multiple of.
        block_size: u32,
    },
    /// The medium or filesystem is read-only, and the volume was to be written.
    #[error("{}: is on a read-only medium; serve it with --read-only (or ?read-only=on)", path.display())]
    ReadOnlyMedium {
        /// Path of the file or block device on a read-only medium.
        path: PathBuf,
    },
    /// The file is locked by another process or opening, in a mode that excludes this use.
    #[error(
        "{}: is in use by {holder}; stop that process{}", path.display(),
        if *read_only { "" } else { ", or share the disk by opening it read-only on both sides" }
    )]
    Locked {
        /// Path of the locked file or block device.
        path: PathBuf,
        /// Description of the processes that hold the lock, as far as they could be found.
        holder: String,
        /// Whether opening read-only was requested, so that only a writer is in the way.
        read_only: bool,
    },
    /// Requests of the process that had the file open before are still outstanding.
    #[error(
        "{}: requests of an ended process are still outstanding after {waited:.1?}: the disk \
         below does not answer, and late requests would undo newer writes; retry when it answers, \
         or raise --previous-timeout", path.display()
    )]
    PreviousProcess {
        /// Path of the file or block device that the previous process still uses.
        path: PathBuf,
        /// Time for which the opening has waited for the previous process.
        waited: std::time::Duration,
    },
    /// The filesystem cannot lock the file.
    #[error("{}: cannot be locked against a second user ({error}); use ?lock=off if you exclude \
             other users yourself", path.display())]
    LockUnsupported {
        /// Path of the file on a filesystem without locks.
        path: PathBuf,
        /// Error of the system call that locks the file.
        error: io::Error,
    },
    /// `O_DIRECT` was requested and is not supported.
    #[error("{}: direct I/O is not possible: {why}; use ?direct=auto or ?direct=off", path.display())]
    DirectUnsupported {
        /// Path of the file or block device.
        path: PathBuf,
        /// Reason why direct I/O is impossible.
        why: String,
    },
    /// The requested block size is not a power of two between 512 and 65536.
    #[error(
        "a block size of {block_size} bytes is not possible: it must be a power of two from 512 to 65536"
    )]
    BlockSize {
        /// Requested block size in bytes.
        block_size: u32,
    },
    /// The journal of a volume's atomic writes cannot be used.
    #[error("{}: cannot be the journal of atomic writes: {why}", path.display())]
    Journal {
        /// Path of the journal file.
        path: PathBuf,
        /// Reason why the journal cannot be used.
        why: &'static str,
    },
    /// The slice does not lie within the volume below.
    #[error("{}", slice_range(*offset, *len, *size))]
    SliceRange {
        /// Byte offset of the slice in the lower volume.
        offset: u64,
        /// Length of the slice in bytes.
        len: u64,
        /// Size of the lower volume in bytes.
        size: u64,
    },
    /// The edges of the slice are not multiples of the block size of the volume below.
    #[error(
        "a slice of {len} bytes from byte {offset} does not begin and end on the volume's blocks of {block_size} bytes"
    )]
    SliceAlignment {
        /// Byte offset of the slice in the lower volume.
        offset: u64,
        /// Length of the slice in bytes.
        len: u64,
        /// Block size in bytes that offset and length must be multiples of.
        block_size: u32,
    },
    /// The size is not allowed for a volume.
    #[error("a volume of {size} bytes is not possible: {why}")]
    Size {
        /// Requested size in bytes.
        size: u64,
        /// Rule that the size violates.
        why: &'static str,
    },
    /// The kernel refuses to create an io_uring for this process.
    #[error("io_uring is not available: {why}")]
    NoIoUring {
        /// Missing kernel feature or permission, and the remedy.
        why: &'static str,
        /// Error of the system call that creates the ring.
        source: io::Error,
    },
    /// The volume is encrypted, and was opened without its key.
    #[error("the volume is encrypted, and its key was not read")]
    NoKey,
    /// Memory for the volume or for its requests could not be allocated.
    #[error("no memory for {what}: {error}; choose a smaller size, or free memory of this host")]
    Memory {
        /// Purpose of the memory that could not be allocated.
        what: &'static str,
        /// Error of the system call that allocates the memory.
        error: io::Error,
    },
    /// Any other system call failed.
    #[error("{}: {what}: {error}", path.display())]
    System {
        /// Path of the file or block device whose system call failed.
        path: PathBuf,
        /// Step that failed, for example `open`.
        what: &'static str,
        /// Error of the failed system call.
        error: io::Error,
    },
}

/// Returns the option that serves an image of this format, for the error message.
fn served_as(format: &str) -> String {
    match format {
        "qcow2" => "is served as one by ?format=qcow2".into(),
        _ => "only raw disks and qcow2 images can be served".into(),
    }
}

/// Describes an invalid slice. A slice of length 0 extends to the end of the volume.
fn slice_range(offset: u64, len: u64, size: u64) -> String {
    match len {
        0 => format!("byte {offset} does not lie within the volume's {size} bytes"),
        len => format!(
            "a slice of {len} bytes from byte {offset} does not lie within the volume's {size} \
             bytes"
        ),
    }
}
