//! The NBD protocol (doc/proto.md of the NBD project): constants that both sides use, and the
//! server's side over any stream.
//!
//! [`server::negotiate`] performs the handshake with one client, and [`server::transmit`] answers
//! its requests from a [`server::Storage`]. The client's side, which works on a worker's ring, is
//! in crate `nbd`.
//!
//! This crate opens no sockets and files, starts no threads, and knows no volumes.
#![forbid(unsafe_code)]

pub mod server;
pub mod wire;
