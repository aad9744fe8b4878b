//! The userspace NVMe driver: transports, IOVA space, queue pairs, recovery.
//!
//! This crate drives an NVMe controller from a process, without the kernel's block layer. Its scope
//! is the queues and registers of a controller behind a [`Transport`](transport::Transport), and
//! memory that the controller may access. The controller's inside and guests are out of scope.
//! `unsafe` is limited to the modules that allow it.
//!
//! # Tour
//!
//! - [`transport`]: interface to a controller. [`vfio`] and [`vfio_user`] implement it; a third,
//!   for a controller in the same process, is crate `in-process`.
//! - [`Device`]: a controller that was brought up. Namespaces, health, events, buffers, queue
//!   pairs.
//! - [`QueuePair`]: one thread's own path to a namespace. Submit, ring, poll; or wait; or
//!   [`AsyncQueue`].
//! - [`raw`]: commands of the caller, with addresses that it has checked, for mediation.
//! - [`DmaBuffer`]: memory that the device can access. A request owns its buffer until it
//!   completes.
//! - [`iova`]: the device's address space and its mappings.
//! - [`open`]: opens a device and namespace from a URL; [`NvmeVolume`]: a namespace as a volume.
//!
//! # Example
//!
//! ```
//! use driver::{Device, Op, Options, QueueOptions, Request};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let transport = in_process::memory_disk(16 << 20)?;
//! let device = Device::open(transport, Options::default())?;
//! let namespace = device.namespace(1)?;
//! let mut queue = device.queue(1, QueueOptions::default())?;
//!
//! // One block out and in again, with the device's own buffers.
//! let buffer = device.allocate(namespace.block_size() as usize)?;
//! buffer.write(0, b"hello")?;
//! let write = Request { op: Op::Write { fua: true }, lba: 7, blocks: 1, buffer: Some(buffer), user_data: 1 };
//! let buffer = queue.execute(write)?.buffer.ok_or("gone")?;
//! buffer.fill(0)?;
//!
//! // The path for speed: submit, ring once for many, poll.
//! queue.submit_read(7, 1, buffer, 2)?;
//! queue.ring();
//! let mut done = Vec::new();
//! while done.is_empty() {
//!     queue.poll(|completion| done.push(completion));
//! }
//! let completion = done.remove(0);
//! completion.result?;
//! assert_eq!(completion.user_data, 2);
//! assert_eq!(&completion.buffer.ok_or("gone")?.to_vec()?[..5], b"hello");
//! # Ok(()) }
//! ```
//!
//! # Lifetime of memory
//!
//! The device may write to memory at any time until it has answered or is known to have stopped.
//! Buffers therefore move into a request, and out of its completion. Requests outstanding when a
//! queue pair is dropped are kept until the queue is deleted or the controller reset. Memory that a
//! device may still access after it is lost is never used again.
#![deny(unsafe_code)]

mod admin;
mod buffer;
mod control;
mod device;
mod error;
mod future;
pub mod iova;
#[allow(unsafe_code)]
pub mod mmio;
mod options;
mod queue;
pub mod transport;
mod url;
pub mod vfio;
pub mod vfio_user;
mod volume;

pub use buffer::{DmaBuffer, Heap};
pub use control::{DeviceLimits, Event};
pub use device::Device;
pub use error::{CommandError, Error, RefusedRequest, SubmitRefusal};
pub use future::{AsyncQueue, Pending};
pub use nvme_volume::{Atomicity, Namespace};
pub use options::{Doorbells, MemorySource, Options, QueueOptions, ShadowMemory};
pub use queue::raw;
pub use queue::{
    BlockingError, Completion, Op, QueueCounters, QueuePair, Request, ShadowBuffers, Tap, TapResult,
};
pub use url::{ControllerAddress, DeviceTarget, NVME, OpenError, VFIO_USER, open};
pub use volume::NvmeVolume;
