//! The guest harness: a real Linux guest under QEMU, for the demo and the tests.
//!
//! This room turns "a machine with git, make and a Rust toolchain" into a Linux guest that answers
//! shell scripts a few seconds after it was asked for. It fetches Debian packages into a cache
//! below `target/harness` without root and without touching the system ([`apt`], [`tree`]), makes a
//! kernel, an initramfs and a tools image from them ([`kernel`], [`image`]), finds a QEMU that
//! speaks vfio-user ([`qemu`]), and runs guests ([`guest`]) against a `vnvme` daemon ([`daemon`]).
//! Checks from the host's side use the programs of the same cache ([`tree::Tree::tool`]). A smaller
//! guest of another architecture, for AP queues, is made the same way ([`s390x`]). [`hostile`]
//! attacks a daemon that serves a good neighbour; it needs no guest. [`systemd`] is a machine that
//! starts the daemon as an installed unit.
//!
//! This crate accesses processes, files below the cache and below a temporary directory of each
//! guest. It accesses nothing of the machine's package system, nor the inside of the crates under
//! test. They are reached only as a user reaches them, through the `vnvme` program and a virtual
//! machine, or a client at its sockets.
//!
//! Environment variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `VNVME_HARNESS_CACHE` | the cache, instead of `target/harness` |
//! | `VNVME_HARNESS_REFRESH` | `1`: ask the mirror for newer packages, even if the cache is complete |
//! | `VNVME_DEBIAN_MIRROR` | where Debian packages come from, instead of the machine's own mirror |
//! | `VNVME_KERNEL` | an uncompressed `vmlinux` to boot instead of Debian's |
//! | `VNVME_QEMU` | a QEMU program to use instead of searching for one |
//! | `VNVME_ACCEL` | `kvm` or `tcg`, instead of trying KVM |
//! | `VNVME_TEST_CONTROLLER` | `qemu`: the tests run against QEMU's own NVMe controller, which checks the tests themselves |
//! | `VNVME_SOAK_SECONDS` | how long the tests of a shared device go on |
//! | `VNVME_PATH_SECONDS` | how long the tests of NVMe/TCP go on losing each kind of path |
//! | `VNVME_HOST_LONG` | set: the test of Linux's initiator at the front-end for other hosts is long |
//! | `VNVME_BIN` | a built `vnvme` program, instead of building one |
//! | `VNVME_PROGRAMS` | a directory of built programs, instead of building those that are there |
//! | `VNVME_CRASH_BIN` | one with the feature `crash-points`, for the tests that let it die there |
//! | `VNVME_DEATHS` | how often it dies at each point |
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![forbid(unsafe_code)]

pub mod apt;
pub mod cache;
pub mod channel;
pub mod cpio;
pub mod daemon;
pub mod documents;
pub mod elf;
pub mod guest;
pub mod hostile;
pub mod image;
pub mod kernel;
pub mod machine;
pub mod mirror;
pub mod options;
pub mod process;
pub mod progress;
pub mod qemu;
pub mod qmp;
pub mod s390x;
pub mod served;
pub mod systemd;
pub mod tree;

pub use cache::Cache;
pub use daemon::Daemon;
pub use guest::{Guest, Output};
pub use machine::{Disk, Firmware, GuestBuilder};
pub use options::BenchOptions;
pub use served::ServedVolumes;
pub use tree::Tree;
