//! What a disk leaves to the process that serves it next: the layout of its state memory.
//!
//! A disk's *state memory* is a memory file (memfd, sealed against any change of its size) which a
//! keeper holds beside the disk's other descriptors. The process that serves the disk writes there
//! what it would otherwise know alone, in an order such that it may die between any two stores; the
//! next one reads it, and goes on. This crate is the layout: who writes which bytes, and which
//! store makes them count. What the bytes say is the business of crates above: `controller`'s
//! control state, an export's session.
//!
//! | section | who writes | one store makes it count |
//! |---|---|---|
//! | identity, session ([`Area`]) | the front-end's glue | its own business: bytes and words |
//! | control ([`Control`]) | the control half, whole | the sequence of the newer one of two buffers |
//! | windows ([`WindowTable`]) | the control half, by entry | the entry's first word, written last |
//! | descriptors ([`DescriptorTable`]) | the front-end's glue | the same |
//! | hot rows ([`StateMemory::hot`]) | the engine that has the queue | each word counts by itself |
//! | records ([`StateMemory::records`]) | the engine of that share | the record's own last word |
//!
//! *Order.* One thread writes each line, and nobody reads it while that process lives. When a
//! process is killed, its threads stop between two instructions: every store before that point is
//! in memory, and none after it. So the order of the program is the order that counts, on every
//! processor; what the compiler may move is held in place by `Release` stores.
//!
//! *Memory.* The file is as large as it can ever need to be, and sparse. Pages are allocated before
//! they are written ([`StateError::Memory`] where there are none left), so that no store can fail.
//!
//! *Trust.* The state memory is written by a process that a hostile guest may have taken over. The
//! next one checks everything that it reads: sizes, offsets, checksums, numbers. A file that is
//! not whole is an error, never a panic.
//!
//! *What may not be here:* NVMe, sockets, the keeper's protocol, `unsafe`.
#![forbid(unsafe_code)]

mod area;
mod control;
mod descriptors;
mod error;
mod layout;
mod memory;
mod table;
mod windows;

pub use area::Area;
pub use control::Control;
pub use descriptors::{Descriptor, DescriptorKind, DescriptorTable};
pub use error::StateError;
pub use layout::{Layout, OLDEST_READ, VERSION};
pub use memory::StateMemory;
pub use windows::{KeptMemory, KeptWindow, WindowTable};
