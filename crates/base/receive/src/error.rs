//! Errors of the receiver process and of reading clients' sockets.

use rustix::io::Errno;

/// Reason why a client's socket cannot be read any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// More descriptors arrived than one message may carry, or than a process may have open.
    #[error("too many file descriptors")]
    TooManyFds,
    /// The receiver process runs, and does not answer: a descriptor cannot be closed.
    #[error("file descriptors cannot be received: closing one of them takes too long")]
    Stuck,
    /// The receiver process ended between a peek and the take of the peeked bytes.
    #[error("the process that receives file descriptors has ended")]
    ReceiverGone,
    /// A system call failed, here or in the receiver process.
    #[error("cannot receive")]
    System(#[source] Errno),
}

/// Reason why the receiver process cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The process cannot be started.
    #[error("cannot start the process that receives file descriptors")]
    Spawn(#[source] std::io::Error),
    /// The socket pair between this process and the receiver process cannot be created.
    #[error("socket to the process that receives file descriptors")]
    Socket(#[source] Errno),
}
