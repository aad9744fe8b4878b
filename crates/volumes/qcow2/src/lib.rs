//! qcow2 images as volumes.
//!
//! A [`Qcow2Volume`] is an image in a file or on a block device, with the chain of backing files
//! behind it: qcow2 of versions 2 (read-only) and 3, with clusters compressed by zlib; raw files at
//! the chain's lower end. Unsupported features are refused with an error that names them
//! ([`format`](mod@format)). Images are made, converted and repaired by `qemu-img`.
//!
//! This crate accesses the files that a user named, and backing files where the user allowed them.
//! It contains no NVMe code, reaches guest memory only through the segments of requests, and has no
//! `unsafe`.
//!
//! # How data passes through
//!
//! ```text
//! FastPath::start -> slice of an L2 table at hand -> one place in one file --> that file's queue
//!       |                                            (under the request's own tag, on the ring)
//!       `-> anything else: a task (lanes) --> allocation, copying, zeroing, decompression
//!                                             by operations on the same ring (volume::Lane)
//! ```
//!
//! All queues of an image share an `Image`. It has tables (`tables`) with entries that are read
//! without a lock, and the state for writing (`image::Writer`), which also defines the order of
//! writes to the disk. Entries of new clusters are written many at a time where a journal records
//! them for the next process (`deferred`, `journal`); those that no image needs are removed
//! (`obsolete`). Clusters that were freed are used again when
//! no request can be on its way to them any more (`epoch`).
#![forbid(unsafe_code)]

mod blocking;
mod chain;
mod check;
mod deferred;
mod epoch;
mod error;
pub mod format;
mod image;
mod inflate;
mod journal;
mod kind;
mod lanes;
mod obsolete;
mod queue;
mod ranges;
mod read;
mod refcounts;
mod store;
mod structure;
mod tables;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod volume;
mod wait;
mod write;

pub use chain::Qcow2Options;
pub use error::ImageError;
pub use journal::JOURNAL_VERSION;
pub use kind::{QCOW2, kind};
pub use obsolete::remove_obsolete_journals;
pub use volume::Qcow2Volume;
