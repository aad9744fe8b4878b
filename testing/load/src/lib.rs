//! A load generator in the manner of fio: one job on one target.
//!
//! [`job`] describes the operation, [`pattern`] its offsets and data. [`run`] runs a thread for
//! each queue on a [`lane::Target`]. [`stats`] holds the results, and [`fio`] their layout.
//! Targets: [`device`] (an NVMe controller through the driver: VFIO, a vfio-user socket, or a
//! controller in this process), [`virtio`] (a vhost-user-blk export) and [`uring`] (a file or block
//! device, directly). [`signature`] keeps a load from overwriting a target's data; [`progress`]
//! shows the progress on a terminal.
//!
//! ```
//! use load::device::DeviceTarget;
//! use load::job::Job;
//!
//! let job = Job { depth: 4, ios: Some(1000), ..Job::default() };
//! let target = DeviceTarget::open("mem://16M", &job)?;
//! let measured = load::run(&target, &job, &mut ())?;
//! assert_eq!(measured.read.ios, 1000);
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! `vnvme bench TARGET` is this crate and a command line; the suites of crate `bench` run the same
//! jobs on servers of their own.
//!
//! *Scope.* Any target, with its user's interface: through the driver, or a system call. The inside
//! of a controller or a server is out of scope. `unsafe` is in [`uring`] only.
#![deny(unsafe_code)]

pub mod device;
pub mod fio;
pub mod job;
pub mod lane;
pub mod pattern;
pub mod progress;
mod run;
pub mod signature;
pub mod stats;
pub mod uring;
#[cfg(feature = "vhost-user-blk")]
pub mod virtio;

pub use run::{NothingEnded, Watch, pin, run, waited};
