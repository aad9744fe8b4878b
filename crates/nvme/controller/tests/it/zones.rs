//! Zoned namespaces: every status, appends that are in flight together, resets, reports, what waits
//! for the table, what the next process finds, and all of that with several workers, and with
//! several controllers of a subsystem.

mod areas;
mod commands;
mod history;
mod lasting;
use crate::migration::other_worker;
mod shared;
use crate::reservations::world as subsystem;
mod team;
mod workers;
mod world;
