//! Containers as `cryptsetup` and `qemu-img` make them, opened over volumes in memory and in files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(clippy::panic)]

mod common;
mod container;
mod fixtures;
mod formats;
mod keys;
mod model;
mod open;
mod programs;
mod refused;
