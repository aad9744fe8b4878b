//! Fuzz targets, callable from libFuzzer and from ordinary tests.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![forbid(unsafe_code)]

pub mod ap;
#[cfg(test)]
mod chance;
pub mod controller;
pub mod descriptors;
pub mod dma;
pub mod fabrics_target;
pub mod gpt;
pub mod luks;
pub mod mediate;
pub mod migration;
pub mod nbd;
pub mod nbd_server;
pub mod nvme_tcp;
mod pool;
pub mod qcow2;
pub mod reservations;
pub mod restart;
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
    ("descriptors", descriptors::descriptors),
    ("ap", ap::ap),
    ("gpt", gpt::gpt),
    ("luks", luks::luks),
    ("nbd", nbd::nbd),
    ("nbd_server", nbd_server::nbd_server),
    ("qcow2", qcow2::qcow2),
    ("reservations", reservations::reservations),
    ("restart", restart::restart),
    ("migration", migration::migration),
    ("nvme_tcp", nvme_tcp::nvme_tcp),
    ("fabrics_target", fabrics_target::fabrics_target),
];

#[cfg(test)]
mod tests {
    use super::TARGETS;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    /// Runs the inputs in git, written by `testing/fuzz/run.sh minimise`; each covers code that the
    /// rest does not.
    #[test]
    fn every_target_accepts_its_corpus() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
        let entries = fs::read_dir(&corpus).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let targets = TARGETS.iter().map(|(name, _)| (*name).to_owned());
        assert_eq!(names.collect::<BTreeSet<_>>(), targets.collect());
        for (name, target) in TARGETS {
            let mut inputs = 0;
            for entry in fs::read_dir(corpus.join(name)).unwrap() {
                let path = entry.unwrap().path();
                println!("{}", path.display());
                target(&fs::read(&path).unwrap());
                inputs += 1;
            }
            assert!(inputs > 10, "{name}: {inputs} inputs");
        }
    }
}
