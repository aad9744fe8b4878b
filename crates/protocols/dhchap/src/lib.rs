//! DH-HMAC-CHAP, the authentication protocol of NVMe over Fabrics ("NVMe Base 2.1", 8.3.5.5), as
//! code without sockets: messages, secrets, and the state machines of both sides.
//!
//! ```text
//! host                                              controller
//! AUTH_Negotiate  hashes, DH groups  ------------->
//!                 <-------------  DH-HMAC-CHAP_Challenge  C1, S1, g^x
//! DH-HMAC-CHAP_Reply  R1, C2, S2, g^y  ----------->
//!                 <-------------  DH-HMAC-CHAP_Success1  R2
//! DH-HMAC-CHAP_Success2  -------------------------->          only if the host asked for R2
//! ```
//!
//! [`Host`] and [`Controller`] are the two sides of one transaction. The owner of a connection
//! transfers their messages by Authentication Send and Receive. Random numbers are read from the
//! kernel, or passed in when a side is created ([`Random`]).
//!
//! This crate handles the bytes of messages, and files that hold secrets ([`read_private`]). It has
//! no sockets, clocks or threads, and opens no other files. A secret is never shown: types with a
//! secret leave it out of their [`Debug`], and it is wiped when it is dropped. Responses of the
//! other side are compared in constant time.
#![forbid(unsafe_code)]

mod controller;
mod group;
mod hash;
mod host;
mod message;
mod private;
mod random;
mod secret;
#[cfg(test)]
mod tests;

pub use controller::{Answer, AuthStatus, Controller};
pub use group::Group;
pub use hash::Hash;
pub use host::{AuthFailure, Host};
pub use message::{Failure, MAX_MESSAGE_LEN};
pub use private::read_private;
pub use random::Random;
pub use secret::{Secret, SecretError};

/// NQNs of host and subsystem, which both responses include.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// NQN of the host.
    pub host: String,
    /// NQN of the subsystem.
    pub subsystem: String,
}

/// Secrets shared by the two sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secrets {
    /// Secret that authenticates the host.
    pub host: Secret,
    /// Secret that authenticates the controller, if the host requires that.
    pub controller: Option<Secret>,
}
