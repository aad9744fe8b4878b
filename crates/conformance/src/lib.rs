//! Conformance cases for NVMe controllers that are served over vfio-user, ours or another's.
//!
//! A [`Case`] is a function that drives a controller as a host does and holds what it does against
//! the standard (NVMe Base 2.1, NVM Command Set 1.1, NVMe over PCIe Transport 1.1); [`CASES`] is
//! the table of all of them. Each names the entries of the public test plan ([`plan`]) that it
//! stands for; [`matrix`] makes docs/conformance.md of the two, so that the document says what is
//! run. [`suite`] runs them, each by a connection of its own ([`Host`]).
//!
//! A case writes to the namespaces. What it looks at is what the controller says and does, never
//! what is configured: one that needs a capability asks for it, and does not apply without.
//!
//! *What it does not do.* It uses neither the driver (which sends nothing that is wrong) nor the
//! layouts of crate `nvme` for commands and for what a controller returns: those of crate
//! `test-host` are written from the standard once more. It knows nothing of the inside of a
//! controller. There is no unsafe code.
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
