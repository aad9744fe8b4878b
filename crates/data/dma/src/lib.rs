//! A device's view of guest memory.
//!
//! A VMM hands over memory files; [`Memory`] maps each of them once. [`DmaMap`] holds the windows
//! through which one device sees them, keyed by IOVA, and belongs to one worker thread. A command's
//! data pointer (module [`prp`] or [`sgl`]) is walked through the map into a [`SegmentList`]: host
//! pieces, in order. They stay valid until the list is cleared, even if their windows are unmapped.
//! Queues ([`Ring`], [`Area`]) and shadow doorbells ([`Cells`]) outlive a command; they are
//! resolved once and hold the memory itself. [`PrivateMemory`] belongs to no guest: a volume in
//! memory keeps its data there.
//!
//! All input from the guest is hostile: addresses, lengths, lists, and the memory, which changes
//! while it is read. Its file may shrink (module [`sigbus`]). Guest memory is therefore never a
//! Rust slice: it is copied by raw pointer, once, or accessed as atomics.
//!
//! `unsafe` is limited to the modules that allow it below. This crate has no knowledge of queue
//! semantics, commands or vfio-user: it takes addresses and bytes.
//!
//! # Example
//!
//! A device reads the memory described by a command's PRP entries:
//!
//! ```
//! use dma::{Access, DmaMap, Memory, Prot, SegmentList, prp};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ram = Memory::anonymous(1 << 20)?; // else Memory::from_fd, with the VMM's memory file
//! let mut map = DmaMap::new();
//! map.map(0x8000_0000, 1 << 20, Some((ram.clone(), 0)), Prot::RW)?;
//! ram.write(0x2ffc, b"data")?;
//!
//! // Eight bytes, from 4 below the end of a page on; PRP2 is the next page.
//! let mut list = SegmentList::default();
//! prp::walk(&map, 0x8000_2ffc, 0x8000_3000, 8, 4096, Access::Read, &mut list)?;
//! let mut data = [0; 8];
//! assert_eq!(list.copy_to(0, &mut data), 8);
//! assert_eq!(&data, b"data\0\0\0\0");
//!
//! // The list holds the memory: an unmap ends when the list is cleared.
//! map.unmap(0x8000_0000, 1 << 20)?;
//! assert!(!map.quiesced());
//! list.clear();
//! assert!(map.quiesced());
//! assert!(prp::walk(&map, 0x8000_2ffc, 0, 4, 4096, Access::Read, &mut list).is_err());
//! # Ok(()) }
//! ```
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod area;
mod backing;
#[allow(unsafe_code)]
mod buffer;
mod cache;
#[allow(unsafe_code)]
mod cells;
mod device;
mod dirty;
#[allow(unsafe_code)]
pub mod dumps;
mod epoch;
mod error;
#[allow(unsafe_code)]
pub mod heap;
#[allow(unsafe_code)]
pub mod lines;
#[allow(unsafe_code)]
mod list;
#[allow(unsafe_code)]
mod map;
mod mapper;
mod memories;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod pace;
#[allow(unsafe_code)]
pub mod prefetch;
#[allow(unsafe_code)]
mod private;
pub mod prp;
#[allow(unsafe_code)]
mod quota;
#[allow(unsafe_code)]
mod racy;
#[allow(unsafe_code)]
mod ring;
#[allow(unsafe_code)]
mod rows;
mod segment;
pub mod sgl;
#[allow(unsafe_code)]
mod shared;
#[allow(unsafe_code)]
pub mod sigbus;
mod table;
#[cfg(test)]
mod tests;
#[allow(unsafe_code)]
mod view;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;
mod windows;

pub use area::{Area, Field16, Fields16, Pairs32, Pairs64};
pub use buffer::Buffer;
pub use cache::{Import, MemoryCache, PendingImport};
pub use cells::Cells;
pub use epoch::Pin;
pub use error::{DmaError, MapError, MemoryError};
pub use list::SegmentList;
pub use map::{Access, DmaMap, PAGE, Prot, Window};
pub use mapper::wait_for_mappings;
pub use memory::Memory;
pub use private::{PrivateMemory, WeakMemory};
pub use prp::PrpError;
pub use quota::MemoryLimits;
pub use ring::{CqeRun, Ring};
pub use rows::{ROW, Row, Rows};
pub use segment::Segment;
pub use sgl::SglError;
pub use shared::SharedPages;
pub use view::{GuestSlice, View};
