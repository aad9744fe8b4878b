//! Zoned namespaces: every status, appends that are in flight together, resets, reports, what waits
//! for the table, and what the next process finds.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "zones/areas.rs"]
mod areas;
#[path = "zones/commands.rs"]
mod commands;
mod common;
#[path = "zones/lasting.rs"]
mod lasting;
#[path = "zones/world.rs"]
mod world;
