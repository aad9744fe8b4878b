//! Integration tests, in one program: each module tests one subject.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod dependencies;
mod gate;
mod ignored;
mod named_paths;
mod survival_page;
mod words;
