//! Reservations of NVMe namespaces ("NVMe Base 2.1", 8.1.22): access of hosts to a shared
//! namespace, and the part of the state that survives a loss of power.
//!
//! [`Reservations`] is the state of one namespace: its registrants by Host Identifier, the
//! reservation that is held, the generation. An [`Operation`] is a reservation command with checked
//! fields. [`Reservations::execute`] carries it out as a whole or not at all. The resulting
//! [`Change`] lists the hosts to notify and the hosts whose commands are to be aborted. Access
//! checks use [`Reservations::access`] only; no other code depends on types and holders.
//!
//! ```
//! use reservations::{Access, HostId, Operation, Reservations, ReservationType};
//!
//! let (active, hung) = (HostId::extended([1; 16]), HostId::extended([2; 16]));
//! let mut shared = Reservations::default();
//! for (host, key) in [(&active, 0xa), (&hung, 0xb)] {
//!     shared.execute(host, &Operation::Register { key, ptpl: None })?;
//! }
//! let rtype = ReservationType::WriteExclusiveRegistrantsOnly;
//! shared.execute(&hung, &Operation::Acquire { key: 0xb, rtype })?;
//!
//! // The active one fences the other.
//! let fence = Operation::Preempt { key: 0xa, victim: 0xb, rtype, abort: true };
//! let change = shared.execute(&active, &fence)?;
//! assert_eq!(change.preempted, [hung]);
//! assert_eq!(shared.access(&hung), Access { read: true, write: false });
//! # Ok::<(), reservations::ReservationRefusal>(())
//! ```
//!
//! [`Image`] is the encoded state, and [`ReservationFile`] a small file of images beside the
//! volume. So the state survives a restart of the process, and with PTPL a loss of power. The
//! file's content is checked as untrusted input.
//!
//! This crate contains no queues, commands in flight, assignment to workers, or sockets. Only
//! `file` does I/O, and blocks: no worker calls it.
#![forbid(unsafe_code)]

mod file;
mod host;
mod image;
mod operation;
mod report;
mod state;
mod types;

pub use file::{FileError, ReservationFile};
pub use host::HostId;
pub use image::{
    Executed, Image, ImageError, MAX_EXECUTED, MAX_NOTICES, NumberedNotice, StoredReservations,
};
pub use operation::Operation;
pub use state::{Change, MAX_REGISTRANTS, Notice, Registrant, Reservation, Reservations};
pub use types::{Access, CommandGroup, Notification, ReservationRefusal, ReservationType};
