//! An NVMe host for tests. It sends any command, right or wrong, to a controller over vfio-user or
//! in the test's own process.
//!
//! - [`Command`] and [`Completion`]: entries of queues, by the standard's offsets.
//! - [`GuestMemory`]: memory of the guest.
//! - [`Sq`], [`Cq`], [`Pair`]: the host's side of queues; [`Shadow`]: doorbells in memory;
//!   [`prps`].
//! - [`Link`]: registers and configuration space over vfio-user.
//! - [`Host`]: all of these together, one command after the other or many at once.
//! - [`vmm`]: a VMM that moves a guest from one server to another.
//!
//! Functions fail, and do not panic, when the server, guest memory, CSTS or a completion is not
//! there. An error's cause may be a `vfio_user::client::ClientError`.
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
pub mod vmm;

pub use entry::{Command, Completion};
pub use host::Host;
pub use link::{BAR0, CONFIG, Link, connect, reg, window};
pub use memory::{GuestMemory, Windows};
pub use prp::{prp_list_bytes, prps};
pub use queue::{Cq, Pair, Shadow, Sq, doorbell};
