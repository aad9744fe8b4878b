//! Descriptors that outlive the process which uses them.
//!
//! A process that serves disks may be killed at any instruction. What must not close then, sockets,
//! guest memory, eventfds, the memory that says what a disk is, has a duplicate in another process,
//! the *keeper*. The next serving process gets all of it from there.
//!
//! ```text
//!   operator --starts--> keeper (this crate's `Keeper`: a few hundred kilobytes, no thread, no
//!                          |     protocol of disks; forwards signals; ends as its child ends)
//!                          | starts, again and again; gives it what is kept (`Arrival`)
//!                          v
//!                        serving process --FDSTORE=1, FDSTOREREMOVE=1, BARRIER=1 (`Link`, `Desk`)--> keeper
//! ```
//!
//! There are two keepers and one protocol. systemd has a store of descriptors for each service
//! (sd_notify(3), `FDSTORE=1`; systemd.service(5), `FileDescriptorStoreMax=`); the keeper process
//! of this crate takes the same messages, on a socket pair of its own in place of `$NOTIFY_SOCKET`.
//! It passes on what is meant for a service manager (`READY=1` and the like).
//!
//! *How descriptors come back.* systemd passes them on across `execve`, by number (crate
//! `inherit`). The keeper process sends them over the socket pair, before anything else: there is
//! no number to believe in, no second `execve`, and no limit by the length of a variable.
//!
//! *Which is which.* A disk notes in its state memory what each of its descriptors is, before the
//! keeper has it ([`Ledger`]): names here are short and say nothing.
//!
//! *The order.* Messages of a process are handled in the order in which they were sent. A barrier
//! ([`Desk::barrier`]) is answered when all that came before it has been handled: only then a
//! descriptor is kept. Nothing here waits for it.
//!
//! *Trust.* The serving process may have been taken over by a client. The keeper takes from it
//! well-formed messages only, a bounded number of descriptors, and no kind whose `close` asks a
//! file system (`receive::kind`); it closes no socket of a client as the last, for its owner does
//! so later, or has another process do it. The keeper reads nothing of what it keeps.
//!
//! No unsafe code.
#![forbid(unsafe_code)]

mod arrival;
mod child;
mod desk;
mod keeper;
mod last;
mod ledger;
mod link;
mod packet;
mod restart;
mod signals;
mod store;
mod text;
mod upgrade;

pub use arrival::{Arrival, ArrivalError, Facts};
pub use desk::{Desk, KeepError, Ticket};
pub use keeper::{End, Given, KeepFailed, Keeper};
pub use last::outlive;
pub use ledger::{Ledger, LedgerError};
pub use link::{Keeping, Link, UpgradeError};
pub use restart::Pace;
pub use store::may_be_kept;
pub use text::{LASTING, MAX_NAME, is_name};
pub use upgrade::{Programs, REPLACED, Which};
