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
//! This room holds the path and nothing else: a [`DirectQueue`] takes commands that were fetched
//! by the one who serves the guest, and hands back how they ended. It knows no virtual
//! controller, no socket and no interrupt of the guest's. What it may touch: a
//! [`driver::QueuePair`] that was reserved for it, and guest memory through the guest's own
//! [`dma::DmaMap`]. What it may not: anything that would let a guest name a block outside its
//! [`Slice`], or an address outside the memory that its own map holds. Neither can be said by a
//! command that leaves this room, whatever came in: submission entries are made here from
//! nothing, and every address in them came out of a table.
//!
//! # How long memory lives
//!
//! A command in flight pins the guest's map, so that an unmap waits for it, and holds the table of
//! registered memory that its addresses are from, so that the device keeps the mapping. When the
//! device is gone and may still write, both are kept for ever.
//!
//! # Threads
//!
//! Everything belongs to one worker thread, which owns its physical queue pairs; there is no lock,
//! no allocation and no atomic read-modify-write on a command's way. [`QueueStats`] are written by
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
pub use pool::Pool;
pub use queue::{DirectQueue, Waker};
pub use slice::{Geometry, Slice, SliceError};
pub use stats::QueueStats;
