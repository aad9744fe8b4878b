//! Errors of the controller ([`Error`]), of one command ([`CommandError`]), and of requests refused
//! before submission ([`SubmitRefusal`]).

use std::time::Duration;

use nvme::Status;

use crate::buffer::DmaBuffer;
use crate::iova::MapFailure;
use crate::transport::TransportError;

/// Reason why a call to the controller failed: initialization, an admin command, or recovery.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The transport to the controller failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Memory could not be made accessible to the device.
    #[error("memory for the device")]
    Map(#[from] MapFailure),
    /// The device is lost: its registers read as all ones, or the connection is closed.
    #[error("the device is gone")]
    Gone,
    /// The device is suspended, so that queue pairs hold their commands.
    #[error("the device is suspended")]
    Suspended,
    /// The controller reports a fatal error (CSTS.CFS), and a reset did not help.
    #[error("controller fatal status (CSTS {csts:#x})")]
    Fatal {
        /// Value of the controller's CSTS register.
        csts: u32,
    },
    /// The controller did not become ready (or disabled) within the time limit that it states
    /// (CAP.TO, CRTO).
    #[error("the controller did not become {} within {limit:?}", if *.enabling { "ready" } else { "disabled" })]
    Ready {
        /// Whether the driver was enabling (true) or disabling (false) the controller.
        enabling: bool,
        /// Time limit for the controller to become ready (CAP.TO).
        limit: Duration,
    },
    /// The controller lacks a feature that the driver needs.
    #[error("the controller is not usable: {0}")]
    Unusable(&'static str),
    /// An admin command was not completed within the time limit.
    #[error("admin command {opcode:#04x} timed out")]
    AdminTimeout {
        /// Opcode of the admin command that was not completed.
        opcode: u8,
    },
    /// An admin command failed.
    #[error("admin command {opcode:#04x}: {status}")]
    Admin {
        /// Opcode of the admin command that failed.
        opcode: u8,
        /// Status with which the admin command completed.
        status: Status,
    },
    /// The namespace does not exist, or has a format or type that the driver cannot use.
    #[error("namespace {nsid}: {why}")]
    Namespace {
        /// ID of the namespace that cannot be used.
        nsid: u32,
        /// Reason why the namespace cannot be used.
        why: &'static str,
    },
    /// All I/O queues that the controller allows are in use.
    #[error("all {allowed} I/O queue pairs are in use")]
    NoQueue {
        /// Number of queue pairs that the controller allows.
        allowed: u16,
    },
    /// A system call failed.
    #[error("{what}")]
    System {
        /// Operation that failed.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// The device handle was closed.
    #[error("the device was closed")]
    Closed,
}

/// Reason why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The controller completed the command with this error status.
    #[error("{0}")]
    Status(Status),
    /// The command was not completed in time and was aborted, or was lost in resets, more often
    /// than the limit of retries.
    #[error("not answered in time")]
    TimedOut,
    /// The command was outstanding when the controller was reset, and cannot be repeated safely.
    #[error("interrupted by a controller reset")]
    Reset,
    /// The device is lost, so the command has no result.
    #[error("the device is gone")]
    Gone,
}

/// Reason why a command was refused before submission; the controller never saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitRefusal {
    /// The queue pair has the maximum number of outstanding commands; poll for completions first.
    #[error("the queue is full")]
    Full,
    /// The request has zero blocks, more than one command can carry, or a block address beyond 64
    /// bits.
    #[error("not a possible range of blocks")]
    Range,
    /// The buffer is missing or shorter than the transfer.
    #[error("the buffer is too short")]
    Buffer,
    /// The address of the buffer is not a multiple of 4.
    #[error("the buffer is not aligned to 4 bytes")]
    Alignment,
    /// The controller does not support this command.
    #[error("not supported by the controller")]
    Unsupported,
    /// The device is lost or closed.
    #[error("the device is gone")]
    Gone,
}

/// Request that was refused before its submission, with its buffer.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct RefusedRequest {
    /// Reason why the request was refused.
    pub why: SubmitRefusal,
    /// Buffer of the request, returned to the caller.
    pub buffer: Option<DmaBuffer>,
}
