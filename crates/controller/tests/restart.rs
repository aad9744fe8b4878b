//! A controller that another process goes on with: what it is, is data.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "restart/admin.rs"]
mod admin;
mod common;
#[path = "restart/refusals.rs"]
mod refusals;
#[path = "restart/same.rs"]
mod same;
