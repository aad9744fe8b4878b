//! What a daemon tells of itself in numbers.
//!
//! *What this room is for.* The threads that serve count ([`probes::IoRecord`] and its neighbours);
//! somebody who asks gets a [`Snapshot`]: plain numbers of one moment, which never go down but by
//! wrapping. It goes out as JSON (for `vnvme top` and the page), and as Prometheus' text
//! ([`Snapshot::prometheus`]), whose metrics stand in one table ([`METRICS`]), from which
//! documentation and tests are made. *What may not be done here.* Nothing is counted, opened or
//! served.
//!
//! ```text
//! IoRecord, QueueStats, Load  -(read, no lock)->  Snapshot  -> JSON  -> top, page
//!                                                           `> text  -> Prometheus
//! ```
#![forbid(unsafe_code)]

mod catalog;
mod distribution;
#[cfg(test)]
mod documents;
mod prometheus;
mod snapshot;
mod text;

pub use catalog::{METRICS, Metric, Type};
pub use distribution::Distribution;

/// The page that shows a daemon's disks in a browser: one file, which loads no other, and asks for
/// `v1/stats` beside it every second.
pub const PAGE: &str = include_str!("page.html");

pub use snapshot::{
    Device, Disk, DiskKind, Limits, Namespace, OnError, Operations, Process, Queue, Snapshot,
    Worker,
};
pub use text::{CONTENT_TYPE, Exposition};
