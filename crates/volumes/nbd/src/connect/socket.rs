//! Connecting to a server and the NBD handshake, within a time limit.

use super::address::NbdServer;
use crate::protocol::{Export, HandshakeError, negotiate};
use remote::{Address, ConnectionGuard, Conversation, connect_tcp, connect_unix};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Reason why no connection to an NBD server could be made; the message names the server.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The NBD server cannot be reached, or does not accept a connection.
    #[error("{server}: no server can be reached ({error}); start it, or correct the address")]
    Unreachable {
        /// Address of the NBD server.
        server: String,
        /// Error of the connection attempt.
        error: io::Error,
    },
    /// The server accepts the connection, but the handshake failed.
    #[error("{server}: {error}")]
    Handshake {
        /// Address of the NBD server.
        server: String,
        /// Error of the NBD handshake.
        error: HandshakeError,
    },
    /// The server's host name cannot be resolved.
    #[error("{server}: the host's name has no address ({error})")]
    Name {
        /// Host name that cannot be resolved.
        server: String,
        /// Error of the name resolution.
        error: io::Error,
    },
    /// The export has changed since the connection broke.
    #[error("{server}: the export has changed: {what}")]
    Changed {
        /// Address of the NBD server.
        server: String,
        /// Name of the export's property that has changed.
        what: &'static str,
    },
}

/// Connection to an NBD server after the handshake. The socket is in blocking mode.
#[derive(Debug)]
pub struct Connected {
    /// Socket of the connection, in blocking mode.
    pub fd: OwnedFd,
    /// Properties of the export that the handshake has returned.
    pub export: Export,
    /// Guard for the keeper's copy of the connection, dropped when the connection has ended.
    pub kept: Option<ConnectionGuard>,
}

/// Connects to a server and negotiates its export. `addresses` are the resolved ones of its host.
///
/// # Errors
/// [`ConnectError`] when no connection or export is available within `limit`.
pub fn connect(
    server: &NbdServer,
    addresses: &[SocketAddr],
    limit: Duration,
) -> Result<Connected, ConnectError> {
    let began = Instant::now();
    let deadline = began.checked_add(limit).unwrap_or(began);
    let unreachable = |error: io::Error| ConnectError::Unreachable {
        server: server.to_string(),
        error,
    };
    let fd = match &server.address {
        Address::Unix(path) => connect_unix(path, deadline),
        Address::Tcp { .. } => connect_tcp(addresses, deadline),
    };
    let mut conversation = Conversation::new(fd.map_err(unreachable)?, deadline);
    let export = negotiate(&mut conversation, &server.export);
    let export = export.map_err(|error| ConnectError::Handshake {
        server: server.to_string(),
        error,
    })?;
    let fd = conversation.into_blocking().map_err(unreachable)?;
    Ok(Connected {
        fd,
        export,
        kept: None,
    })
}
