//! Namespaces of remote NVMe subsystems as volumes, by NVMe over TCP.
//!
//! A [`FabricsVolume`] is a namespace behind one portal or several (paths), each with a controller
//! of the same subsystem. The protocol itself is in the crate `nvme-tcp`.
//!
//! This crate accesses sockets to the portals that a user named, and the files with this host's
//! identity. It reaches guest memory only through the segments of requests.
//!
//! # How data passes through
//!
//! ```text
//! VolumeQueue::submit(Request) -> command, or several -> a path (ANA state, policy)
//!                                                          |  staged: capsules, guest memory
//!                                                          |  push: one sendmsg for a batch
//!                                                          v
//!                                            worker's ring (volume::RingStream) <---> controller
//!                                                          |  one recvmsg for many answers
//! VolumeQueue::poll -> Completion <--- nvme_tcp::Answers <-'  (large data: into guest memory)
//!
//! path's thread: Connect, Identify, I/O queues for the workers, Keep Alive, events, reconnecting
//! ```
//!
//! When a path is lost, the remaining paths are used at once, and the path's thread reconnects it.
//! Commands that were sent on it and not completed are sent again: those that change no data at
//! once, the rest when the old association has certainly ended (module `path`).
#![forbid(unsafe_code)]

mod connect;
mod discovery;
mod identity;
mod kind;
mod options;
mod path;
mod queue;
mod shared;
mod subsystem;
mod volume;

pub use connect::{ConnectError, ConversationError};
pub use discovery::{Discovered, discover};
pub use identity::{HostIdentity, local as local_identity};
pub use kind::{NVME_TCP, NvmeTcp};
pub use options::{FabricsOptions, Policy};
pub use subsystem::Subsystem;
pub use volume::FabricsVolume;
