//! Exports of disks' volumes over NBD, for backup and restore.
//!
//! Threads of their own speak with the clients ([`ExportServer`]), since a client may send
//! descriptors whose closing blocks. Their requests go to a front-end on a worker ([`Pump`]), which
//! has a queue into the volume like any other front-end.

mod pump;
mod server;
mod storage;

pub use pump::{Pump, PumpLink};
pub use server::{END_TIMEOUT, ExportServer, Exported};
