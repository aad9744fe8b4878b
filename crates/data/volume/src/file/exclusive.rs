//! Exclusive claim of this process on a block device.
//!
//! `O_EXCL` keeps mounts, swap and device mapper off a block device, but also a second opening by
//! the same process. Each device is therefore claimed once, by a descriptor that all of its volumes
//! share. Conflicts among these volumes are detected by the locks on their ranges.

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use sync::Unpoisoned;

/// Error of the system call that claims a block device exclusively.
pub(super) struct ClaimRefused(pub(super) Errno);

static CLAIMS: Mutex<Vec<(u64, Weak<OwnedFd>)>> = Mutex::new(Vec::new());

/// Claims the block device `device` at `path` exclusively. The claim lasts as long as the
/// descriptor.
pub(super) fn claim(path: &Path, device: u64) -> Result<Arc<OwnedFd>, ClaimRefused> {
    let mut claims = CLAIMS.lock().unpoisoned();
    claims.retain(|(_, fd)| fd.strong_count() > 0);
    let known = claims.iter().find(|(number, _)| *number == device);
    if let Some(fd) = known.and_then(|(_, fd)| fd.upgrade()) {
        return Ok(fd);
    }
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = Arc::new(fs::open(path, flags, Mode::empty()).map_err(ClaimRefused)?);
    claims.push((device, Arc::downgrade(&fd)));
    Ok(fd)
}
