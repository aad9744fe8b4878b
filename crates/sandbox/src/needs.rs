//! What a process has to keep.

use std::path::PathBuf;

/// Somebody that the process may connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Connect {
    /// A TCP port, of any host: the kernel's rules know no hosts.
    Tcp(u16),
    /// Sockets in a directory: one that is made anew while the process runs is another file.
    UnixIn(PathBuf),
}

/// What the process needs after its start. The default: nothing but what is open. Directories that
/// are not there are left out: whatever comes to their places later is out of reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Directories in which files are removed at the end: those of sockets.
    pub remove_in: Vec<PathBuf>,
    /// Directories below which files may still be opened to read them, until
    /// [`Sandbox::seal`](crate::Sandbox::seal): by threads that look at themselves when they begin.
    /// Those that are not there are left out.
    pub read_in: Vec<PathBuf>,
    /// Directories below which files may be opened, and sockets and files be made and removed, for
    /// good; files and devices that may be opened. For a process that serves more while it runs.
    /// With any of them, of `files_in` or of `read_below`, the calls that open files are allowed;
    /// those that make listening Unix sockets only with some of these.
    pub open_below: Vec<PathBuf>,
    /// Directories in which files are made, renamed and removed, and opened to be read and written,
    /// for good. For pools of volumes that come and go.
    pub files_in: Vec<PathBuf>,
    /// As `open_below`, only to be read.
    pub read_below: Vec<PathBuf>,
    /// Memory files that are open are opened once more, by `/proc/self/fd`: Landlock lets them, and
    /// nothing else. Where it is not there, this is left out.
    pub reopen: bool,
    /// Disks that an earlier process has left are gone on with while the process runs: it listens
    /// with their sockets, and asks how much is in their pipes.
    pub takes_over: bool,
    /// To whom stream sockets are connected while the process runs.
    pub connect: Vec<Connect>,
    /// A client library with threads and an event loop of its own serves volumes (Ceph's): what it
    /// still calls in its older forms.
    pub library: bool,
    /// Memory is locked beyond the limit of locked memory, where the process may: `CAP_IPC_LOCK` is
    /// kept. For fixed buffers of io_uring, and for memory that a device reads and writes.
    pub lock_memory: bool,
    /// Devices are driven through VFIO: their ioctls.
    pub vfio: bool,
    /// Block devices are served through ublk: the kernel asks for `CAP_SYS_ADMIN` with each command
    /// of control (Linux 6.12, `ublk_ctrl_uring_cmd`), and each queue makes a ring of its own once
    /// all else is up.
    pub ublk: bool,
}
