//! Errors of the client's calls.

use rustix::io::Errno;

use crate::version::CapabilitiesError;
use crate::wire::Command;

/// Reason why a call of the client failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No server listens at the path, or it cannot be reached.
    #[error("cannot connect")]
    Connect(#[source] Errno),
    /// A system call on the socket failed.
    #[error("cannot exchange messages")]
    Io(#[source] Errno),
    /// The server did not answer within the time limit.
    #[error("timed out")]
    TimedOut,
    /// The server closed the connection.
    #[error("connection closed by the server")]
    Closed,
    /// The server closed the connection before the first reply, for example because it has a client
    /// already.
    #[error(
        "the server takes no client now: it most likely has one already, or is no vfio-user server"
    )]
    NotTaken,
    /// The server answered with an error.
    #[error("command {} refused", .command.0)]
    Refused {
        /// Command that the server has refused.
        command: Command,
        /// Error number in the server's reply; `None` if it is missing or invalid.
        #[source]
        errno: Option<Errno>,
    },
    /// The server sent a reply without a pending command, for example the error of a posted write.
    #[error("unsolicited reply to command {}", .command.0)]
    Unsolicited {
        /// Command that the reply names.
        command: Command,
        /// Error number in the reply, if it is an error reply.
        #[source]
        errno: Option<Errno>,
    },
    /// The server's reply is malformed.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
    /// The server's capabilities are malformed.
    #[error("malformed capabilities")]
    Capabilities(#[from] CapabilitiesError),
    /// The server uses an unsupported version of the protocol.
    #[error("server speaks version {major}.{minor}")]
    Version {
        /// Major version of the protocol that the server uses.
        major: u16,
        /// Minor version of the protocol that the server uses.
        minor: u16,
    },
    /// The region access is longer than the server's limit for one message.
    #[error("{count} bytes in one access, the server takes {limit}")]
    TooLong {
        /// Length of the access in bytes.
        count: usize,
        /// Maximum length that the server allows, in bytes.
        limit: u64,
    },
    /// More descriptors were given than fit into one message.
    #[error("{count} file descriptors in one message, {limit} are possible")]
    TooManyFds {
        /// Number of descriptors that were given.
        count: usize,
        /// Maximum number of descriptors in one message.
        limit: usize,
    },
    /// An earlier call failed in the middle of a message, so the connection is unusable.
    #[error("connection is broken by an earlier error")]
    Broken,
}
