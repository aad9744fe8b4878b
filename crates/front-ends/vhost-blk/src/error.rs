//! Errors of setting up and running an export ([`Error`]), and reasons for disconnecting a client
//! ([`ClientError`], for the log).

use receive::{ForeignProtocol, ReadError};
use rustix::io::Errno;

/// Reason why an export cannot be served, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The volume could not be opened for this thread.
    #[error(transparent)]
    Volume(#[from] volume::VolumeError),
    /// An option has a value that is invalid for a virtio block device.
    #[error("{0}")]
    Option(String),
    /// A system call failed.
    #[error("{call}")]
    System {
        /// Name of the system call that failed.
        call: &'static str,
        /// Error number of the system call.
        #[source]
        errno: Errno,
    },
    /// This thread cannot send interrupts.
    #[error(transparent)]
    Interrupts(#[from] eventfd::PrepareError),
    /// Data that the guest has written could not be made durable at the end.
    #[error("the volume did not become durable: {0}")]
    Flush(String),
}

/// Reason why the connection of a front-end was closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error("{0}")]
    Stranger(ForeignProtocol),
    #[error("receiving: {0}")]
    Receive(Errno),
    #[error("sending: {0}")]
    Send(Errno),
    #[error("message of {size} bytes")]
    LongMessage { size: u32 },
    #[error("message with flags {flags:#x}")]
    Flags { flags: u32 },
    #[error("too many descriptors in one message")]
    TooManyFds,
    #[error(transparent)]
    Receiver(ReadError),
    /// Another process has the volume.
    #[error("{0}")]
    Volume(String),
    #[error("request {request}: {why}")]
    Refused { request: u32, why: RequestRefusal },
}

/// Reason why a request of a front-end was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestRefusal {
    #[error("not known")]
    Unknown,
    #[error("its feature was not negotiated")]
    NotNegotiated,
    #[error("payload of the wrong size")]
    Size,
    #[error("wrong number of descriptors")]
    Fds,
    #[error("descriptor of the wrong kind")]
    WrongKind,
    #[error("{0}")]
    Value(&'static str),
    #[error("ring {0} does not exist")]
    Ring(u64),
    #[error("ring {0} is running")]
    Running(u16),
    #[error("the address {0:#x} is in no memory region")]
    Address(u64),
    /// The memory is most likely private to the front-end, and so cannot be accessed from here.
    #[error("its memory is not shared by the front-end")]
    NotShared,
    #[error("memory: {0}")]
    Memory(dma::MapError),
    #[error("ring memory: {0}")]
    Dma(dma::DmaError),
    #[error("{call}: {errno}")]
    System { call: &'static str, errno: Errno },
}

impl From<dma::MapError> for RequestRefusal {
    fn from(error: dma::MapError) -> Self {
        Self::Memory(error)
    }
}

impl From<dma::DmaError> for RequestRefusal {
    fn from(error: dma::DmaError) -> Self {
        Self::Dma(error)
    }
}

impl From<ReadError> for ClientError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::TooManyFds => Self::TooManyFds,
            ReadError::System(errno) => Self::Receive(errno),
            error => Self::Receiver(error),
        }
    }
}
