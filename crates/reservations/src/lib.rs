//! Reservations of NVMe namespaces ("NVMe Base 2.1", 8.1.22): which host may read and write what
//! several share, and what of that outlasts a loss of power.
//!
//! [`Reservations`] is the state of one namespace: its registrants by Host Identifier, the
//! reservation that is held, the generation. An [`Operation`] is a reservation command whose fields
//! were checked; [`Reservations::execute`] carries it out as a whole or not at all, and says in a
//! [`Change`] whom to notify and whose commands to abort. What a host may do now is
//! [`Reservations::access`]; nothing else asks about types and holders.
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
//! # Ok::<(), reservations::Refusal>(())
//! ```
//!
//! [`Image`] is the state as bytes, and [`ReservationFile`] a small file of them beside the volume:
//! so the state is there after a restart of the process, and with PTPL after a loss of power. Its
//! content is checked as if an enemy had written it.
//!
//! *What may not be here:* queues, commands in flight, which worker does what, sockets. Only `file`
//! does I/O, and blocks: no worker calls it.
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
pub use image::{Executed, Image, ImageError, MAX_EXECUTED};
pub use operation::Operation;
pub use state::{Change, MAX_REGISTRANTS, Notice, Registrant, Reservation, Reservations};
pub use types::{Access, CommandGroup, Notification, Refusal, ReservationType};
