//! An NVMe host for tests. It sends any command, right or wrong, to a controller over vfio-user or
//! in the test's own process.
//!
//! - [`Command`] and [`Completion`]: entries of queues, by the standard's offsets.
//! - [`GuestMemory`]: memory of the guest, mapped or a file.
//! - [`Sq`], [`Cq`], [`Pair`]: the host's side of queues; [`Shadow`]: doorbells in memory;
//!   [`prps`].
//! - [`Link`]: registers and configuration space over vfio-user.
//! - [`Host`]: all of these together, one command after the other or many at once.
//!
//! The crate does not depend on `nvme`: a mistake in the layouts there must not hide itself. Users
//! may still pass commands of `nvme` ([`Host::submit`] takes any 64 bytes), and read completions
//! with its types ([`Completion::cast`]). It is for tests and for the crate `conformance` only.
#![forbid(unsafe_code)]

mod entry;
mod host;
mod link;
mod memory;
mod prp;
mod queue;

pub use entry::{Command, Completion, admin};
pub use host::{Host, Reaped};
pub use link::{BAR0, CONFIG, Link, connect, reg, window};
pub use memory::{GuestMemory, Mapped, Windows};
pub use prp::{prp_list_bytes, prps};
pub use queue::{Cq, Pair, Shadow, Sq, doorbell};

use std::time::Duration;
use vfio_user::client::ClientError;

/// Error of the host: the controller did not answer, or the test asked for what it does not have.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The vfio-user server refused or did not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The guest has no memory there, or it cannot be accessed.
    #[error("guest memory at {iova:#x}, {len} bytes: cannot be accessed")]
    Memory {
        /// Where the access began.
        iova: u64,
        /// Its bytes.
        len: usize,
    },
    /// The host has no queue pair of this identifier.
    #[error("queue pair {0}: not created by this host")]
    NoPair(u16),
    /// CSTS did not become what was waited for.
    #[error("CSTS is {csts:#x} after {limit:?}")]
    Csts {
        /// The register's last value.
        csts: u32,
        /// How long it was read.
        limit: Duration,
    },
    /// A command did not complete.
    #[error("queue {qid}: no completion within {limit:?}")]
    NoCompletion {
        /// The queue pair.
        qid: u16,
        /// How long was waited.
        limit: Duration,
    },
    /// A command that the host needs failed.
    #[error("opcode {opcode:#x}: status {status:#x}")]
    Status {
        /// The command's opcode.
        opcode: u8,
        /// Status field without the phase tag.
        status: u16,
    },
}

/// Result of the host.
pub type Result<T = ()> = std::result::Result<T, Error>;
