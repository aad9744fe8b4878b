//! Errors of the client's calls.

use rustix::io::Errno;

use crate::version::CapabilitiesError;
use crate::wire::Command;

/// Reason why a call of the client failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// There is no server at that path, or it cannot be reached.
    #[error("cannot connect")]
    Connect(#[source] Errno),
    /// The socket failed.
    #[error("cannot exchange messages")]
    Io(#[source] Errno),
    /// The server did not answer in time.
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
        /// The command.
        command: Command,
        /// The server's error number; `None` if it is missing or invalid.
        #[source]
        errno: Option<Errno>,
    },
    /// The server sent a reply without a pending command, for example the error of a posted write.
    #[error("unsolicited reply to command {}", .command.0)]
    Unsolicited {
        /// The command in the reply.
        command: Command,
        /// The error in the reply, if it is one.
        #[source]
        errno: Option<Errno>,
    },
    /// The server's answer is malformed.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
    /// The server's capabilities are malformed.
    #[error("malformed capabilities")]
    Capabilities(#[from] CapabilitiesError),
    /// The server speaks another version.
    #[error("server speaks version {major}.{minor}")]
    Version {
        /// Major version of the server.
        major: u16,
        /// Minor version of the server.
        minor: u16,
    },
    /// The access is longer than the server's limit for one message.
    #[error("{count} bytes in one access, the server takes {limit}")]
    TooLong {
        /// Bytes of the access.
        count: usize,
        /// The server's limit.
        limit: u64,
    },
    /// More descriptors than fit into one message.
    #[error("{count} file descriptors in one message, {limit} are possible")]
    TooManyFds {
        /// Descriptors given.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// An earlier call failed, so that the state of the stream is unknown.
    #[error("connection is broken by an earlier error")]
    Broken,
}
