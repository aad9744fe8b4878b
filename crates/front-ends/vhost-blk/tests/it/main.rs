//! Integration tests, in one program: each module tests one subject.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;
mod deaths;
mod hostile;
mod io;
mod migration;
mod sessions;
