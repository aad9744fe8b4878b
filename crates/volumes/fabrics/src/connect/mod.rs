//! Connecting to a controller: sockets, the Connect command, authentication, initialization, and
//! synchronous commands on the Admin queue.

mod authenticate;
mod client;
mod controller;
mod error;
mod queue;

pub(crate) use client::Client;
pub(crate) use controller::{
    Controller, ControllerRequirements, NamespaceProperties, enable, log_page,
};
pub use error::{ConnectError, ConversationError};
pub(crate) use queue::{Portal, Queue, connect_queue};
