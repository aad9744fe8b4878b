//! Fencing of the connections of a previous process that used the same volume.
//!
//! A connection outlives its process if another process holds its descriptor, and may have requests
//! that the server has not executed yet. They could overwrite the result of commands on a new
//! connection. Nothing is therefore sent on a new connection before every old one has been closed
//! in two steps. First it is shut down for writing; after that no command reaches the server on it,
//! not even one that the previous process's ring was still sending. Then it is read until its end,
//! because a server answers the commands that it has begun before it closes.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;
use volume::WaitLog;

/// Number of bytes that are read from an old connection and discarded in one step.
const CHUNK: usize = 64 << 10;

/// Reason why the connections of a previous process could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum PreviousError {
    /// The server does not close its side of the connections.
    #[error(
        "{server}: {open} connections of the previous process are still open after {waited:.1?}: \
         late requests would undo newer writes; retry when the server answers, or raise \
         --previous-timeout"
    )]
    Open {
        /// URL of the server.
        server: String,
        /// Number of connections that the server has not closed.
        open: usize,
        /// Time for which the connections were waited for.
        waited: Duration,
    },
    /// A descriptor is not a connection.
    #[error("{server}: a connection of the previous process cannot be ended ({error})")]
    NoConnection {
        /// URL of the server.
        server: String,
        /// Error of the operation on the descriptor.
        error: io::Error,
    },
}

/// Guard for a connection that a [`ConnectionKeeper`] knows; dropped when the connection has ended.
pub type ConnectionGuard = Box<dyn std::any::Any + Send>;

/// Keeper of connections across a restart. The next process closes them before it sends anything on
/// its own connections.
pub trait ConnectionKeeper: Send + Sync + std::fmt::Debug {
    /// Closes the connections to `server` that a previous process has left ([`end_previous`]).
    /// Called before the first new connection, by a thread that may block.
    ///
    /// # Errors
    /// [`PreviousError`] when a connection is still open; nothing may be sent to the server.
    fn end_previous(&self, server: &str) -> Result<(), PreviousError>;

    /// Registers a connection to `server`. Called before anything is sent on the connection, by a
    /// thread that may block. `None` if registering failed; the connection is used nevertheless.
    fn keep(&self, server: &str, connection: BorrowedFd<'_>) -> Option<ConnectionGuard>;
}

/// Closes the connections of a previous process to `server`, and waits until the server has closed
/// each one, so that all of their commands have ended. Call it before sending anything on a new
/// connection.
///
/// # Errors
/// [`PreviousError`] when a connection is still open after `limit`; nothing may be sent then.
pub fn end_previous(
    server: &str,
    connections: Vec<OwnedFd>,
    limit: Duration,
) -> Result<(), PreviousError> {
    let mut log = WaitLog::default();
    for fd in &connections {
        match shutdown(fd, Shutdown::Write) {
            // The connection is closed already.
            Ok(()) | Err(Errno::NOTCONN) => {}
            Err(errno) => {
                let (server, error) = (server.to_owned(), errno.into());
                return Err(PreviousError::NoConnection { server, error });
            }
        }
    }
    let mut open = connections;
    let mut chunk = vec![0; CHUNK];
    loop {
        open.retain(|fd| !has_ended(fd, &mut chunk));
        if open.is_empty() {
            if let Some(waited) = log.said() {
                tracing::warn!(
                    "{server}: the previous process's connections have ended after {waited:.1?}"
                );
            }
            return Ok(());
        }
        let waited = log.elapsed();
        if waited >= limit {
            let (server, open) = (server.to_owned(), open.len());
            return Err(PreviousError::Open {
                server,
                open,
                waited,
            });
        }
        if let Some(waited) = log.due() {
            tracing::warn!(
                "{server}: waiting for the last requests of the previous process: {} connections \
                 are open (for {waited:.1?}, at most {limit:.0?})",
                open.len()
            );
        }
        wait(&open, log.next().min(limit.saturating_sub(waited)));
    }
}

/// Discards received bytes, a bounded number of them. Returns whether the server has closed the
/// connection, too.
fn has_ended(fd: &OwnedFd, chunk: &mut [u8]) -> bool {
    // Replies of 16 MiB and more may be pending, so other connections are handled in between.
    for _ in 0..64 {
        match recv(fd, &mut *chunk, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return true,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            Err(_) => return true,
        }
    }
    false
}

/// Waits until one of the connections is readable, or until `limit` has passed.
fn wait(connections: &[OwnedFd], limit: Duration) {
    let mut fds: Vec<PollFd<'_>> = connections
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let limit = limit.max(Duration::from_millis(1));
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    let _ = poll(&mut fds, Some(&limit));
}
