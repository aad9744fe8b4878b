//! Common parts of volumes on servers, for any protocol: addresses, connecting within a time limit,
//! threads that reconnect, requests that are sent in parts, and reporting of the connection state.
//!
//! This crate handles sockets and threads. It contains no protocol and does not access guest
//! memory.
#![forbid(unsafe_code)]

mod address;
mod connection_state;
mod reconnect;
mod socket;
mod split_requests;

pub use address::{Address, HostPort, HostPortError, decode, encode};
pub use connection_state::{ConnectionState, ReachWatch, Reachable};
pub use reconnect::{LOG_INTERVAL, pause, spawn};
pub use socket::{Conversation, connect_tcp, connect_unix};
pub use split_requests::{Remaining, SplitRequest, SplitRequests};
