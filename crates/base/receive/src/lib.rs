//! Reading of untrusted clients' sockets, so that no descriptor in a message can block the reading
//! thread.
//!
//! Each process that may connect to a Unix socket can send descriptors of any kind. The last
//! `close` of one may block as long as its sender likes: a TCP socket with SO_LINGER and unsent
//! data, a file on a FUSE file system with a silent server (even SIGKILL waits for that one). A
//! descriptor is closed by `close`, by a read without room for it, by closing a socket in which it
//! waits unread, and by the end of a process. None of these may therefore happen in the server's
//! thread or process.
//!
//! ```text
//!                      +--------------------------- server ----------------------------+
//! client -- socket --> | Socket::read: peek; no descriptors there: take the bytes      |
//!              |       |               descriptors there: ask, and wait for the answer |
//!              |       +------------------^--------------------------------------------+
//!              |                          | listener link: a socket pair for each listening socket
//!              |       +------------------v--------------------------------------------+
//!              +-----> | receiver process: takes bytes and descriptors, checks these,  |
//!                      | passes on what is harmless, closes the rest: may hang         |
//!                      +---------------------------------------------------------------+
//! ```
//!
//! The receiver process holds a duplicate of each listening socket and of each client's socket, so
//! that the server's is never the last. The server's `close` and its end, even by SIGKILL, are
//! therefore prompt. The receiver's own end may hang without harm, because all its sockets are shut
//! down before. A descriptor is harmless ([`kind`]) if neither its `close` nor its use by a server
//! depends on another process. In place of any other descriptor the server gets `/dev/null`, which
//! is of no kind that it accepts.
//!
//! A protocol without descriptors reads its clients itself ([`Intake::admit_plain`]): a client that
//! sends some is no longer read.
//!
//! A server that may start no processes while it serves uses another process to start them
//! ([`Spawner`]), which has no contact with clients.
//!
//! Programs that trust their clients read in place ([`Intake::in_place`], [`Socket::in_place`]), as
//! do tests. This crate has no unsafe code and implements no protocol: it handles bytes and
//! descriptors only.
#![forbid(unsafe_code)]

mod error;
mod foreign_protocol;
mod intake;
pub mod kind;
mod listener_link;
mod message;
mod plain;
mod pool;
mod receiver;
mod server;
mod session;
mod socket;
mod spawner;

pub use error::{ReadError, StartError};
pub use foreign_protocol::ForeignProtocol;
pub use intake::Intake;
pub use kind::AcceptedDescriptors;
pub use plain::PlainSocket;
pub use receiver::Receiver;
pub use server::{ServeError, serve};
pub use socket::{MAX_SEEN, Read, Socket};
pub use spawner::{Spawner, start_receivers};
