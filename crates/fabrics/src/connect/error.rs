//! Errors of connecting to a controller.

use nvme::Status;
use nvme::fabrics::status;
use nvme_tcp::{Terminated, Violation};
use std::io;

/// Failure of a conversation with a controller.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The connection.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The controller has closed the connection.
    #[error("the controller has closed the connection")]
    Closed,
    /// The controller breaks the protocol.
    #[error("the controller breaks the protocol: {0}")]
    Violation(Violation),
    /// The controller reports that this side has violated the protocol.
    #[error("the controller ends the connection: {0}")]
    Terminated(Terminated),
    /// A command failed.
    #[error("{command}: {}", status::name(*.status).unwrap_or("unknown status"))]
    Status {
        /// Name of the command.
        command: &'static str,
        /// Status of the command.
        status: Status,
    },
    /// The controller lacks something without which it cannot be used.
    #[error("{0}")]
    Unusable(&'static str),
    /// The controller did not become ready, or failed.
    #[error("the controller did not become ready (CSTS {0:#x})")]
    NotReady(u32),
    /// Authentication of one of the two sides has failed (DH-HMAC-CHAP).
    #[error("authentication (DH-HMAC-CHAP): {0}")]
    Authentication(dhchap::Refused),
    /// The controller has closed the connection instead of an answer to this host's proof.
    #[error(
        "authentication (DH-HMAC-CHAP): the controller has closed the connection when it had this \
         host's proof: authentication failed, as it seems"
    )]
    Unproven,
    /// No answer to a Keep Alive, or to another command, in time.
    #[error("the controller does not answer")]
    Silent,
}

impl From<Violation> for Trouble {
    fn from(error: Violation) -> Self {
        Self::Violation(error)
    }
}

impl Trouble {
    /// Returns whether the other side has ended the connection, or there is none.
    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Self::Closed | Self::Unproven => true,
            Self::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::UnexpectedEof
            ),
            _ => false,
        }
    }
}

/// Error of connecting; the message names the portal.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No connection to the portal can be made.
    #[error("{portal}: no controller can be reached ({error}); start it, or correct the address")]
    Unreachable {
        /// Address of the portal.
        portal: String,
        /// Error of the system.
        error: io::Error,
    },
    /// The portal accepts connections, but its controller cannot be used.
    #[error("{portal}: {trouble}")]
    Trouble {
        /// Address of the portal.
        portal: String,
        /// Failure of the conversation.
        trouble: Trouble,
    },
    /// The host's name has no address.
    #[error("{portal}: the host's name has no address ({error})")]
    Name {
        /// Address of the portal.
        portal: String,
        /// Error of the resolver.
        error: io::Error,
    },
    /// The controller differs from the previous one, or from another portal's.
    #[error("{portal}: the namespace has changed: {what}")]
    Changed {
        /// Address of the portal.
        portal: String,
        /// Property that differs.
        what: &'static str,
    },
}
