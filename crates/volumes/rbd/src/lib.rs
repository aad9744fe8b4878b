//! Images of Ceph clusters as volumes, by librbd.
//!
//! An [`RbdVolume`] is an image in a pool, or a snapshot of one. The libraries are loaded when the
//! first image is opened, so other programs do not need them.
//!
//! This crate accesses the cluster that a user named, through librados and librbd, and their
//! configuration and key. It contains no NVMe code, and reaches guest memory only through the
//! segments of requests. `unsafe` is confined to `ffi`.
//!
//! # How data passes through
//!
//! ```text
//! VolumeQueue::submit(Request) -> rbd_aio_* (the library copies written data) --> cluster
//!                                                                                    |
//! VolumeQueue::poll -> copy of read data -> Completion <- volume::Inbox <- library's thread
//! ```
//!
//! Only threads of this crate wait for the cluster: one that connects (`connect`), and those that
//! query sizes. The library keeps no guest memory after the call that starts a request; reads use
//! memory of this process first. A reset or the end of the volume can therefore abandon a request
//! although the cluster does not answer. An abandoned request that changes data delays all later
//! ones, until the cluster has completed it.
//!
//! The library's cache is off: a write that was reported to the guest is in the cluster, even if
//! this process is killed and its guest continues.
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
pub use url::{RBD, Rbd};
pub use volume::{LockMode, RbdOptions, RbdVolume};
