//! The userspace NVMe driver: transports, IOVA space, queue pairs, recovery.
//!
//! This room drives an NVMe controller from a process, without the kernel's block layer. What may be touched here:
//! queues and registers of a controller behind a [`Transport`](transport::Transport), and memory that it may reach. What
//! may not: the controller's inside, and anything about a guest. `unsafe` stays in the modules that are marked so.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod mmio;
pub mod transport;
pub mod vfio;
