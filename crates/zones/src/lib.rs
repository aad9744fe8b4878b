//! Zones of a namespace ("NVMe Zoned Namespace Command Set 1.1"): what may be written where, and
//! what becomes of the zone by that.
//!
//! [`Zones`] is the state of one namespace: of each zone its state and its write pointer, and how
//! many zones are open and active. A write is checked ([`Zones::check_write`],
//! [`Zones::check_append`]) before anything is done about it, and then counts ([`Zones::write`]);
//! the actions of Zone Management Send are [`Zones::act`], and [`Zones::begin_reset`] with
//! [`Zones::end_reset`], between which the caller takes the zone's data away.
//!
//! ```
//! use zones::{Action, Geometry, Refusal, State, Zones};
//!
//! let (max_open, max_active) = (Some(2), None);
//! let geometry = Geometry { zones: 4, size: 16, capacity: 12, max_open, max_active, zrwa: None };
//! let mut zones = Zones::new(geometry)?;
//! zones.write(0, 8)?;
//! assert_eq!(zones.check_write(4, 1), Err(Refusal::InvalidWrite));
//! // Where an append goes to, the namespace says.
//! assert_eq!(zones.check_append(0, 4)?, 8);
//! zones.write(8, 4)?;
//! assert_eq!(zones.get(0).map(|zone| zone.state), Some(State::Full));
//! zones.act(1, Action::Open)?;
//! assert_eq!(zones.open(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A zone that was opened for it ([`Zones::open_with_zrwa`]) has a Zone Random Write Area
//! ([`Zrwa`]): a write that ends in it leaves the write pointer where it is, one that ends behind
//! it takes the pointer along, and so does [`Zones::flush`].
//!
//! Numbers are of logical blocks, and begin at the namespace's first one. A table ([`table`]) is
//! the state as words, one for each zone, each of which counts by itself: the caller keeps it, and
//! stores those that have changed ([`Zones::take_changed`]).
//!
//! *What may not be here:* I/O, queues, commands in flight, locks.
#![forbid(unsafe_code)]

mod geometry;
mod state;
pub mod table;
mod types;

pub use geometry::{Geometry, GeometryError, MAX_ZONES, Zrwa};
pub use state::{Reported, Zone, Zones};
pub use types::{Action, Filter, Refusal, State};
