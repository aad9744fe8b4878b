//! Why a disk cannot be made or kept.

use std::io;
use volume::VolumeError;

/// Why a disk cannot be made or kept, in words that tell the user what to do about it.
///
/// What stands in the words is no [`source`](std::error::Error::source): it would be said twice
/// where the chain is printed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The kernel has no ublk, or its module is not loaded.
    #[error(
        "the kernel offers no ublk devices (no /dev/ublk-control): load its module with: modprobe ublk_drv"
    )]
    NoDriver,
    /// The process may not make block devices.
    #[error("no permission to open {path}: making block devices needs root (CAP_SYS_ADMIN)")]
    Permission {
        /// What was to be opened.
        path: String,
    },
    /// The kernel's ublk is too old.
    #[error("the kernel's ublk is too old: {what} is missing (Linux 6.5 or newer has it)")]
    TooOld {
        /// What is missing.
        what: &'static str,
    },
    /// Another process serves a device of that number.
    #[error("ublk device {id} is served by process {pid}; choose another number, or stop that one")]
    InUse {
        /// The device's number.
        id: u32,
        /// The process.
        pid: i32,
    },
    /// A device that a killed process left has another size.
    #[error(
        "ublk device {id} waits for recovery, but has another shape: {what}; remove it with: vnvme ublk --remove {id}"
    )]
    Shape {
        /// The device's number.
        id: u32,
        /// What differs.
        what: String,
    },
    /// A number of queues, a depth or a block size that cannot be.
    #[error("{what}")]
    Options {
        /// What is wrong.
        what: String,
    },
    /// The volume could not be opened for a queue.
    #[error("ublk device: {0}")]
    Volume(VolumeError),
    /// Memory for the queues could not be had.
    #[error("no memory for the device's queues: {0}")]
    Memory(dma::MapError),
    /// A queue ended while the device was made.
    #[error("ublk device {id}: a queue ended too early; the log says why")]
    QueueEnded {
        /// The device's number.
        id: u32,
    },
    /// Anything else that the system refused.
    #[error("ublk device: {what}: {error}")]
    System {
        /// The step that failed.
        what: &'static str,
        /// What the system said.
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
