//! The fence between a process and the one that used an export before.
//!
//! A connection that outlives its process, because another process has its descriptor, may have
//! requests that the server has not carried out yet. Commands on a new connection could overtake
//! them. So nothing is sent on a new connection before every old one has been ended in two steps.
//! First it is shut down for writing; after that no command reaches the server on it, not even one
//! that the previous process's ring was still sending. Then it is read to its end, because a server
//! answers the commands it has begun before it closes.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use volume::WaitLog;

/// Bytes of answers that are read at a time, and thrown away.
const CHUNK: usize = 64 << 10;

/// Connections of a previous process could not be ended.
#[derive(Debug, thiserror::Error)]
pub enum PreviousError {
    /// The server does not close them.
    #[error(
        "{server}: {open} connections of the previous process are still open after {waited:.1?}: \
         late requests would undo newer writes; retry when the server answers, or raise \
         --previous-timeout"
    )]
    Open {
        /// The server.
        server: String,
        /// Connections that are still open.
        open: usize,
        /// Time spent waiting for the connections.
        waited: Duration,
    },
    /// A descriptor is no connection.
    #[error("{server}: a connection of the previous process cannot be ended ({error})")]
    NoConnection {
        /// The server.
        server: String,
        /// Error of the system.
        error: io::Error,
    },
}

/// Ends the connections that a previous process has had to `server`, and waits until the server has
/// closed each: their commands have all ended then. Must be called before anything is sent on a new
/// connection.
///
/// # Errors
/// [`PreviousError`], after `limit` at the latest; nothing may be sent then.
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

/// Discards received bytes, within bounds. Returns whether the server has closed the connection,
/// too.
fn has_ended(fd: &OwnedFd, chunk: &mut [u8]) -> bool {
    // Answers of 16 MiB and more may be on their way; the other connections get a turn in between.
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
