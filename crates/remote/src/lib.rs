//! What volumes on servers have in common, whichever protocol they speak: addresses, connecting
//! within a time limit, threads that connect again, requests that go out in parts, and who is told
//! how the way to a server is.
//!
//! What may be touched here: sockets, threads. What may not: any protocol, guest memory.
#![forbid(unsafe_code)]

mod address;
mod again;
mod parents;
mod reach;
mod socket;

pub use address::{Address, HostPort, HostPortError, decode, encode};
pub use again::{LOG_INTERVAL, pause, spawn};
pub use parents::{Parent, Parents, Todo};
pub use reach::{Reach, ReachWatch, Reachable};
pub use socket::{Conversation, connect_tcp, connect_unix};
