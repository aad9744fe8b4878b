//! Metadata and protection information of a namespace ("NVM Command Set 1.1", 5.2 and 5.3). The
//! crate generates and checks the tuples of the three guard formats, and defines the file with the
//! metadata beside the volume ([`table`]).
//!
//! ```
//! use protection::{Checks, Guard, Layout, Mismatch, Protection, StorageTag, Tags, Type};
//!
//! let storage = StorageTag::of(8);
//! let tuples = Protection { kind: Type::One, guard: Guard::Bits16, storage, first: false };
//! let layout = Layout { block: 512, metadata: 8, extended: false, protection: Some(tuples) };
//! layout.check()?;
//!
//! let (data, mut metadata) = ([7; 512], [0; 8]);
//! let tags = Tags { application: 0x1234, mask: 0xffff, block: 0x4200_0063 };
//! tuples.generate(&data, &mut metadata, tags);
//! assert_eq!(tuples.check(&data, &metadata, tags, Checks::ALL), Ok(()));
//! assert_eq!(tuples.check(&[8; 512], &metadata, tags, Checks::ALL), Err(Mismatch::Guard));
//! let other = Tags { block: 0x4300_0063, ..tags };
//! assert_eq!(tuples.check(&data, &metadata, other, Checks::ALL), Err(Mismatch::Storage));
//! # Ok::<(), protection::LayoutError>(())
//! ```
//!
//! This crate contains no I/O, commands, or guest memory.
#![forbid(unsafe_code)]

mod layout;
pub mod table;
mod tuple;

pub use layout::{Layout, LayoutError};
pub use tuple::{Checks, Guard, Mismatch, Protection, StorageTag, Tags, Type};
