//! A FUSE file system for tests: disks with the faults of real ones, below all layers of the
//! kernel.
//!
//! [`Mount`] mounts a file system and transfers its messages; [`RequestHandler`] answers them.
//! [`Disk`] is one file in memory that keeps unflushed data apart: it can hold back requests, fail
//! them, answer late, and lose power ([`Disk::cut`]).
//!
//! For tests only. It needs root and `/dev/fuse`; a mount that fails is an error, for the test to
//! skip. Nothing here is `unsafe`: the mount is rustix's, and messages are bytes.
//!
//! # Deadlocks between a process and its server
//!
//! A process that waits for its own server cannot be killed: the kernel ends the connection when
//! the descriptor is closed, which happens when the process's last thread has ended. So the process
//! that serves must not be the one that waits without end: tests serve, and processes that they
//! start use the disk.
#![forbid(unsafe_code)]
// For tests, which show the use of each item.
#![allow(clippy::missing_errors_doc)]

mod disk;
mod message;
mod mount;
mod random;

pub use disk::{Cut, Disk, Fault, Log, RequestKind, SECTOR};
pub use message::{Answer, Errno, Node, Operation, Request, op};
pub use mount::{Mount, RequestHandler, Sender};
pub use random::Random;
