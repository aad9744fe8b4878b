//! DH-HMAC-CHAP, the authentication protocol of NVMe over Fabrics ("NVMe Base 2.1", 8.3.5.5), as
//! code without sockets: messages, secrets, and what either side does.
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
//! [`Host`] and [`Controller`] are the two sides of one transaction; who has a connection takes
//! their messages to the other side by Authentication Send and Receive. Random numbers come from
//! the kernel, or from who makes a side ([`Random`]).
//!
//! *What may be touched here.* The bytes of messages, and files that hold secrets
//! ([`read_private`]). *What may not.* Sockets, clocks, threads, other files. A secret is never
//! shown: what holds one has no [`Debug`] of it, and it is wiped when it is dropped. What the other
//! side proves is compared in constant time.
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

pub use controller::{Answer, Controller, Step};
pub use group::Group;
pub use hash::Hash;
pub use host::{Host, Refused};
pub use message::{Failure, LONGEST};
pub use private::read_private;
pub use random::Random;
pub use secret::{Secret, SecretError};

/// Who speaks to whom: parts of both responses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// The host's NQN.
    pub host: String,
    /// The subsystem's NQN.
    pub subsystem: String,
}

/// What the two sides have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secrets {
    /// By which the host proves who it is.
    pub host: Secret,
    /// By which the controller does, where the host asks for that.
    pub controller: Option<Secret>,
}
