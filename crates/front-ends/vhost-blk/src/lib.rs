//! Volumes as virtio block devices, for guests that have a virtio driver and a
//! VMM that speaks vhost-user.
//!
//! A [`Backend`] serves one [`Volume`](volume::Volume) on a Unix socket, as a front-end of a
//! [`worker::Worker`] ([`Server`] is a worker with one of them): the front-end of the protocol
//! (QEMU's `vhost-user-blk-pci`, Cloud Hypervisor's `vhost_user=true` disks) hands over the guest's
//! memory files and the addresses of its virtqueues; from then on requests come by memory, and data
//! moves between the volume and the guest's memory directly.
//!
//! ```text
//! front-end -- socket --> stream -> session/messages   features, configuration space, memory table, rings
//!                                        |
//! guest -- available ring --> run -> chain -> request -> SegmentList -> VolumeQueue   (io_uring reads into guest RAM)
//!   ^         kick                                                          |
//!   +-- used ring, interrupt <-- run <------------------- completion <------+
//! ```
//!
//! Scope: the socket, eventfds, and guest memory through `dma`. Files and devices (which belong to
//! `volume`), NVMe, and `unsafe` are out of scope. Guest and front-end are hostile: all their data
//! is copied once and checked. A queue that its guest has broken stops, and a front-end that breaks
//! the protocol is disconnected. They cannot end the process.
//!
//! This crate implements the protocol itself, without threads and locks on the way of a request,
//! since `vhost`'s own server blocks in the middle of a message and answers at once. Here a worker
//! polls rings and waits for completions. GET_VRING_BASE and a new memory table are answered only
//! when no outstanding request can access the removed memory. The tests use `vhost`'s front-end.
//!
//! # Example
//!
//! A disk in memory, for any front-end that connects:
//!
//! ```
//! use std::os::unix::net::{UnixListener, UnixStream};
//! use std::sync::Arc;
//! use vhost_blk::{DiskOptions, Export, Server};
//! use volume::{Io, IoOptions, MemVolume};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("disk.sock");
//! let listener = UnixListener::bind(path)?;
//! listener.set_nonblocking(true)?;
//! let export = Export {
//!     volume: Arc::new(MemVolume::new(64 << 20)?),
//!     disk: DiskOptions { serial: "ROOT".into(), ..DiskOptions::default() },
//!     max_in_flight: 1024,
//!     memory: dma::MemoryLimits::DEFAULT,
//!     listener: listener.into(),
//!     connects: worker::ConnectRate::default(),
//!     intake: None,
//!     attach: None,
//!     resized: None,
//!     span: tracing::Span::none(),
//! };
//! // It serves until its end of a socket pair becomes readable.
//! let (stop, stopped) = UnixStream::pair()?;
//! let options = worker::Options { stop: Some(stopped.into()), ..Default::default() };
//! let mut server = Server::new(export, Io::new(IoOptions::default()), options)?;
//! drop(stop); // at once, here
//! server.run()?;
//! # Ok(()) }
//! ```
#![forbid(unsafe_code)]

mod backend;
mod chain;
mod depth;
mod disk;
mod error;
mod eventfd;
mod import;
mod inflight;
mod log;
mod memory;
mod messages;
mod pins;
mod plain;
#[cfg(test)]
mod plain_properties;
#[cfg(test)]
mod properties;
mod queue;
mod request;
mod ring;
mod run;
mod server;
mod session;
mod stats;
mod stream;
mod used;
mod virtio;
pub mod wire;

pub use backend::{Backend, Export, intake};
pub use disk::DiskOptions;
pub use error::Error;
pub use memory::Attach;
pub use server::Server;
pub use stats::{Counter, QueueStats, Stats};
pub use virtio::{feature, kind};
