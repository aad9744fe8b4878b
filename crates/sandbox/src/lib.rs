//! What a process that serves hostile clients gives up once everything is open.
//!
//! Who takes the process over by an error of memory safety is to find nothing in it but what
//! it serves: its open files, devices and sockets. So the process gives up, for good:
//!
//! | what | by | since |
//! |---|---|---|
//! | more rights by executing something | `no_new_privs` | Linux 3.5 |
//! | capabilities, but those that [`Needs`] name | capset(2), bounding and ambient set | |
//! | core dumps, raising of limits | RLIMITs | |
//! | every file by its path, except that the named sockets' files can be removed | Landlock | 5.13 |
//! | TCP; signals and abstract sockets of other processes; UDP, sockets by their paths | Landlock | 6.7; 6.12; later |
//! | system calls that are not on the list (module `calls`) | seccomp | 3.5 |
//!
//! There are two steps. [`Sandbox::enter`] is called by the main thread when everything is open,
//! before it starts the threads that serve: what it gives up belongs to a thread, and a new thread
//! has what its maker has. So have the kernel's own threads that work for it (io_uring's), and the
//! rings that it makes. A thread that has to be there before calls [`leave_nothing`] as its first
//! act. [`Sandbox::seal`] is called when the threads have made what they need, before the first
//! client is served: it installs the list of system calls in all threads at once.
//!
//! Where the kernel lacks a part, that part is left out, and [`Report`] says so. Nothing here
//! serves or logs anything.
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
pub use report::{Landlock, Report};

use rustix::thread::CapabilitySet;
use std::io;
use std::sync::OnceLock;

/// The sandbox of a process.
#[derive(Debug)]
pub struct Sandbox {
    needs: Needs,
    /// Landlock holds what is opened.
    holds: OnceLock<bool>,
}

impl Sandbox {
    /// One that leaves what is needed.
    pub fn new(needs: Needs) -> Self {
        let holds = OnceLock::new();
        Self { needs, holds }
    }

    /// Gives up everything but what is needed, except system calls: for the calling thread, and for
    /// all that it starts from now on.
    ///
    /// # Errors
    /// [`Error`]: the kernel has a part, but refuses to enforce it. Some is given up by then.
    pub fn enter(&self) -> Result<Report, Error> {
        limits::lower().map_err(Error::system("limits (setrlimit)"))?;
        no_new_privileges()?;
        let capabilities = drop_all_but(capabilities::of(&self.needs))?;
        let outside = threads::outside();
        // Last: the files of the kernel that say what is held are out of reach afterwards.
        let landlock = files::restrict(&self.needs, files::Reach::Process)?;
        let _ = self.holds.set(matches!(landlock, Landlock::Abi(_)));
        Ok(Report {
            landlock,
            capabilities,
            outside,
            seccomp: calls::is_known(),
        })
    }

    /// Gives up system calls, in all threads of the process, and in those to come.
    ///
    /// # Errors
    /// [`Error::Calls`].
    pub fn seal(&self) -> Result<(), Error> {
        if !calls::is_known() {
            return Ok(());
        }
        let holds = self.holds.get().copied().unwrap_or(false);
        calls::install(&self.needs, holds)
    }
}

/// Leaves the calling thread nothing but what is open: for threads that are started before
/// [`Sandbox::enter`], and need no more. Parts that the kernel lacks are left out.
///
/// # Errors
/// As [`Sandbox::enter`].
pub fn leave_nothing() -> Result<(), Error> {
    no_new_privileges()?;
    drop_all_but(CapabilitySet::empty())?;
    files::restrict(&Needs::default(), files::Reach::Thread).map(drop)
}

/// Leaves the calling thread, and what it starts, no right but to files and programs: those of its
/// user, and for root also those of others (`CAP_DAC_OVERRIDE`). For a process that starts others.
///
/// # Errors
/// As [`Sandbox::enter`].
pub fn leave_files() -> Result<(), Error> {
    no_new_privileges()?;
    drop_all_but(CapabilitySet::DAC_OVERRIDE).map(drop)
}

/// Leaves the calling thread, and what it starts, all that its user may do, but not what would
/// change the kernel, the user, the view of the system or another process: for a process that
/// starts one which needs its user's rights until it has opened everything.
///
/// # Errors
/// As [`Sandbox::enter`].
pub fn leave_user() -> Result<(), Error> {
    no_new_privileges()?;
    match calls::is_known() {
        true => calls::install_for_starter(),
        false => Ok(()),
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
