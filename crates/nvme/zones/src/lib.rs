//! Zones of a namespace ("NVMe Zoned Namespace Command Set 1.1"): rules for writes, and the state
//! changes of zones that follow from them.
//!
//! [`Zones`] is the state of one namespace: the state and write pointer of each zone, and the
//! number of open and active zones. A write is checked ([`Zones::check_write`],
//! [`Zones::check_append`]) before it is executed, and then counted ([`Zones::write`]). The actions
//! of Zone Management Send are [`Zones::act`], and [`Zones::begin_reset`] with
//! [`Zones::end_reset`], between which the caller discards the zone's data.
//!
//! ```
//! use zones::{Action, Geometry, ZoneRefusal, ZoneState, Zones};
//!
//! let (max_open, max_active) = (Some(2), None);
//! let geometry = Geometry { zones: 4, size: 16, capacity: 12, max_open, max_active, zrwa: None };
//! let mut zones = Zones::new(geometry)?;
//! zones.write(0, 8)?;
//! assert_eq!(zones.check_write(4, 1), Err(ZoneRefusal::InvalidWrite));
//! // Where an append goes to, the namespace says.
//! assert_eq!(zones.check_append(0, 4)?, 8);
//! zones.write(8, 4)?;
//! assert_eq!(zones.get(0).map(|zone| zone.state), Some(ZoneState::Full));
//! zones.act(1, Action::Open)?;
//! assert_eq!(zones.open(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A zone that was opened for it ([`Zones::open_with_zrwa`]) has a Zone Random Write Area
//! ([`Zrwa`]). A write that ends in the area leaves the write pointer where it is. A write that
//! ends behind it moves the write pointer along, and so does [`Zones::flush`].
//!
//! Block numbers are of logical blocks, and begin at the namespace's first one. A table ([`table`])
//! is the encoded state, with one word for each zone, each valid by itself. The caller keeps it,
//! and stores the words that have changed ([`Zones::take_changed`]).
//!
//! This crate contains no I/O, queues, commands in flight, or locks.
#![forbid(unsafe_code)]

mod geometry;
mod state;
pub mod table;
mod types;

pub use geometry::{Geometry, GeometryError, MAX_ZONES, Zrwa};
pub use state::{Reported, Zone, Zones};
pub use types::{Action, Filter, ZoneRefusal, ZoneState};
