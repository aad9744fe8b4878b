//! Reservations of shared namespaces that have no file for them. Each is a memory file, which the
//! keeper holds as long as a disk has the namespace: the end of the process is no loss of power.

use super::memory::{BYTES, MemoryName};
use super::session::KeeperSession;
use crate::open::subsystems;
use anyhow::{Context, Result};
use reservations::{ReservationFile, Reservations, StoredReservations};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Name of the memory in errors.
const NAME: &str = "reservations kept in memory";
/// Identifier of the namespace in the memory, which the keeper knows by its own name.
const NAMESPACE: [u8; 16] = [0; 16];

/// Memory of a namespace's reservations, which is kept until this is dropped after use.
#[derive(Debug)]
pub struct KeptReservations {
    name: MemoryName,
    file: File,
    /// Whether a disk with the namespace has been served. A disk that is unavailable has the
    /// reservations when it is served again.
    is_used: AtomicBool,
    /// Whether the keeper has the memory.
    pub is_kept: bool,
}

/// Opens the reservations of a namespace of this subsystem that a previous process has left, or
/// new ones. Returns `None` without a keeper: the reservations end with the process.
///
/// # Errors
/// The memory cannot be created, or has no valid state.
pub fn open(
    keeper: &Arc<KeeperSession>,
    subsystem: &str,
    nsid: u32,
) -> Result<Option<(KeptReservations, ReservationFile, StoredReservations)>> {
    if !keeper.is_kept() {
        return Ok(None);
    }
    let owner = subsystems::reservations_owner(subsystem);
    let mut found = None;
    let name = MemoryName::new(keeper, BYTES, &owner, nsid, |name| {
        found = keeper.take(name);
        found.is_some()
    });
    if let (Some(name), Some(file)) = (name, found) {
        let memory = KeptReservations {
            name,
            file: file.into(),
            is_used: AtomicBool::new(false),
            is_kept: true,
        };
        let file = memory.file.try_clone().context(NAME)?;
        let (file, stored) = ReservationFile::open_memory(file, Path::new(NAME), NAMESPACE)?;
        return Ok(Some((memory, file, stored)));
    }
    let name =
        MemoryName::new(keeper, BYTES, &owner, nsid, |_| true).context("too many are kept")?;
    let file = memfd_create("vnvme-reservations", MemfdFlags::CLOEXEC).context(NAME)?;
    let file = File::from(file);
    let copy = file.try_clone().context(NAME)?;
    let copy = ReservationFile::new_memory(copy, Path::new(NAME), NAMESPACE)?;
    let stored = keeper.store(&name.name, file.as_fd());
    if let Err(error) = &stored {
        tracing::error!(subsystem, nsid, %error, "reservations are not kept");
    }
    let memory = KeptReservations {
        name,
        file,
        is_used: AtomicBool::new(false),
        is_kept: stored.is_ok(),
    };
    Ok(Some((memory, copy, Reservations::new(false).into())))
}

impl KeptReservations {
    /// Records that a disk with the namespace is served.
    pub fn served(&self) {
        self.is_used.store(true, Ordering::Relaxed);
    }
}

impl Drop for KeptReservations {
    fn drop(&mut self) {
        if !self.is_kept {
            return;
        }
        let MemoryName { name, keeper } = &self.name;
        let file = self.file.try_clone().ok();
        match file.filter(|_| !self.is_used.load(Ordering::Relaxed)) {
            Some(file) => keeper.put_back(name, file.into()),
            None => keeper.remove(name),
        }
    }
}
