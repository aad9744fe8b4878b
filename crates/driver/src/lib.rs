//! The userspace NVMe driver: transports, IOVA space, queue pairs, recovery.
//!
//! This room drives an NVMe controller from a process, without the kernel's block
//! layer. What may be touched here: queues and registers of a controller behind a
//! [`Transport`](transport::Transport), and memory that it may reach. What may not:
//! the controller's inside, and anything about a guest. `unsafe` stays in the
//! modules that are marked so.
//!
//! # Tour
//!
//! - [`transport`]: what carries a controller. [`vfio`] and [`vfio_user`] are two of them; a third,
//!   to a controller in the same process, is crate `in-process`.
//! - [`Device`]: a controller that was brought up. Namespaces, health,
//!   events, buffers, queue pairs.
//! - [`QueuePair`]: one thread's own way to a namespace. Submit, ring, poll;
//!   or wait; or [`AsyncQueue`].
//! - [`raw`]: commands that the caller made, with addresses that it checked: for mediation.
//! - [`DmaBuffer`]: memory that the device reaches. A request owns its buffer until it completes.
//! - [`iova`]: which addresses the device sees what at.
//! - [`open`]: all of it from a URL; [`NvmeVolume`]: a namespace as a volume.
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
//! # How long memory lives
//!
//! The device may write to memory at any time until it has answered or is known to have stopped. So
//! buffers move: into a request, and out of its completion. What is in flight when a queue pair is
//! dropped is kept until the queue is deleted or the controller reset; what a device that is gone
//! may still reach is never used again.
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
mod namespace;
mod options;
mod queue;
pub mod transport;
mod url;
pub mod vfio;
pub mod vfio_user;
mod volume;

pub use buffer::{DmaBuffer, Heap};
pub use control::{Event, Limits};
pub use device::Device;
pub use error::{CommandError, Error, Refusal, Refused};
pub use future::{AsyncQueue, Pending};
pub use namespace::{Atomicity, Namespace};
pub use options::{Doorbells, MemorySource, Options, QueueOptions, ShadowMemory};
pub use queue::raw;
pub use queue::{
    BlockingError, Completion, Look, Op, QueueCounters, QueuePair, Request, ShadowBuffers, Tap,
};
pub use url::{NVME, OpenError, Place, Target, VFIO_USER, open};
pub use volume::{NvmeVolume, status_error};
