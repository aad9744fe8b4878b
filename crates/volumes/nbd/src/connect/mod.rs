//! Connections to servers: addresses, the first connection, and threads that reconnect while a
//! worker serves its other volumes.

mod address;
mod again;
mod socket;

pub use address::{NbdServer, PORT};
pub(crate) use again::connect_again;
pub use socket::{ConnectError, Connected, connect};

/// Inbox of a worker's queue for new connections, each with the number of its link.
pub(crate) type Inbox = volume::Inbox<(usize, Connected)>;
