//! Zoned namespaces: every status, appends that are in flight together, resets, reports, what waits
//! for the table, what the next process finds, and all of that with several workers, and with
//! several controllers of a subsystem.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "zones/areas.rs"]
mod areas;
#[path = "zones/commands.rs"]
mod commands;
mod common;
#[path = "zones/history.rs"]
mod history;
#[path = "zones/lasting.rs"]
mod lasting;
#[allow(dead_code)]
#[path = "migration/other_worker.rs"]
mod other_worker;
#[path = "zones/shared.rs"]
mod shared;
#[allow(dead_code)]
#[path = "reservations/world.rs"]
mod subsystem;
#[path = "zones/team.rs"]
mod team;
#[path = "zones/workers.rs"]
mod workers;
#[path = "zones/world.rs"]
mod world;
