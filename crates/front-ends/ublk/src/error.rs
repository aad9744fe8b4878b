//! Errors of creating and serving a disk.

use std::io;
use volume::VolumeError;

/// Reason why a disk cannot be created or served, with the remedy in its message.
///
/// Errors that are part of the message are not a [`source`](std::error::Error::source), because a
/// printed chain would repeat them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The kernel has no ublk, or its module is not loaded.
    #[error(
        "the kernel offers no ublk devices (no /dev/ublk-control): load its module with: modprobe ublk_drv"
    )]
    NoDriver,
    /// The process may not create block devices.
    #[error("no permission to open {path}: making block devices needs root (CAP_SYS_ADMIN)")]
    Permission {
        /// Path that could not be opened.
        path: String,
    },
    /// The kernel's ublk driver lacks a required feature.
    #[error("the kernel's ublk is too old: {what} is missing (Linux 6.5 or newer has it)")]
    TooOld {
        /// Feature that the kernel's ublk driver lacks.
        what: &'static str,
    },
    /// Another process serves a device of that number.
    #[error(
        "ublk device {id} is served by process {pid}; choose another number, or stop that \
             process"
    )]
    InUse {
        /// Number N of the device `/dev/ublkbN`.
        id: u32,
        /// Process ID of the server that has the device.
        pid: i32,
    },
    /// A device that a killed process left has other parameters than requested.
    #[error(
        "ublk device {id} waits for recovery, but its {what} differs; remove it with: vnvme ublk \
         --remove {id}"
    )]
    Shape {
        /// Number N of the device `/dev/ublkbN`.
        id: u32,
        /// Parameter of the device that a killed process has left and that differs from the
        /// requested one.
        what: String,
    },
    /// Invalid number of queues, depth or block size.
    #[error("{what}")]
    Options {
        /// Description of the invalid option.
        what: String,
    },
    /// The volume could not be opened for a queue.
    #[error("ublk device: {0}")]
    Volume(VolumeError),
    /// Memory for the queues could not be allocated.
    #[error("no memory for the device's queues: {0}")]
    Memory(dma::MapError),
    /// A queue ended while the device was created.
    #[error("ublk device {id}: a queue ended early; see the log")]
    QueueEnded {
        /// Number N of the device `/dev/ublkbN`.
        id: u32,
    },
    /// Another system call or control command failed.
    #[error("ublk device: {what}: {error}")]
    System {
        /// Operation that has failed.
        what: &'static str,
        /// Error of the system call or control command.
        error: io::Error,
    },
}

impl From<VolumeError> for UblkError {
    fn from(error: VolumeError) -> Self {
        Self::Volume(error)
    }
}

impl From<dma::MapError> for UblkError {
    fn from(error: dma::MapError) -> Self {
        Self::Memory(error)
    }
}

impl UblkError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::System { what, error }
    }
}
