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

pub use attempts::{Attempt, begin_attempts, deaths_of, pause_after_deaths};
pub use configuration::{PreviousConfiguration, Unavailable, before, is_noted, note, note_first};
pub use controller::ControllerParts;
pub use disk::{
    ClientPages, Identity, InitialDescriptors, PreviousDisk, Survival, client_of, discard_rest,
    expect, give_up, keep_pages, left_of, listens_at,
};
pub use exports::{KeptSocket, LeftSocket, export_listens_at, left_socket};
pub use life::{
    die_of_panics, has_lost_keeper, last_pause, look, say_served, serves, tell_receiver,
};
pub use memory::place as memory_place;
pub use mode::KeeperMode;
pub use pool::{
    arrive, end, expect_disks, is_kept, is_successor, is_systemd, kept, outlive_keeper, pid,
};
pub use process::{LAST, begin, last, name_process, run, wanted};
pub use records::RecordsFile;
pub use reservations::{KeptReservations, open as open_reservations};
pub use served::{is_replacement, tell_failure, was_served};
pub use servers::KeptServers;
pub use sockets::ProcessSocket;
pub use versions::{VERSIONS, Versions};
