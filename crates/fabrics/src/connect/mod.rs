//! Connections: their making, step by step within a time limit, and the Admin queue as a
//! conversation.

mod authenticate;
mod client;
mod controller;
mod error;
mod queue;

pub(crate) use client::Client;
pub(crate) use controller::{Controller, Facts, Wanted, enable, log_page};
pub use error::{ConnectError, Trouble};
pub(crate) use queue::{Portal, Queue, connect_queue};
