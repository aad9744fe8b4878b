//! Management interface of a running vnvme: HTTP with JSON on a Unix socket.
//!
//! - [`api`]: types of requests and answers, with the schemas of the OpenAPI document.
//! - [`Daemon`]: the calls that the server makes. The program implements them; this crate does not
//!   know the parts of a disk.
//! - [`server`]: the server, in one thread of its own.
//! - [`Client`]: a blocking client, for the command line.
//! - [`EventSender`]: distribution of events to listeners, none of which is waited for.
//!
//! Names are exact: a request that names no disk, or could mean several, is refused with an error
//! text.
#![forbid(unsafe_code)]

pub mod api;
mod client;
mod daemon;
mod error;
mod events;
pub mod server;

pub use client::{Client, ClientError};
pub use daemon::Daemon;
pub use error::{Error, ErrorKind};
pub use events::{EventReceiver, EventSender, Received};
