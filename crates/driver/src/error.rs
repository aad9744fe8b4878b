//! What can go wrong: with the controller ([`Error`]), with one command ([`CommandError`]), or
//! before a command was even submitted ([`Refusal`]).

use std::time::Duration;

use nvme::Status;

use crate::buffer::DmaBuffer;
use crate::iova::MapFailure;
use crate::transport::TransportError;

/// Why the controller could not be brought up, asked or brought back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Memory could not be made accessible to the device.
    #[error("memory for the device")]
    Map(#[from] MapFailure),
    /// The device is gone: its registers read as all ones, or the connection to it is lost.
    #[error("the device is gone")]
    Gone,
    /// The device is suspended; queue pairs hold their commands.
    #[error("the device is suspended")]
    Suspended,
    /// CSTS.CFS is set, and a reset did not help.
    #[error("controller fatal status (CSTS {csts:#x})")]
    Fatal {
        /// The register.
        csts: u32,
    },
    /// CSTS.RDY did not follow CC.EN within the time that the controller states (CAP.TO, CRTO).
    #[error("the controller did not become {} within {limit:?}", if *.enabling { "ready" } else { "disabled" })]
    Ready {
        /// Whether it was being enabled.
        enabling: bool,
        /// The time limit.
        limit: Duration,
    },
    /// The controller lacks something without which the driver cannot work.
    #[error("the controller is not usable: {0}")]
    Unusable(&'static str),
    /// An admin command was not answered.
    #[error("admin command {opcode:#04x} timed out")]
    AdminTimeout {
        /// Its opcode.
        opcode: u8,
    },
    /// An admin command failed.
    #[error("admin command {opcode:#04x}: {status}")]
    Admin {
        /// Its opcode.
        opcode: u8,
        /// Its status.
        status: Status,
    },
    /// There is no such namespace, or it is of a kind that the driver cannot use.
    #[error("namespace {nsid}: {why}")]
    Namespace {
        /// Its number.
        nsid: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// All I/O queues that the controller allows are in use.
    #[error("all {allowed} I/O queue pairs are in use")]
    NoQueue {
        /// How many there can be.
        allowed: u16,
    },
    /// A system call failed.
    #[error("{what}")]
    System {
        /// What was being done.
        what: &'static str,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The device handle was closed.
    #[error("the device was closed")]
    Closed,
}

/// How a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The controller answered with this status.
    #[error("{0}")]
    Status(Status),
    /// It was not answered in time and was aborted, or lost in resets, more
    /// often than it may be tried.
    #[error("not answered in time")]
    TimedOut,
    /// It was in flight when the controller was reset, and must not be repeated without asking.
    #[error("interrupted by a controller reset")]
    Reset,
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
}

/// Why a command was not submitted; nothing has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// As many commands are in flight as the queue pair has room for: poll first.
    #[error("the queue is full")]
    Full,
    /// Zero blocks, more than one command can carry, or beyond 64 bits.
    #[error("not a possible range of blocks")]
    Range,
    /// The buffer is shorter than the transfer, or missing.
    #[error("the buffer is too short")]
    Buffer,
    /// The buffer's address is not a multiple of 4.
    #[error("the buffer is not aligned to 4 bytes")]
    Alignment,
    /// The controller does not have this command.
    #[error("not supported by the controller")]
    Unsupported,
    /// The device is gone, or was closed.
    #[error("the device is gone")]
    Gone,
}

/// A refused request gives its buffer back.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Refused {
    /// The reason.
    pub why: Refusal,
    /// The request's buffer.
    pub buffer: Option<DmaBuffer>,
}
