//! NBD servers as volumes.
//!
//! An [`NbdVolume`] is an export of a server (nbdkit, qemu-nbd, qemu-storage-daemon, ...), reached
//! by a Unix socket or by TCP, without TLS. Module [`protocol`] implements the protocol without
//! touching a socket.
//!
//! This crate accesses sockets to the servers that a user named. It opens no files, contains no
//! NVMe code, and reaches guest memory only through the segments of requests.
//!
//! # How data passes through
//!
//! ```text
//! VolumeQueue::submit(Request) -> command, or several ------> staged: headers, guest memory
//!                                                                 |  push: one sendmsg for a batch
//!                                                                 v
//!                                              worker's ring (volume::RingStream) <---> server
//!                                                                 |  one recvmsg for many replies
//! VolumeQueue::poll -> Completion <--- protocol::Replies <---'  (large data: into guest memory)
//! ```
//!
//! A thread replaces a connection that breaks. Outstanding commands are sent again, or fail if that
//! takes too long. Reads, writes, zeroing and trimming may be repeated. After replying to a write,
//! the server is responsible for it even before a flush.
#![forbid(unsafe_code)]

mod connect;
mod export;
mod kind;
pub mod protocol;
mod queue;

pub use connect::{ConnectError, NbdServer, PORT};
pub use export::{NbdOptions, NbdVolume};
pub use kind::{NBD, NBD_UNIX, Nbd};
