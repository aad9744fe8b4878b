//! Descriptors that outlive the process which uses them.
//!
//! A process that serves disks may be killed at any instruction. Descriptors that must not close
//! then have a duplicate in another process, the *keeper*: sockets, guest memory, eventfds, the
//! memory that describes a disk's state. The next serving process gets all of it from there.
//!
//! ```text
//!   operator --starts--> keeper (this crate's `Keeper`: a few hundred kilobytes, no thread, no
//!                          |     protocol of disks; forwards signals; ends as its child ends)
//!                          | starts, again and again; gives it what is kept (`Handover`)
//!                          v
//!                        serving process --FDSTORE=1, FDSTOREREMOVE=1, BARRIER=1 (`Link`, `KeeperClient`)--> keeper
//! ```
//!
//! There are two keepers and one protocol. systemd has a store of descriptors for each service
//! (sd_notify(3), `FDSTORE=1`; systemd.service(5), `FileDescriptorStoreMax=`). The keeper process
//! of this crate takes the same messages, on a socket pair of its own in place of `$NOTIFY_SOCKET`.
//! It passes on messages for a service manager (`READY=1` and the like).
//!
//! *How descriptors come back.* systemd passes them on across `execve`, by number (crate
//! `inherit`). The keeper process sends them over the socket pair, before anything else: there is
//! no number to believe in, no second `execve`, and no limit by the length of a variable.
//!
//! *The keeper's own end.* A second keeper process stands by with duplicates of all of it (module
//! `standby`), and is the keeper if the first one ends without notice. An upgrade replaces the
//! keeper's program in place (module `resume`).
//!
//! *Identity.* A disk notes the use of each of its descriptors in its state memory, before the
//! keeper has it ([`Ledger`]): names here are short and have no meaning.
//!
//! *The order.* Messages of a process are handled in the order in which they were sent. A barrier
//! ([`KeeperClient::barrier`]) is answered when all earlier messages have been handled: only then a
//! descriptor is kept. No call here waits for it.
//!
//! *Trust.* The serving process may have been taken over by a client. The keeper takes from it
//! well-formed messages only, a bounded number of descriptors, and no kind whose `close` asks a
//! file system (`receive::kind`). It closes no socket of a client as the last, for its owner does
//! so later, or has another process do it. The keeper reads no kept descriptor.
//!
//! No unsafe code.
#![forbid(unsafe_code)]

mod child;
mod client;
mod handover;
mod keeper;
mod last;
mod ledger;
mod link;
mod packet;
mod restart;
mod resume;
mod signals;
mod standby;
mod store;
mod text;
mod upgrade;

pub use client::{KeepError, KeeperClient};
pub use handover::{ArrivalError, Handover, RestartHistory};
pub use keeper::{KeepFailed, Keeper, KeeperExit, PassedDescriptor};
pub use last::outlive;
pub use ledger::Ledger;
pub use link::{Keeping, Link, UpgradeError};
pub use restart::Pace;
pub use resume::{MAX_STATE, ResumeError};
pub use store::may_be_kept;
pub use text::{LASTING, MAX_NAME, OLDEST_PROTOCOL, PROTOCOL, is_name};
pub use upgrade::{MayGo, ProgramSelector, Programs, REPLACED};
