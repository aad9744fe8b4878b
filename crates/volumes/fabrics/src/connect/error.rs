//! Errors of connecting to a controller.

use nvme::Status;
use nvme::fabrics::status;
use nvme_tcp::{Terminated, Violation};
use std::io;

/// Reason why the conversation with a controller has failed.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The connection has failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The controller has closed the connection.
    #[error("the controller has closed the connection")]
    Closed,
    /// The controller violated the protocol.
    #[error("the controller breaks the protocol: {0}")]
    Violation(Violation),
    /// The controller has reported that this host violated the protocol.
    #[error("the controller ends the connection: {0}")]
    Terminated(Terminated),
    /// A command has completed with an error status.
    #[error("{command}: {}", status::name(*.status).unwrap_or("unknown status"))]
    Status {
        /// Name of the command that has failed.
        command: &'static str,
        /// Status of the command.
        status: Status,
        /// Dword 0 of the completion.
        dw0: u32,
    },
    /// The controller has no subsystem of this name.
    #[error(
        "there is no subsystem {subnqn} here; vnvme discover, or nvme discover, lists the names"
    )]
    UnknownSubsystem {
        /// NQN that the host asked for.
        subnqn: String,
    },
    /// The controller does not accept this host.
    #[error(
        "the subsystem {subnqn} does not admit the host {hostnqn}; add this NQN to its list of \
         hosts (hosts= of vnvme), or name another host with hostnqn="
    )]
    HostNotAllowed {
        /// NQN of this host.
        hostnqn: String,
        /// NQN of the subsystem.
        subnqn: String,
    },
    /// The controller lacks a required feature.
    #[error("{0}")]
    Unusable(&'static str),
    /// The controller did not become ready, or has failed; the value is its CSTS.
    #[error("the controller did not become ready (CSTS {0:#x})")]
    NotReady(u32),
    /// DH-HMAC-CHAP authentication of the host or the controller failed.
    #[error("authentication (DH-HMAC-CHAP): {0}")]
    Authentication(dhchap::AuthFailure),
    /// The controller closed the connection instead of answering this host's reply to the
    /// challenge.
    #[error(
        "authentication (DH-HMAC-CHAP): the controller has closed the connection when it had this \
         host's proof: authentication failed, as it seems"
    )]
    Unproven,
    /// A Keep Alive or another command was not answered in time.
    #[error("the controller does not answer")]
    Silent,
}

impl From<Violation> for ConversationError {
    fn from(error: Violation) -> Self {
        Self::Violation(error)
    }
}

impl ConversationError {
    /// Returns whether the controller has closed the connection, or refused it.
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

/// Reason why no connection to a portal could be made; the message names the portal.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The portal cannot be reached, or does not accept a connection.
    #[error("{portal}: no controller can be reached ({error}); start it, or correct the address")]
    Unreachable {
        /// Address of the portal, one of the subsystem's network addresses.
        portal: String,
        /// Error of the connection attempt.
        error: io::Error,
    },
    /// The portal accepts connections, but its controller cannot be used.
    #[error("{portal}: {trouble}")]
    Trouble {
        /// Address of the portal.
        portal: String,
        /// Reason why the controller cannot be used.
        trouble: ConversationError,
    },
    /// The portal's host name cannot be resolved.
    #[error("{portal}: the host's name has no address ({error})")]
    Name {
        /// Address of the portal with the unknown host name.
        portal: String,
        /// Error of the name resolution.
        error: io::Error,
    },
    /// The controller has other properties than the previous one, or than that of another portal.
    #[error("{portal}: the namespace has changed: {what}")]
    Changed {
        /// Address of the portal.
        portal: String,
        /// Name of the namespace's property that differs.
        what: &'static str,
    },
}
