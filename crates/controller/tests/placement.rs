//! Flexible Data Placement: what is offered, where writes count, what is refused, and what the next
//! process finds.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "placement/commands.rs"]
mod commands;
mod common;
#[path = "placement/host.rs"]
mod host;
#[path = "placement/lasting.rs"]
mod lasting;
#[path = "placement/says.rs"]
mod says;
