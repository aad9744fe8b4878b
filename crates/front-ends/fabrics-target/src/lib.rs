//! NVMe over TCP target: exports volumes to other hosts.
//!
//! A [`Target`] is a subsystem at a port. A [`TargetListener`] accepts its connections and reads
//! their Connect. A host's Admin queue becomes an [`Association`], which may be on another worker,
//! and its I/O queues follow it there. Both are front-ends of a worker.
//!
//! The controller of an association is that of the crate `controller`, the same as for guests. This
//! crate gives it queues in memory of this process, and turns capsules into entries and entries
//! into capsules. The protocol on the wire is in the crate `nvme-tcp`.
//!
//! This crate accesses sockets of hosts, which are not trusted. It opens no files, uses volumes
//! only through their controllers, and does not access the inside of a controller.
//!
//! # How data passes through
//!
//! ```text
//! host ---> socket on the worker's ring ---> nvme_tcp::Requests ---> slot, block of memory
//!                                                                      |  SQ ring, doorbell
//!                                                                      v
//!                                                           controller::Controller -> volume
//!                                                                      |  CQ ring
//! host <--- one sendmsg for a batch <--- C2HData, CapsuleResp <--------'
//! ```
#![forbid(unsafe_code)]

mod association;
mod authentication;
mod decide;
mod discovery;
mod handshake;
mod link;
mod listener;
mod members;
mod memory;
mod queue;
mod rings;
mod slots;
mod stats;
mod target;

pub use association::{Association, AssociationError, NewAssociation};
pub use authentication::HostKey;
pub use listener::{Launch, ListenerError, TargetListener};
pub use stats::{EventCounter, TargetStats};
pub use target::{Target, TargetConfig, TargetLimits};
