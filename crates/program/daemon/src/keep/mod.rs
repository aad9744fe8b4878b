//! Disks that survive their process: the keeper that holds their descriptors (crate `keeper`), and
//! the descriptors that are there when a process starts.
//!
//! ```text
//! vnvme serve ... : reads command line and configuration, then becomes (execve)
//!   the keeper process (`process`), which starts, and starts again
//!     vnvme serve ... with VNVME_KEPT: the serving process, which takes what is kept (`arrive`)
//! ```
//!
//! With systemd as the keeper there is no keeper process. systemd restarts the serving process, and
//! passes the kept descriptors among its sockets (`pool::take_systemd`).

mod attempts;
mod configuration;
mod controller;
mod disk;
mod exports;
mod life;
mod memory;
mod mode;
mod pool;
mod process;
mod records;
mod reservations;
mod served;
mod servers;
mod sockets;
mod versions;

pub(crate) use attempts::begin_attempts;
pub(crate) use attempts::{Attempt, deaths_of, pause_after_deaths};
pub use configuration::{PreviousConfiguration, before};
pub(crate) use configuration::{Unavailable, is_noted, note, note_first};
pub(crate) use controller::ControllerParts;
pub(crate) use disk::{
    ClientPages, Identity, InitialDescriptors, PreviousDisk, Survival, client_of, discard_rest,
    expect, give_up, keep_pages, left_of, listens_at,
};
pub(crate) use exports::{KeptSocket, LeftSocket, export_listens_at, left_socket};
pub(crate) use life::{
    die_of_panics, has_lost_keeper, is_followed, last_pause, look, own_sockets, owns_sockets,
    say_served, serves, tell_receiver,
};
pub(crate) use memory::place as memory_place;
pub use pool::{arrive, is_kept};
pub(crate) use pool::{end, expect_disks, is_successor, is_systemd, kept, outlive_keeper, pid};
pub use process::{LAST, last, run, wanted};
pub(crate) use process::{begin, name_process};
pub(crate) use records::RecordsFile;
pub(crate) use reservations::{KeptReservations, open as open_reservations};
pub(crate) use served::{is_replacement, tell_failure, was_served};
pub(crate) use servers::KeptServers;
pub(crate) use sockets::ProcessSocket;
pub use versions::{VERSIONS, Versions};
