//! Disks that survive their process: the keeper that holds their descriptors (crate `keeper`), and
//! the descriptors that are there when a process starts ([`KeeperSession`]).
//!
//! ```text
//! vnvme serve ... : reads command line and configuration, then becomes (execve)
//!   the keeper process (`process`), which starts, and starts again
//!     vnvme serve ... with VNVME_KEPT: the serving process, which takes what is kept
//! ```
//!
//! With systemd as the keeper there is no keeper process. systemd restarts the serving process, and
//! passes the kept descriptors among its sockets (`session`).

mod attempts;
mod configuration;
mod controller;
mod disk;
mod exports;
mod life;
mod memory;
mod process;
mod records;
mod reservations;
mod served;
mod servers;
mod session;
mod sockets;
mod versions;

pub(crate) use attempts::Attempt;
pub use configuration::PreviousConfiguration;
pub(crate) use configuration::Unavailable;
pub(crate) use controller::ControllerParts;
pub(crate) use disk::{
    ClientPages, Identity, InitialDescriptors, PreviousDisk, Survival, keep_pages,
};
pub(crate) use exports::KeptSocket;
pub(crate) use memory::place as memory_place;
pub use process::{LAST, last, run, wanted};
pub(crate) use records::RecordsFile;
pub(crate) use reservations::{KeptReservations, open as open_reservations};
pub(crate) use servers::KeptServers;
pub use session::KeeperSession;
pub(crate) use sockets::{LeftSocket, ProcessSocket};
pub use versions::{VERSIONS, Versions};
