//! Errors that make the server close a connection.

use receive::{ForeignProtocol, ReadError};
use rustix::io::Errno;

use crate::wire::Command;

/// Reason why the server closed a connection. Mistakes that leave the stream readable are answered
/// instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The client uses another protocol.
    #[error("{0}")]
    Stranger(ForeignProtocol),
    /// The size in a message header is smaller than the header itself.
    #[error("message of {size} bytes is shorter than a header")]
    ShortMessage {
        /// Size in the message header, in bytes.
        size: u32,
    },
    /// The size in a header exceeds the negotiated limits.
    #[error("message of {size} bytes is longer than {limit}")]
    LongMessage {
        /// Size in the message header, in bytes.
        size: u32,
        /// Maximum size of a message, in bytes.
        limit: usize,
    },
    /// The header's type is not a command: an unsolicited reply, or an unknown type.
    #[error("message with flags {flags:#x} is not a command")]
    NotACommand {
        /// Value of the flags field in the message header.
        flags: u32,
    },
    /// A command arrived before `VFIO_USER_VERSION`.
    #[error("command {} before the version was negotiated", .command.0)]
    NotNegotiated {
        /// Command that was not expected before the negotiation.
        command: Command,
    },
    /// The client has sent more descriptors than a message, or this process, may have.
    #[error("too many file descriptors")]
    TooManyFds,
    /// The client closed its end in the middle of a message.
    #[error("connection closed in the middle of a message")]
    Truncated,
    /// Reading from the socket failed.
    #[error("cannot receive")]
    Receive(#[source] Errno),
    /// The receiver process could not receive the client's descriptors.
    #[error(transparent)]
    Receiver(ReadError),
    /// Writing to the socket failed.
    #[error("cannot send")]
    Send(#[source] Errno),
}

impl From<ReadError> for ConnectionError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::TooManyFds => Self::TooManyFds,
            ReadError::System(errno) => Self::Receive(errno),
            error => Self::Receiver(error),
        }
    }
}
