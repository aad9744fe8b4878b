//! Flexible Data Placement of a namespace ("NVMe Base 2.1", 8.1.10): its placement handles, the
//! space left in the reclaim unit of each handle, and the events on them.
//!
//! [`Placement`] is the state of one Endurance Group with one namespace and one reclaim group. A
//! write carries a valid placement identifier, an invalid one, or none ([`Placement::choose`]). It
//! takes its blocks from the reclaim unit of the resulting handle ([`Placement::write`]); at the
//! end of a unit the next one begins. The host may begin a new unit at any time
//! ([`Placement::renew`]).
//!
//! ```
//! use placement::{Geometry, Identity, Placement, Writer, table};
//!
//! let geometry = Geometry { handles: 2, unit: 16, block: 512 };
//! let words = table::empty(geometry, Identity { namespace: [1; 16] });
//! let placement = Placement::new(geometry, words)?;
//! let chosen = placement.choose(Some(1));
//! placement.write(chosen.handle, 12, Writer::Host);
//! placement.write(chosen.handle, 12, Writer::Host);
//! assert_eq!((placement.left(0), placement.left(1)), (16, 8));
//! assert_eq!(placement.choose(Some(7)).handle, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The state is a [`table`] of words, each valid by itself. Any number of threads change them at a
//! time, without a lock, and the caller may have them in memory that outlives the process. Their
//! values are not trusted, because other processes may write them, too: a number out of its range
//! counts as the nearest one within.
//!
//! This crate contains no I/O, queues, commands in flight, or locks.
#![forbid(unsafe_code)]

mod event;
mod geometry;
mod state;
pub mod table;

pub use event::{Event, EventSet, SUPPORTED_EVENTS};
pub use geometry::{Geometry, GeometryError, MAX_HANDLES, MAX_UNIT};
pub use state::{Chosen, Placement, Writer};
pub use table::{Identity, Row, TableError, WordStore};
