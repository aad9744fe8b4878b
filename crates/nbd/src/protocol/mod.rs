//! The NBD protocol, without any connection: the handshake over whatever can be read and written,
//! requests, and replies as a stream of bytes.

mod handshake;
mod in_flight;
mod received;
mod reply;
mod request;
pub mod wire;

pub use handshake::{Export, HandshakeError, negotiate};
pub use in_flight::{Asked, Entry, InFlight};
pub use reply::{Event, Expected, Replies, Violation};
pub use request::Command;
