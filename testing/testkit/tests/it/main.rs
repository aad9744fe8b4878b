//! Integration tests, in one program: each module tests one subject.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod dependencies;
mod gate;
mod ignored;
mod layers;
mod named_paths;
mod published;
mod release;
mod spelling;
mod survival_page;
mod words;
