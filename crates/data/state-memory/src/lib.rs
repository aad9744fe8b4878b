//! State that a disk leaves to the next process that serves it: the layout of its state memory.
//!
//! A disk's *state memory* is a memory file (memfd, sealed against any change of its size), which a
//! keeper holds beside the disk's other descriptors. The serving process stores there the state
//! that would otherwise be lost, in an order that allows its death between any two stores. The next
//! process reads it, and continues. This crate defines the layout: the writer of each byte, and the
//! store that makes it valid. Crates above interpret the bytes: `controller`'s control state, an
//! export's session.
//!
//! | section | writer | store that makes it valid |
//! |---|---|---|
//! | identity, session ([`Area`]) | the front-end's glue | its own business: bytes and words |
//! | control ([`Control`]) | the control half, whole | the sequence of the newer one of two buffers |
//! | marks ([`StateMemory::marks`]) | the control half, whole | as for control |
//! | windows ([`WindowTable`]) | the control half, by entry | the entry's first word, written last |
//! | descriptors ([`DescriptorTable`]) | the front-end's glue | as for windows |
//! | hot rows ([`StateMemory::hot`]) | the engine that has the queue | each word counts by itself |
//! | records ([`StateMemory::records`]) | the engine of that share | the record's own last word |
//!
//! *Order.* One thread writes each line, and no process reads it during that thread's life. When a
//! process is killed, its threads stop between two instructions: every store before that point is
//! in memory, and none after it. The program order is therefore sufficient on every processor;
//! `Release` stores prevent reordering by the compiler.
//!
//! *Memory.* The file has its maximum size from the start, and is sparse. Pages are allocated
//! before they are written ([`StateError::Memory`] if none are left), so that no store can fail.
//!
//! *Trust.* The writing process may have been compromised by a hostile guest. The next process
//! checks everything that it reads: sizes, offsets, checksums, numbers. An incomplete file is an
//! error, never a panic.
//!
//! *Out of scope:* NVMe, sockets, the keeper's protocol, `unsafe`.
#![forbid(unsafe_code)]

mod area;
mod control;
mod descriptors;
mod error;
mod layout;
mod ledger;
mod memory;
mod table;
mod windows;

pub use area::Area;
pub use control::Control;
pub use descriptors::{Descriptor, DescriptorKind, DescriptorTable};
pub use error::StateError;
pub use layout::{Layout, OLDEST_READ, VERSION};
pub use ledger::{DescriptorLedger, LedgerError, Ticket};
pub use memory::StateMemory;
pub use windows::{KeptMemory, KeptWindow, WindowTable};
