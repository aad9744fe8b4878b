//! The vfio-user protocol: wire types, server, client.
//!
//! This room turns the bytes and file descriptors of a Unix stream socket into calls of a [`Device`], and the other way
//! round in [`client`]. It knows PCI regions, interrupt indexes and DMA ranges only as numbers; what is behind them
//! (NVMe registers, guest memory) is not its business, and neither is the event loop: the program owns one epoll
//! instance for all sockets and calls [`Connection::on_ready`] when a socket is ready. The peer is not trusted: every
//! length is checked before anything is allocated for it, every descriptor is closed unless a device took it, and work
//! per call is bounded. No unsafe code, no threads and no blocking calls on the server's side.
//!
//! How data passes through the server:
//!
//! ```text
//! socket --recvmsg--> inbox (bytes, descriptors) --one message--> session (checks, calls Device) --reply--> outbox --sendmsg--> socket
//! ```
//!
//! The protocol is specified in QEMU's `docs/interop/vfio-user.rst`; its payloads are those of `<linux/vfio.h>`. All
//! integers are in host byte order. The crate speaks major version 0, minor version 0.
#![forbid(unsafe_code)]

pub mod client;
mod connection;
mod device;
mod error;
mod inbox;
mod listener;
mod outbox;
mod session;
pub mod version;
pub mod wire;

pub use connection::{Connection, Counters, Interest, Limits, Status};
pub use device::{
    Device, DeviceInfo, DmaMapping, DmaUnmapping, IrqAction, IrqData, IrqInfo, MmapArea, Outcome,
    RegionInfo, RegionMmap, SetIrqs, Unmapped,
};
pub use error::ConnectionError;
pub use listener::{ListenError, Listener};
/// Error numbers as devices return them and replies carry them.
pub use rustix::io::Errno;
