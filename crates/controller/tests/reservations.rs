//! Controllers of one subsystem and the reservations of their namespace: commands, what they do to
//! others' reads and writes, notifications, and hosts that mean harm; and by which of them a
//! namespace is reached (ANA).
//!
//! `VNVME_RESERVATION_STEPS` says how many steps the random histories have (20,000), and
//! `VNVME_FENCING_LOOPS` how often hosts fence each other (1,000).
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "reservations/ana.rs"]
mod ana;
mod common;
#[path = "reservations/fencing.rs"]
mod fencing;
#[path = "reservations/histories.rs"]
mod histories;
#[path = "reservations/hostile.rs"]
mod hostile;
#[path = "reservations/says.rs"]
mod says;
#[path = "reservations/stores.rs"]
mod stores;
#[path = "reservations/world.rs"]
mod world;
