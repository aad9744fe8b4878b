//! Common parts of volumes on NVMe controllers, whatever the transport: properties of a namespace,
//! and the errors of failed commands.
//!
//! This crate performs no I/O.
#![forbid(unsafe_code)]

mod namespace;
mod status;

pub use namespace::{Atomicity, Namespace};
pub use status::status_error;
