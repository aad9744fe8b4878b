//! Integration tests, in one program: each module tests one subject.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../../../../data/volume/tests/it/common/mod.rs"]
mod common;
mod previous;
mod server;
#[path = "../../../remote/tests/suite/mod.rs"]
mod suite;
mod volume;
