//! Rights that a process keeps.

use std::path::PathBuf;

/// Address to which the process may open connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Connect {
    /// TCP port on any host, because the kernel's rules cannot name hosts.
    Tcp(u16),
    /// Sockets in a directory, since a socket that is recreated meanwhile is another file.
    UnixIn(PathBuf),
}

/// Rights needed after the start. The default keeps only open files. Missing directories are left
/// out: files that appear in their places later are out of reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Directories of Unix sockets, in which the sockets' files are removed at the end.
    pub remove_in: Vec<PathBuf>,
    /// Directories below which files may still be opened for reading, until
    /// [`Sandbox::seal`](crate::Sandbox::seal), by threads that inspect themselves when they begin.
    /// Missing directories are left out.
    pub read_in: Vec<PathBuf>,
    /// Directories below which files may permanently be opened, and sockets and files created and
    /// removed; also files and devices that may be opened. For a process that serves more while it
    /// runs. With an entry here, in `files_in` or in `read_below`, the calls that open files are
    /// allowed. The calls that create listening Unix sockets are allowed only with an entry here.
    pub open_below: Vec<PathBuf>,
    /// Directories in which files may permanently be created, renamed, removed, and opened for
    /// reading and writing. For pools with changing volumes.
    pub files_in: Vec<PathBuf>,
    /// Directories below which files may be opened for reading only.
    pub read_below: Vec<PathBuf>,
    /// Open memory files are reopened by `/proc/self/fd`. Landlock allows only them. Left out if
    /// that directory is missing.
    pub reopen: bool,
    /// The process recovers disks of an earlier process while it runs: it listens on their sockets,
    /// and queries the fill level of their pipes.
    pub takes_over: bool,
    /// Addresses to which the process connects while it runs.
    pub connect: Vec<Connect>,
    /// A client library with threads and an event loop of its own serves volumes (Ceph's): allows
    /// the older calls that it uses.
    pub library: bool,
    /// The process locks memory beyond RLIMIT_MEMLOCK if permitted, so `CAP_IPC_LOCK` is kept. For
    /// fixed buffers of io_uring, and for memory that a device accesses.
    pub lock_memory: bool,
    /// Whether the process drives devices through VFIO, so that its ioctls are allowed.
    pub vfio: bool,
    /// Block devices are served through ublk. The kernel requires `CAP_SYS_ADMIN` for each control
    /// command (Linux 6.12, `ublk_ctrl_uring_cmd`), and each queue creates a ring of its own after
    /// start-up.
    pub ublk: bool,
}
