//! Models of what a process leaves to the next one: every order of steps of the host, of the
//! process and of its deaths is tried, and a model without one of the rules must go wrong.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "model/admin.rs"]
mod admin;
#[path = "model/explore.rs"]
mod explore;
#[path = "model/queues.rs"]
mod queues;
