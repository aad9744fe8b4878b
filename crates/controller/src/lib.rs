//! The virtual NVMe controller: registers, admin commands, queues, namespaces, events, reset.
//!
//! A [`Controller`] is one PCI function as a guest sees it. It knows nothing of vfio-user: whoever embeds it delivers
//! register accesses, guest memory and interrupt receivers, and gives it a thread. Everything that comes from the guest
//! is checked here; what is wrong gets the status code that the standard names. Nothing here blocks, and nothing here
//! touches memory or devices itself: that is `dma`'s and `volume`'s.
//!
//! The control half (registers, admin commands, events: `controller`, `admin`) talks to the data half (queues and
//! commands in flight: `engine`) by few calls and by events. Some of the queues may live on other workers: each of those
//! has a [`Branch`], a data half of its own, which the control half talks to by messages (`branch`).
#![forbid(unsafe_code)]

mod admin;
mod branch;
mod config;
mod controller;
mod engine;
mod irq;
mod passthrough;
pub mod pci;
mod stats;

pub use branch::{Branch, BranchSeed};
pub use config::{
    ConfigError, ControllerConfig, MAX_IO_QUEUES, MAX_QUEUE_ENTRIES, NamespaceConfig,
};
pub use controller::Controller;
pub use engine::tag_owner;
pub use irq::IrqSink;
pub use passthrough::{Passed, Passthrough};
pub use stats::{ControllerStats, Counter, IoStats, QueueStats};
