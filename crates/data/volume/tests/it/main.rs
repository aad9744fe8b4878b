//! Integration tests, in one program: each module tests one subject.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod atomic;
mod common;
mod copy;
mod fair;
mod file;
mod kinds;
mod limits;
mod model;
mod previous;
mod registry;
mod simulated;
mod start;
mod stream;
mod system;
mod wrappers;
