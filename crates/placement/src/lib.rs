//! Flexible Data Placement of a namespace ("NVMe Base 2.1", 8.1.10): its placement handles, what is
//! left of the reclaim unit that each of them refers to, and what has happened to them.
//!
//! [`Placement`] is the state of one Endurance Group with one namespace and one reclaim group. A
//! write names a placement handle, or none, or one that is not there ([`Placement::choose`]), and
//! takes its blocks from the reclaim unit of that ([`Placement::write`]); where the unit ends, the
//! next one begins. The host begins a new one when it likes ([`Placement::renew`]).
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
//! The state is a [`table`] of words, each of which counts by itself: any number of threads change
//! them at a time, without a lock, and the caller may have them in memory that outlasts the
//! process. What they say is believed in nothing, for others may write them, too: a number out of
//! its range is taken for the nearest one within.
//!
//! *What may not be here:* I/O, queues, commands in flight, locks.
#![forbid(unsafe_code)]

mod event;
mod geometry;
mod state;
pub mod table;

pub use event::{Event, EventSet, SUPPORTED_EVENTS};
pub use geometry::{Geometry, GeometryError, MAX_HANDLES, MAX_UNIT};
pub use state::{Chosen, Placement, Writer};
pub use table::{Identity, Row, TableError, Words};
