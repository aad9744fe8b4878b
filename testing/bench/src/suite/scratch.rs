//! Temporary directories of a suite. They are removed when dropped, when the process receives a
//! termination signal, and, after a kill, when the next suite finds them.

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;
use sync::Unpoisoned;

const PREFIX: &str = "vnvme-bench-";
/// Name of the file in each directory that its process locks.
const LOCK: &str = "lock";

/// Temporary directories of this process.
static LIVE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A temporary directory of this process.
pub struct Scratch {
    path: PathBuf,
    /// Lock on the directory. A process that can take it knows that the owner is dead, even from
    /// another PID namespace.
    _lock: OwnedFd,
}

impl Scratch {
    /// Creates a directory in the system's temporary directory.
    pub fn new() -> Result<Scratch> {
        Self::new_in(&std::env::temp_dir())
    }

    /// Creates a directory in `parent`, and removes those of dead processes there.
    pub fn new_in(parent: &Path) -> Result<Scratch> {
        remove_dead(parent);
        loop {
            // A signal between these would leave the folder, so it waits for the list.
            let mut live = LIVE.lock().unpoisoned();
            let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let path = made
                .with_context(|| format!("{}", parent.display()))?
                .keep();
            // Another process that looks for dead ones may come before the lock, and takes the
            // folder then.
            if let Some(lock) = lock(&path, OFlags::CREATE) {
                live.push(path.clone());
                return Ok(Scratch { path, _lock: lock });
            }
        }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut live = LIVE.lock().unpoisoned();
        remove(&self.path);
        live.retain(|path| *path != self.path);
    }
}

/// Removes a directory. A server that is about to end may create a socket in it meanwhile, so
/// removal is retried for two seconds. A directory that cannot be removed is left for the next
/// suite.
fn remove(folder: &Path) {
    for _ in 0..200 {
        match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                std::thread::sleep(Duration::from_millis(10));
            }
            _ => return,
        }
    }
}

/// Locks a directory, if it exists and is not locked.
fn lock(folder: &Path, create: OFlags) -> Option<OwnedFd> {
    let path = folder.join(LOCK);
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | create;
    let fd = open(&path, flags, Mode::RUSR | Mode::WUSR).ok()?;
    flock(&fd, FlockOperation::NonBlockingLockExclusive).ok()?;
    // The folder may have been removed in between.
    let (locked, named) = (rustix::fs::fstat(&fd).ok()?, std::fs::metadata(&path).ok()?);
    (locked.st_ino == named.ino()).then_some(fd)
}

/// Removes the directories of dead processes in `parent`.
fn remove_dead(parent: &Path) {
    let uid = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(PREFIX))
            && entry
                .metadata()
                .is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
        if !ours {
            continue;
        }
        // A folder that cannot be removed stays for the next suite.
        let folder = entry.path();
        let _ = match lock(&folder, OFlags::empty()) {
            Some(_lock) => std::fs::remove_dir_all(&folder),
            // Locked, or not yet; without a lock it is empty.
            None => std::fs::remove_dir(&folder),
        };
    }
}

/// Makes SIGTERM, SIGINT and SIGHUP remove the directories before they end the process.
pub fn clean_up_on_signals() -> Result<()> {
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        let (mut reader, writer) = UnixStream::pair().context("socket pair for signals")?;
        signal_hook::low_level::pipe::register(signal, writer).context("signal handler")?;
        let wait = move || {
            let _ = reader.read(&mut [0]);
            let live = LIVE.lock().unpoisoned();
            live.iter().for_each(|path| remove(path));
            // The list stays locked: no folder is made any more.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        };
        let builder = std::thread::Builder::new().name("signals".into());
        builder.spawn(wait).context("a thread for signals")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_removes_folders_of_dead_processes_only() {
        let parent = tempfile::tempdir().unwrap();
        let live = Scratch::new_in(parent.path()).unwrap();
        let dead = parent.path().join("vnvme-bench-dead");
        std::fs::create_dir(&dead).unwrap();
        std::fs::write(dead.join("disk.raw"), "data").unwrap();
        std::fs::write(dead.join(LOCK), "").unwrap();
        let begun = parent.path().join("vnvme-bench-begun");
        std::fs::create_dir(&begun).unwrap();
        let other = parent.path().join("precious");
        std::fs::create_dir(&other).unwrap();
        // A symbolic link is not followed.
        let link = parent.path().join("vnvme-bench-link");
        std::os::unix::fs::symlink(&other, &link).unwrap();
        let next = Scratch::new_in(parent.path()).unwrap();
        assert!(!dead.exists() && !begun.exists());
        assert!(live.path().exists() && next.path().exists() && other.exists() && link.exists());
        let path = live.path().to_path_buf();
        drop(live);
        assert!(!path.exists() && next.path().exists());
    }
}
