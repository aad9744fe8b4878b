//! Common parts of volumes on servers, for any protocol: addresses, connecting within a time limit,
//! threads that reconnect, requests that are sent in parts, and reporting of the connection state.
//!
//! This crate handles sockets and threads. It contains no protocol and does not access guest
//! memory.
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
