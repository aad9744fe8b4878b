//! One controller's queues on several workers, all run by the test's thread in any order: whatever
//! the host and the owner do meanwhile, each command is executed once and completed once, and
//! nothing touches memory that was unmapped.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod attach;
mod bus_master;
#[path = "../common/mod.rs"]
mod common;
mod deaths;
mod histories;
mod interrupts;
mod late;
mod other_worker;
mod pressure;
mod resize;
mod rules;
mod world;
