//! Sandbox of a process that serves hostile clients, entered once all files are open.
//!
//! An attacker who compromises the process by a memory error should find only its open files,
//! devices and sockets. The process therefore permanently drops:
//!
//! | dropped | by | since |
//! |---|---|---|
//! | more rights by executing something | `no_new_privs` | Linux 3.5 |
//! | capabilities, but those that [`Needs`] name | capset(2), bounding and ambient set | |
//! | core dumps, raising of limits | RLIMITs | |
//! | every file by its path, except that the named sockets' files can be removed | Landlock | 5.13 |
//! | TCP; signals and abstract sockets of other processes; UDP, sockets by their paths | Landlock | 6.7; 6.12; later |
//! | system calls that are not on the list (module `calls`) | seccomp | 3.5 |
//!
//! There are two steps. [`Sandbox::enter`] is called by the main thread when all files are open,
//! before it starts the serving threads. Its restrictions apply to a thread, and a new thread
//! inherits those of its creator. The same holds for kernel threads that work for it (io_uring's),
//! and the rings that it creates. A thread that must exist earlier calls [`leave_nothing`] first.
//! [`Sandbox::seal`] is called when the threads have created their resources, before the first
//! client is served: it installs the list of system calls in all threads at once.
//!
//! If the kernel lacks a part, that part is left out, and [`SandboxReport`] lists it. This crate
//! serves and logs nothing.
//!
//! # Example
//!
//! ```no_run
//! let needs = sandbox::Needs {
//!     remove_in: vec!["/run/vnvme".into()],
//!     ..sandbox::Needs::default()
//! };
//! let sandbox = sandbox::Sandbox::new(needs);
//! let report = sandbox.enter()?;
//! eprintln!("{report}");
//! // Threads are started, and make their rings.
//! sandbox.seal()?;
//! # Ok::<(), sandbox::Error>(())
//! ```
#![forbid(unsafe_code)]

mod calls;
mod capabilities;
mod error;
mod files;
mod limits;
mod needs;
mod report;
mod threads;

pub use error::Error;
pub use needs::{Connect, Needs};
pub use report::{Landlock, SandboxReport};

use rustix::thread::CapabilitySet;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Sandbox of a process: file paths, capabilities and system calls.
#[derive(Debug)]
pub struct Sandbox {
    needs: Needs,
    /// Whether Landlock restricts the opening of files, once the sandbox was entered.
    holds: OnceLock<bool>,
}

impl Sandbox {
    /// Creates a sandbox that leaves the process these rights.
    pub fn new(needs: Needs) -> Self {
        let holds = OnceLock::new();
        Self { needs, holds }
    }

    /// Drops all rights except the needed ones and system calls, for the calling thread and its
    /// later children.
    ///
    /// # Errors
    /// [`Error`] when the kernel supports a part, but refuses to enforce it. A part of the rights
    /// is dropped by then.
    pub fn enter(&self) -> Result<SandboxReport, Error> {
        limits::lower().map_err(Error::system("limits (setrlimit)"))?;
        no_new_privileges()?;
        let capabilities = drop_all_but(capabilities::of(&self.needs))?;
        let outside = threads::outside();
        // Landlock is last: the kernel files that list held rights are inaccessible afterwards.
        let landlock = files::restrict(&self.needs, files::DomainScope::Process)?;
        let _ = self.holds.set(matches!(landlock, Landlock::Abi(_)));
        Ok(SandboxReport {
            landlock,
            capabilities,
            outside,
            seccomp: calls::is_known(),
        })
    }

    /// Restricts system calls, in all present and future threads of the process.
    ///
    /// # Errors
    /// [`Error::Calls`] when a filter cannot be installed.
    pub fn seal(&self) -> Result<(), Error> {
        if !calls::is_known() {
            return Ok(());
        }
        let holds = self.holds.get().copied().unwrap_or(false);
        calls::install(&self.needs, holds)
    }
}

/// Leaves the calling thread only open files: for threads that are started before
/// [`Sandbox::enter`], and need no more. Parts that the kernel lacks are left out.
///
/// # Errors
/// The errors of [`Sandbox::enter`].
pub fn leave_nothing() -> Result<(), Error> {
    no_new_privileges()?;
    drop_all_but(CapabilitySet::empty())?;
    files::restrict(&Needs::default(), files::DomainScope::Thread).map(drop)
}

/// Leaves the calling thread and its children only rights to files and programs: those of its user,
/// and for root also those of other users (`CAP_DAC_OVERRIDE`). For a process that starts
/// processes, and makes sockets for other users below `sockets_below`. On a kernel with Landlock it
/// makes and removes no other files.
///
/// # Errors
/// The errors of [`Sandbox::enter`].
pub fn leave_files(sockets_below: &[PathBuf]) -> Result<(), Error> {
    no_new_privileges()?;
    let mut kept = CapabilitySet::DAC_OVERRIDE;
    kept.set(CapabilitySet::CHOWN, !sockets_below.is_empty());
    drop_all_but(kept)?;
    files::restrict_to_sockets(sockets_below)
}

/// Leaves the calling thread and its children their user's rights, except changes to the kernel,
/// the user, the view of the system or another process. For a process that starts one which needs
/// its user's rights until it has opened all files.
///
/// # Errors
/// The errors of [`Sandbox::enter`].
pub fn leave_user() -> Result<(), Error> {
    no_new_privileges()?;
    if calls::is_known() {
        calls::install_for_starter()
    } else {
        Ok(())
    }
}

fn drop_all_but(wanted: CapabilitySet) -> Result<CapabilitySet, Error> {
    capabilities::drop_all_but(wanted).map_err(Error::system("capabilities (capset)"))
}

fn no_new_privileges() -> Result<(), Error> {
    rustix::thread::set_no_new_privs(true)
        .map_err(io::Error::from)
        .map_err(Error::system("no_new_privs (prctl)"))
}
