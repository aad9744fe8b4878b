//! A load generator in the manner of fio: one job on one target.
//!
//! [`job`] says what to do, [`pattern`] where and with what data; [`run`] runs a thread for each
//! queue on a [`lane::Target`]; [`stats`] is what comes out, [`fio`] its layout. Targets:
//! [`device`] (an NVMe controller through our driver: VFIO, a vfio-user socket, or a controller in
//! this process) and [`uring`] (a file or block device, straight). [`signature`] keeps a load from
//! overwriting what a target holds; [`progress`] shows a person that it goes on.
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
//! *What may be touched here.* Any target, as its user does: through the driver, or a system call.
//! *What may not.* The inside of a controller or a server. `unsafe` is in [`uring`] only.
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

pub use run::{NothingEnded, Watch, pin, run, waited};
