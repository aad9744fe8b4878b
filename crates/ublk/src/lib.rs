//! A volume as a block device of the host, `/dev/ublkbN`, by the kernel's ublk driver.
//!
//! This room hands requests of the kernel's block layer to a [`Volume`](volume::Volume). The door
//! is [`NewDisk`], which makes the device. Started, it is a [`Disk`], which passes its queues to
//! workers (each [`Queue`] is a front-end), and removes the device again; [`remove`] takes away
//! what a killed process left. What may be touched here: `/dev/ublk-control`, `/dev/ublkcN`,
//! io_uring. What may not: NVMe, guests. `unsafe` stays in `sys`.
//!
//! The library for this (libublk) was weighed and left: it brings eighty crates, generates bindings
//! with libclang, and has an executor of its own where this needs a front-end of the worker's loop.
//! The interface is small: some control commands, and two commands for requests
//! (`linux/ublk_cmd.h`, `Documentation/block/ublk.rst`).
//!
//! # How data passes through
//!
//! ```text
//! block layer -> ublk_drv -> completion of a fetch command (a request's tag) -> queue: descriptor -> volume::Request
//!                   |                                                                                  |
//!                   |<- the kernel copies the data to or from the tag's buffer                         v
//!                   `<------------ commit-and-fetch command (result) <---------------- completion of the volume
//! ```
//!
//! Each queue's buffers are one memory of their own, aligned for direct I/O, and known to devices
//! below, so that there is one copy, the kernel's, and none more. (The driver can leave that copy
//! to the process, by reads of `/dev/ublkcN`: one more operation for each request. Its zero copy
//! gives buffers that only io_uring operations can name, not a volume.)
#![deny(unsafe_code)]

mod control;
mod disk;
mod error;
mod params;
mod queue;
mod stats;
mod sys;
mod uapi;

pub use disk::{Disk, DiskOptions, MAX_IO, NewDisk, QueueSetup, Told, remove};
pub use error::UblkError;
pub use queue::Queue;
pub use stats::{DiskStats, QueueStats};
