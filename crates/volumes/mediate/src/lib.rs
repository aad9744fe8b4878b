//! Mediation: a guest's commands on a slice of a physical device, queue to
//! queue, with no copy of data.
//!
//! ```text
//! command, copied from the guest's queue
//!    |  check:      namespace, opcode, LBA range of the slice
//!    |  translate:  guest address -> window of the guest's DMA map -> memory registered with the device -> its address
//!    v
//! physical queue pair: identifier with a sequence, list pages of its own, one doorbell for a batch
//!    |
//!    v  completion: status and dword 0, for the guest's own command; never the device's queue or head
//! guest's completion queue
//! ```
//!
//! This crate implements only the command path: a [`DirectQueue`] takes commands fetched by the
//! guest's server, and returns their results. Virtual controllers, sockets and guest interrupts are
//! out of scope. It uses a [`driver::QueuePair`] that was reserved for it, and guest memory through
//! the guest's own [`dma::DmaMap`]. No submitted command can name a block outside its [`Slice`], or
//! an address outside the memory of its own map, for any input. Submission entries are built here
//! from zeroes, and every address in them comes from a table.
//!
//! # Lifetime of memory
//!
//! An outstanding command pins the guest's map, so that an unmap waits for it. It also holds the
//! table of registered memory that its addresses are from, so that the device keeps the mapping.
//! When the device is lost and may still write, both are kept for ever.
//!
//! # Threads
//!
//! All state belongs to one worker thread, which owns its physical queue pairs; there is no lock,
//! no allocation and no atomic read-modify-write on a command's path. [`QueueStats`] are written by
//! that thread and read by any.
#![forbid(unsafe_code)]

mod bounce;
mod check;
mod entry;
mod flight;
mod lane;
mod options;
mod pool;
mod queue;
mod slice;
mod stats;
mod translate;

pub use options::DirectOptions;
pub use pool::QueuePairPool;
pub use queue::{DirectQueue, Waker};
pub use slice::{Geometry, Slice, SliceError};
pub use stats::QueueStats;
