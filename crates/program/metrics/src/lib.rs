//! Metrics of a daemon.
//!
//! The serving threads count ([`probes::IoRecord`] and its neighbours). A reader gets a
//! [`Snapshot`]: plain numbers of one moment, which never decrease except by wrapping. It is sent
//! as JSON (for `vnvme top` and the page), and as Prometheus' text ([`Snapshot::prometheus`]). Its
//! metrics are in one table ([`metrics()`]), from which documentation and tests are generated. This
//! crate counts, opens and serves nothing.
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
mod merged;
mod prometheus;
mod snapshot;
mod text;

pub use catalog::{INSTANCE_UP, KIND_COUNTERS, KindCounters, Metric, NVME_TCP, Type, metrics};
pub use distribution::Distribution;
pub use merged::MergedExposition;

/// Web page that shows the disks of a daemon. A single file that loads no others, and requests
/// `v1/stats` every second.
pub const PAGE: &str = include_str!("page.html");

pub use snapshot::{
    Device, Disk, Limits, Namespace, OnError, Operations, Process, Queue, Snapshot, Worker,
};
pub use text::{CONTENT_TYPE, Exposition};
