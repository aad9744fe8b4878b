//! Exports a volume as a block device of the host, `/dev/ublkbN`, through the kernel's ublk driver.
//!
//! This crate passes requests of the kernel's block layer to a [`Volume`](volume::Volume).
//! [`NewDisk`] creates the device. Once started, it is a [`Disk`]; its queues are passed to workers
//! (each [`Queue`] is a front-end). [`remove`] deletes the device of a killed process. Scope:
//! `/dev/ublk-control`, `/dev/ublkcN`, io_uring. NVMe and guests are out of scope. `unsafe` is
//! confined to `sys`.
//!
//! The library libublk was rejected: it brings eighty crates, generates bindings with libclang, and
//! has its own executor, whereas a front-end of the worker's loop is needed. The interface is
//! small: some control commands, and two commands for requests (`linux/ublk_cmd.h`,
//! `Documentation/block/ublk.rst`).
//!
//! # Flow of data
//!
//! ```text
//! block layer -> ublk_drv -> completion of a fetch command (a request's tag) -> queue: descriptor -> volume::Request
//!                   |                                                                                  |
//!                   |<- the kernel copies the data to or from the tag's buffer                         v
//!                   `<------------ commit-and-fetch command (result) <---------------- completion of the volume
//! ```
//!
//! Each queue's buffers are one memory, aligned for direct I/O and registered with NVMe devices of
//! the volume, so that the kernel's copy is the only one. (The driver can leave that copy to the
//! process, by reads of `/dev/ublkcN`: one more operation for each request. Its zero copy provides
//! buffers that only io_uring operations can use, not a volume.)
#![deny(unsafe_code)]

mod control;
mod disk;
mod error;
mod params;
mod queue;
mod stats;
mod sys;
mod uapi;

pub use disk::{Disk, DiskOptions, MAX_IO, NewDisk, QueueSetup, QueueSetupFailed, remove};
pub use error::UblkError;
pub use queue::Queue;
pub use stats::{DiskStats, QueueStats};
