//! The vfio-user protocol: wire types, server, client.
//!
//! This crate turns the bytes and file descriptors of a Unix stream socket into calls of a
//! [`Device`], and the other way round in [`client`]. PCI regions, interrupt indexes and DMA ranges
//! are plain numbers here. The device implements their meaning (NVMe registers, guest memory). The
//! program owns the event loop: one epoll instance for all sockets, and a call of
//! [`Connection::on_ready`] when a socket is ready. The peer is not trusted: every length is
//! checked before allocation, every descriptor is closed unless a device took it, and work per call
//! is bounded. The server side has no unsafe code, no threads and no blocking calls.
//!
//! Flow of data through the server:
//!
//! ```text
//! socket --recvmsg--> inbox (bytes, descriptors) --one message--> session (checks, calls Device) --reply--> outbox --sendmsg--> socket
//! ```
//!
//! The protocol is specified in QEMU's `docs/interop/vfio-user.rst`; its payloads are
//! those of `<linux/vfio.h>`. All integers are in host byte order. The crate speaks major
//! version 0, minor version 0.
//!
//! # Example
//!
//! A device with one register, and a client that writes it:
//!
//! ```
//! use std::os::fd::OwnedFd;
//! use std::time::Duration;
//! use vfio_user::client::Client;
//! use vfio_user::*;
//!
//! struct Register([u8; 4]);
//!
//! impl Device for Register {
//!     fn info(&self) -> DeviceInfo {
//!         DeviceInfo { reset: true, pci: true, num_regions: 9, num_irqs: 5 }
//!     }
//!     fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
//!         let size = if index == 0 { 4 } else { 0 };
//!         (index < 9).then_some(RegionInfo { size, read: true, write: true, mmap: None })
//!     }
//!     fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
//!         let from = self.0.iter().skip(offset as usize); // the range is inside, as was checked
//!         data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
//!         Ok(())
//!     }
//!     fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> Result<OperationOutcome, Errno> {
//!         let to = self.0.iter_mut().skip(offset as usize);
//!         to.zip(data).for_each(|(to, from)| *to = *from);
//!         Ok(OperationOutcome::Done)
//!     }
//!     fn irq(&self, index: u32) -> Option<IrqInfo> {
//!         (index < 5).then(IrqInfo::default)
//!     }
//!     fn set_irqs(&mut self, _: SetIrqs) -> Result<OperationOutcome, Errno> {
//!         Err(Errno::INVAL)
//!     }
//!     fn dma_map(&mut self, _: DmaMapping, _: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
//!         Ok(OperationOutcome::Done) // it reaches no memory
//!     }
//!     fn dma_unmap(&mut self, _: DmaUnmapping) -> Result<Unmapped, Errno> {
//!         Ok(Unmapped { size: 0, outcome: OperationOutcome::Done })
//!     }
//!     fn reset(&mut self) -> Result<OperationOutcome, Errno> {
//!         self.0 = [0; 4];
//!         Ok(OperationOutcome::Done)
//!     }
//!     fn disconnected(&mut self) {}
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("device.sock");
//! let listener = Listener::bind(&path)?;
//! let client = std::thread::spawn(move || -> Result<[u8; 4], client::ClientError> {
//!     let mut client = Client::connect(path, Duration::from_secs(10))?;
//!     client.region_write(0, 0, &[1, 2, 3, 4])?;
//!     let mut data = [0; 4];
//!     client.region_read(0, 0, &mut data)?;
//!     Ok(data)
//! });
//!
//! let mut device = Register([0; 4]);
//! let mut connection = loop {
//!     if let Some(socket) = listener.accept()? {
//!         break Connection::new(socket);
//!     }
//! };
//! // A program waits for the socket in between, see `Connection::interest`.
//! while connection.on_ready(&mut device)? != ConnectionStatus::Closed {}
//! assert_eq!(client.join().expect("no panic")?, [1, 2, 3, 4]);
//! # Ok(()) }
//! ```
#![forbid(unsafe_code)]

mod access;
pub mod client;
mod connection;
mod device;
mod error;
mod inbox;
mod journal;
mod listener;
mod migration;
mod outbox;
mod path_lock;
mod refuse;
mod session;
pub mod version;
pub mod wire;

pub use access::Access;
pub use connection::{Connection, ConnectionStatus, Counters, Interest, ServerLimits};
pub use device::{
    Device, DeviceInfo, DmaMapping, DmaUnmapping, IrqAction, IrqData, IrqInfo, MmapArea,
    OperationOutcome, RegionInfo, RegionMmap, SetIrqs, Unmapped,
};
pub use error::ConnectionError;
pub use journal::{
    Journal, JournalError, JournalSetup, Pipe, REFUSED, SENT, SESSION, SESSION_OLDEST_READ,
    SESSION_VERSION, SharedLedger,
};
pub use listener::{ListenError, Listener, bind_socket};
pub use migration::{DIRTY_PAGE, Migration, MigrationState};
pub use refuse::refuse;
/// Error number that a device returns, and that an error reply contains.
pub use rustix::io::Errno;
