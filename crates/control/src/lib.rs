//! How a running vnvme is managed: HTTP with JSON on a Unix socket.
//!
//! - [`api`]: what requests and answers are made of, with the schemas of the OpenAPI document.
//! - [`Daemon`]: what the server asks the program for. The program implements it; nothing here
//!   knows what a disk is made of.
//! - [`server`]: the server, in one thread of its own.
//! - [`Client`]: a blocking client, for the command line.
//! - [`EventSender`]: what happens, told to every listener, none of which is waited for.
//!
//! Names are exact: a request that names no disk, or could mean several, is refused in words.
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
