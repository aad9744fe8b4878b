//! The virtual NVMe controller: registers, admin commands, queues, namespaces, events, reset.
//!
//! A [`Controller`] is one PCI function as a guest sees it. The crate does not depend on vfio-user:
//! the embedding program delivers register accesses, guest memory and interrupt receivers, and
//! provides a thread for the controller. All guest input is validated here; invalid input gets the
//! status code that the standard specifies. Calls never block. Crates `dma` and `volume` access
//! memory and devices.
//!
//! The control half (registers, admin commands, events: `controller`, `admin`) sends orders to the
//! data half (queues and outstanding commands: `engine`), and receives events from it. Queues may
//! migrate to other workers. Each of those has a [`RemoteEngine`], a data half of its own, which
//! receives orders as messages (`remote`; module `control::migration` is the control half's
//! part).
//!
//! *Out of scope.* The crate has no socket, thread, event loop or device model of a VMM. It
//! emulates NVMe over PCIe with one function and without virtual functions; a network in between
//! belongs to the embedding program, see [`FabricsConfig`]. A [`Volume`](volume::Volume) stores the
//! data.
//!
//! # Embedding it in a VMM
//!
//! The VMM forwards the guest's register accesses, supplies the location of guest memory, injects
//! interrupts, and calls [`Controller::poll`] from a thread of its choice: after a doorbell
//! write, after a volume has completed a request, or continuously. (Crate `worker` is such a
//! loop, with busy polling and sleep; crate `in-process` combines the two.)
//!
//! ```
//! use controller::{Controller, ControllerConfig, IrqSink, NamespaceConfig};
//! use dma::{Memory, Prot};
//! use nvme::{AdminOpcode, Command, Completion, pci, regs};
//! use nvme::cmd::admin::{Cns, IdentifyCdw10};
//! use std::sync::Arc;
//! use std::time::Instant;
//! use volume::{Io, IoOptions, MemVolume};
//! use zerocopy::{FromBytes, IntoBytes};
//!
//! struct Inject; // the VMM's way to interrupt the guest
//! impl IrqSink for Inject {
//!     fn signal(&self) {}
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let io = Io::new(IoOptions::default()); // the thread's io_uring, for volumes that need one
//! let namespace = NamespaceConfig::new(1, Arc::new(MemVolume::new(64 << 20)?)).with_nguid([1; 16]);
//! let mut controller = Controller::new(0, ControllerConfig::default(), vec![namespace], &io)?;
//!
//! // From the VMM: guest memory, and the receivers of the MSI-X vectors.
//! let ram = Memory::anonymous(1 << 20)?;
//! controller.dma_map(0, 1 << 20, Some((ram.clone(), 0)), Prot::RW)?;
//! for vector in 0..controller.vectors() {
//!     controller.set_msix(vector, Some(Arc::new(Inject)));
//! }
//!
//! // From the guest: its driver sets Bus Master Enable, writes the addresses of the admin queues
//! // (32 entries each), and enables the controller.
//! let command = pci::command::MEMORY_SPACE | pci::command::BUS_MASTER;
//! controller.config_write(pci::COMMAND as u64, &command.to_le_bytes());
//! controller.bar0_write(regs::AQA, &0x001f_001f_u32.to_le_bytes());
//! controller.bar0_write(regs::ASQ, &0x1000_u64.to_le_bytes());
//! controller.bar0_write(regs::ACQ, &0x2000_u64.to_le_bytes());
//! controller.bar0_write(regs::CC, &0x0046_0001_u32.to_le_bytes());
//!
//! // The driver writes Identify into the submission queue, and rings.
//! let mut identify = Command::new(AdminOpcode::IDENTIFY.0, 7, 0);
//! identify.cdw10 = IdentifyCdw10::new().with_cns(Cns::CONTROLLER).into_bits().into();
//! identify.set_prps(0x3000, 0);
//! ram.write(0x1000, identify.as_bytes())?;
//! controller.bar0_write(regs::doorbell_offset(0, false, 0), &1_u32.to_le_bytes());
//!
//! // The thread's round. Volumes that use the ring complete through it.
//! controller.poll(Instant::now());
//! io.flush();
//! io.poll(&mut |completion| controller.complete(completion));
//!
//! let mut entry = [0; 16];
//! ram.read(0x2000, &mut entry)?;
//! let entry = Completion::read_from_bytes(&entry).map_err(|_| "16 bytes")?;
//! assert_eq!((entry.cid.get(), entry.status().into_result()), (7, Ok(())));
//! # Ok(()) }
//! ```
#![forbid(unsafe_code)]

mod admin;
mod ana;
mod cloud;
mod config;
mod control;
mod engine;
mod fabrics;
mod formats;
mod irq;
mod marks;
mod metadata;
mod passthrough;
pub mod pci;
mod placed;
mod pool;
mod remote;
mod stats;
mod subsystem;
mod survival;
mod zoned;

pub use crate::metadata::MetadataState;
pub use crate::placed::{PlacementError, PlacementState, PlacementTable};
pub use crate::zoned::{ZoneTable, ZonedState};
pub use admin::KeepAlive;
pub use ana::{AnaChange, MAX_ANA_GROUP};
pub use cloud::{Cloud, CloudError};
pub use config::{
    ConfigError, ControllerConfig, DEFAULT_IO_QUEUES, InSubsystem, MAX_CMB_SIZE, MAX_IO_QUEUES,
    MAX_QUEUE_ENTRIES, MIN_CMB_SIZE, NamespaceConfig,
};
pub use control::{Attach, BootImage, BootImageError, Controller, DoorbellPage, MAX_BOOT_IMAGE};
pub use engine::{Recovery, tag_owner};
pub use fabrics::{AnaGroup, FabricsConfig};
pub use formats::{BlockFormat, FormatSaved, FormatStore, Formats, KeptFormat, SavedFormat};
pub use irq::IrqSink;
pub use passthrough::{Passthrough, PassthroughResult};
pub use pool::{NamespacePool, PoolChange, PoolDone, PoolError, PooledNamespace};
pub use remote::{RemoteEngine, RemoteEngineSetup};
pub use stats::{ControllerStats, Counter, EarlierIo, IoStats, QueueStats};
pub use subsystem::{MAX_CNTLID, ReservationStore, Saved, Subsystem};
pub use survival::{
    MAX_STREAM, RestoreError, RetainedObjects, STATE_OLDEST_READ, STATE_VERSION, ShownIdentity,
    ShownNamespace, shown_identity, state_layout,
};

/// Returns the first `len` items of a slice, or all of them if there are fewer.
pub(crate) fn prefix<T>(items: &[T], len: usize) -> &[T] {
    items.get(..len).unwrap_or(items)
}
