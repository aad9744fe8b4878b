//! Fuzz targets, callable from libFuzzer and from ordinary tests.
#![forbid(unsafe_code)]

pub mod dma;
pub mod vfio_user;
