//! Sockets of clients that are not trusted, read so that no descriptor which they send can block
//! the thread that reads.
//!
//! Each process that may connect to a Unix socket can send descriptors of any kind, and the last
//! `close` of one may block for as long as its sender likes: a TCP socket with SO_LINGER and unsent
//! data, a file on a FUSE file system whose server is silent (even SIGKILL waits for that one). A
//! descriptor is closed by `close`, by a read that has no room for it, by closing a socket in
//! which it waits unread, and by the end of a process. So it must never be the server's thread,
//! nor its process, that does any of this.
//!
//! ```text
//!                      +--------------------------- server ----------------------------+
//! client -- socket --> | Socket::read: peek; no descriptors there: take the bytes      |
//!              |       |               descriptors there: ask, and wait for the answer |
//!              |       +------------------^--------------------------------------------+
//!              |                          | door: a socket pair for each listening socket
//!              |       +------------------v--------------------------------------------+
//!              +-----> | receiver process: takes bytes and descriptors, checks these,  |
//!                      | passes on what is harmless, closes the rest: may hang         |
//!                      +---------------------------------------------------------------+
//! ```
//!
//! The receiver process holds a duplicate of each listening socket and of each client's socket, so
//! that the server's is never the last: the server's `close` and its end, even by SIGKILL, are
//! prompt. The receiver's own end may hang, which hurts nobody: before it, every socket that it has
//! is shut down. A descriptor is harmless ([`kind`]) if neither its `close` nor what a server does
//! with it asks anybody else; in place of the others the server gets `/dev/null`, which is of no
//! kind that it takes.
//!
//! A protocol that has no descriptors reads its clients itself ([`Intake::admit_plain`]): one that
//! sends some is not read any more.
//!
//! A server that may start no processes once it serves has them started by another one
//! ([`Spawner`]), which has nothing to do with clients.
//!
//! Programs that trust their clients read in place ([`Intake::in_place`], [`Socket::in_place`]), as
//! do tests. No unsafe code here, and no protocol: bytes and descriptors only.
#![forbid(unsafe_code)]

mod door;
mod error;
mod intake;
pub mod kind;
mod message;
mod plain;
mod pool;
mod receiver;
mod server;
mod session;
mod socket;
mod spawner;
mod stranger;

pub use error::{ReadError, StartError};
pub use intake::Intake;
pub use kind::Wanted;
pub use plain::PlainSocket;
pub use receiver::Receiver;
pub use server::{ServeError, serve};
pub use socket::{Read, Socket};
pub use spawner::{Spawner, start_receivers};
pub use stranger::Stranger;
