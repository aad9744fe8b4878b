//! Images of Ceph clusters as volumes, by librbd.
//!
//! An [`RbdVolume`] is an image of a pool, or a snapshot of one. The libraries are loaded when the
//! first is opened; a program that opens none needs none.
//!
//! What may be touched here: the cluster that a user named, by librados and librbd, and their
//! configuration and key. What may not: NVMe, guest memory but through the segments of requests.
//! `unsafe` is in `ffi` alone.
//!
//! # How data passes through
//!
//! ```text
//! VolumeQueue::submit(Request) -> rbd_aio_* (the library copies what is written) --> cluster
//!                                                                                      |
//! VolumeQueue::poll -> copy what was read -> Completion <- volume::Inbox <- library's thread
//! ```
//!
//! Nothing here waits for the cluster but threads of its own: one that connects (`connect`), and
//! those that ask for sizes. The library has no memory of a guest's after the call that brought a
//! request: what is read comes into memory of this process first. So a request can be given up, by
//! a reset or the end, although the cluster does not answer; whatever changes something and was
//! given up holds up all that comes later, until the cluster has ended it.
//!
//! The library's cache is off: what a guest was told to be written is in the cluster, also when
//! this process is killed and its guest goes on.
#![deny(unsafe_code)]

mod connect;
mod error;
mod ffi;
mod owner;
mod queue;
mod settings;
#[cfg(test)]
mod tests;
mod url;
mod volume;

pub use error::RbdError;
pub use ffi::{LIBRARY_PATH, LibraryError, Name};
pub use settings::{Ports, Settings};
pub use url::{RBD, Reach, is_image, kind, reach};
pub use volume::{LockMode, RbdOptions, RbdVolume};
