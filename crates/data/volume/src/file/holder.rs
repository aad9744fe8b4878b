//! Search for the processes that have a file open, for the message about a locked file.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Maximum number of lock holders that an error message names.
const NAMED: usize = 3;

/// Other processes that have a file open, as far as this process may see them. Processes of other
/// users may be invisible.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Holders {
    /// Descriptions of the processes that hold the lock.
    Processes(Vec<String>),
    /// No living process has the file open: requests that the kernel still processes hold it.
    Kernel,
    /// The holders are unknown, because this process may not see other processes.
    Unknown,
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Processes(names) => f.write_str(&names.join(", ")),
            Self::Kernel => f.write_str("the kernel, for a process that has ended"),
            Self::Unknown => f.write_str("another process, or by this one a second time"),
        }
    }
}

/// Returns the holders of `path`. `whole`: the whole file is wanted, so that a part locked by
/// another opening of this process counts, too. Parts are checked against each other by
/// [`crate::claim()`] before they are locked.
pub(super) fn holders(path: &Path, whole: bool) -> Holders {
    let Ok(file) = fs::metadata(path) else {
        return Holders::Unknown;
    };
    let Ok(processes) = fs::read_dir("/proc") else {
        return Holders::Unknown;
    };
    let (dev, ino) = (file.dev(), file.ino());
    let own = std::process::id();
    let (mut names, mut hidden) = (Vec::new(), false);
    if whole && has_lock(dev, ino) {
        names.push("this process itself".to_owned());
    }
    for pid in processes.flatten().filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.parse::<u32>().ok()
    }) {
        match has_open(pid, dev, ino) {
            _ if pid == own => {}
            Some(true) if names.len() < NAMED => names.push(named(pid)),
            Some(_) => {}
            None => hidden = true,
        }
    }
    match (names.is_empty(), hidden) {
        (false, _) => Holders::Processes(names),
        (true, true) => Holders::Unknown,
        (true, false) => Holders::Kernel,
    }
}

fn named(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim_end()),
        Err(_) => format!("process {pid}"),
    }
}

/// Returns whether a process has this file open; `None` when this process may not see that. An
/// ended process has no open files.
fn has_open(pid: u32, dev: u64, ino: u64) -> Option<bool> {
    match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(mut fds) => Some(fds.any(|fd| fd.is_ok_and(|fd| is(&fd, dev, ino)))),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => None,
        Err(_) => Some(false),
    }
}

/// Returns whether any opening of this file by this process holds a lock (proc_pid_fdinfo(5)).
fn has_lock(dev: u64, ino: u64) -> bool {
    let Ok(fds) = fs::read_dir("/proc/self/fd") else {
        return false;
    };
    let same = fds.flatten().filter(|fd| is(fd, dev, ino));
    let mut infos = same.filter_map(|fd| {
        let number = fd.file_name();
        fs::read_to_string(format!("/proc/self/fdinfo/{}", number.to_str()?)).ok()
    });
    infos.any(|info| info.contains("OFDLCK"))
}

fn is(fd: &fs::DirEntry, dev: u64, ino: u64) -> bool {
    let file = fs::metadata(fd.path());
    file.is_ok_and(|file| file.dev() == dev && file.ino() == ino)
}
