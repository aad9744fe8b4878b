//! Conformance cases for NVMe controllers that are served over vfio-user, ours or another's.
//!
//! A [`Case`] is a function that drives a controller as a host does and checks it against the
//! standard (NVMe Base 2.1, NVM Command Set 1.1, NVMe over PCIe Transport 1.1); [`CASES`] is the
//! table of all of them. Each names the entries of the public test plan ([`plan`]) that it covers.
//! [`matrix`] makes docs/conformance.md of the two, so that the document matches the cases.
//! [`suite`] runs them, each by a connection of its own ([`Host`]).
//!
//! A case writes to the namespaces. It checks the controller's reports and behaviour, never its
//! configuration. A case that needs a capability reads it from the controller, and does not apply
//! without.
//!
//! *Limits.* This crate uses neither the driver (which sends no wrong commands) nor the layouts of
//! crate `nvme` for commands and for data that a controller returns: those of crate `test-host` are
//! written from the standard once more. It knows nothing of the inside of a controller. There is no
//! unsafe code.
//!
//! # To add a case
//!
//! 1. Write `fn name(host: &mut Host) -> Check` in the module of `cases` whose subject it is.
//! 2. Add its row to that module's table, with the plan's entries and the section of the standard.
//! 3. Break the controller where the case looks, and see it fail.
//! 4. `make docs`.
#![forbid(unsafe_code)]

mod bytes;
mod case;
mod cases;
mod host;
mod info;
pub mod matrix;
pub mod plan;
pub mod served;
pub mod suite;
mod verdict;

pub use case::{Case, Need, Setup};
pub use cases::CASES;
pub use host::Host;
pub use verdict::{Check, Verdict};
