//! The NBD protocol without sockets: the handshake over any stream, encoding of requests, and
//! parsing of replies.

mod handshake;
mod in_flight;
mod received;
mod reply;
mod request;

pub use handshake::{Export, HandshakeError, negotiate};
pub use in_flight::{InFlight, InFlightRequest, RequestInfo};
pub use nbd_protocol::wire;
pub use reply::{Event, Expected, Replies, Violation};
pub use request::Command;
