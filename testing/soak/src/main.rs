//! Clients for the tests of a shared device: each loads its own slice for some seconds, verifies
//! its reads, disturbs the server as far as possible, and writes a file with the slice's expected
//! contents.
//!
//! ```text
//! soak nvme SOCKET SECONDS IMAGE      the userspace driver, over vfio-user, with controller resets
//! soak virtio SOCKET SECONDS IMAGE    a vhost-user-blk front-end, with queues stopped and connections ended under load
//! soak block DEVICE SECONDS IMAGE     a block device of the kernel's
//! soak fence DEVICE HOST TURNS        one of two hosts that fence each other by reservations
//! soak hostile SOCKET SECONDS         crafted commands, lists that change under way, nonsense doorbells and registers
//! ```
//!
//! The test support of the driver's and the exports' own tests is shared here.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod block;
mod fence;
mod hostile;
mod nvme;
#[path = "../../../crates/volumes/driver/examples/vfio_selftest/outcome.rs"]
mod outcome;
mod passthrough;
#[path = "../../../crates/volumes/driver/examples/vfio_selftest/pattern.rs"]
#[allow(dead_code)]
mod pattern;
mod support;
mod virtio;
#[path = "../../../crates/volumes/driver/examples/vfio_selftest/worker.rs"]
#[allow(dead_code)]
mod worker;

use outcome::{Outcome, ensure};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: soak nvme|virtio|block|hostile TARGET SECONDS [IMAGE], \
                     soak fence DEVICE HOST TURNS";

fn main() -> ExitCode {
    outcome::exit("soak", run())
}

fn run() -> Outcome {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let end = |seconds: &str| -> Outcome<Instant> {
        Ok(Instant::now() + Duration::from_secs(seconds.parse()?))
    };
    let image = match *words {
        ["hostile", socket, seconds] => return hostile::run(Path::new(socket), end(seconds)?),
        ["fence", device, host, turns] => {
            return fence::run(device, host.parse()?, turns.parse()?);
        }
        ["nvme", socket, seconds, image] => (image, nvme::run(socket, end(seconds)?)?),
        ["virtio", socket, seconds, image] => {
            (image, virtio::run(Path::new(socket), end(seconds)?)?)
        }
        ["block", device, seconds, image] => (image, block::run(device, end(seconds)?)?),
        _ => return Err(USAGE.into()),
    };
    let (path, bytes) = image;
    std::fs::write(path, bytes)?;
    Ok(())
}
