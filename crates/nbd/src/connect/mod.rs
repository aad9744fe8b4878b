//! Connections: addresses, the way to a server, and threads that connect again while a worker
//! serves others.

mod address;
mod again;
mod inbox;
mod previous;
mod socket;

pub use address::{Address, PORT, Server};
pub(crate) use again::connect_again;
pub(crate) use inbox::Inbox;
pub use previous::{PreviousError, end_previous};
pub use socket::{ConnectError, Connected, ConnectionKeeper, Kept, connect};
