//! Fuzz targets, callable from libFuzzer and from ordinary tests.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![forbid(unsafe_code)]

pub mod ap;
#[cfg(test)]
mod chance;
pub mod controller;
pub mod dma;
pub mod gpt;
pub mod mediate;
pub mod vfio_user;
pub mod vhost_blk;

/// Takes any input; panics when something that was promised does not hold.
pub type Target = fn(&[u8]);

/// Every target by its name, for libFuzzer: run.sh runs them in this order.
pub const TARGETS: &[(&str, Target)] = &[
    ("vfio_user_stream", vfio_user::vfio_user_stream),
    ("dma_prp_sgl", dma::prp_sgl),
    ("controller", controller::controller),
    ("mediate", mediate::mediate),
    ("vhost_blk", vhost_blk::vhost_blk),
    ("ap", ap::ap),
    ("gpt", gpt::gpt),
];
