//! The NVMe over TCP protocol ("NVMe over TCP Transport 1.1"), without sockets.
//!
//! Both sides are implemented. A host sends command capsules and data, and parses the controller's
//! PDUs ([`Answers`]); a controller parses the host's PDUs ([`Requests`]). Bytes arrive in pieces
//! of any size, as from a socket. Nothing from the other side is trusted: types, lengths, data
//! offsets, flags and digests are checked, and each response against its command. The caller can
//! therefore act on a parser's results without further checks.
//!
//! This crate processes bytes only. It has no sockets, clocks, queues or guest memory.
//!
//! # Sequence of a connection
//!
//! ```text
//! host                                   controller
//!   ICReq  ------------------------------>         requested parameters: Host::request
//!          <------------------------------ ICResp  negotiated parameters: ConnectionLimits
//!   CapsuleCmd [data in the capsule] ---->
//!          <------------------------------ R2T     a part of a write may be sent
//!   H2CData ----------------------------->
//!          <------------------------------ C2HData data of a read; with SUCCESS, its answer, too
//!          <------------------------------ CapsuleResp
//!   H2CTermReq, C2HTermReq                         the end, when the other side breaks a rule
//! ```
#![forbid(unsafe_code)]

mod answers;
pub mod digest;
mod frame;
mod grants;
mod in_flight;
mod initialize;
pub mod pdu;
mod requests;
mod violation;
mod write;

pub use answers::{Answer, Answers, Expected};
pub use grants::{Grant, Grants};
pub use in_flight::{CommandInfo, InFlight, InFlightCommand};
pub use initialize::{ConnectionLimits, Controller, Host};
pub use requests::{Request, Requests};
pub use violation::{Terminated, Violation};
pub use write::{Header, Writer};

/// Default TCP port of NVMe over TCP (IANA).
pub const PORT: u16 = 4420;
/// Maximum in-capsule data in bytes on an Admin queue, or for a fabrics command ("NVMe over TCP
/// Transport 1.1", 3.2).
pub const ADMIN_IN_CAPSULE: u32 = 8192;
