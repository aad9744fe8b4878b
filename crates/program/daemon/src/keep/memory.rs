//! Volumes in memory that survive the process, as their disks do. Each is a memory file, which the
//! keeper holds under a name made from the disk's name and the namespace's.
//!
//! A volume that is closed in order is no longer kept: `mem://` promises no more.

use super::disk::settled;
use super::pool::kept;
use crate::open::subsystems;
use config::disk::DiskSpec;
use config::identity;
use keeper::KeeperClient;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{Info, Io, MemoryPlace, OpenQueue, Volume, VolumeError};

/// Prefix of the volumes' names; a digest of the disk's name and the NSID follows.
const PREFIX: &str = "vnvme.m";

/// Names that memory volumes of this process have with the keeper.
static USED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Name of a memory volume with the keeper, reserved until this value is dropped.
#[derive(Debug)]
pub struct MemoryName(pub(super) String);

/// Volumes of the same disk and number that there may be: a disk is replaced while the one before
/// it is still there, and disks need not have names.
const ALIKE: u32 = 64;

impl MemoryName {
    /// Reserves a name that no other volume has, for a namespace of a disk. `wanted` selects usable
    /// names.
    pub(super) fn new(disk: &str, nsid: u32, mut wanted: impl FnMut(&str) -> bool) -> Option<Self> {
        let mut used = USED.lock().unpoisoned();
        let names = (0..ALIKE).map(|nth| format!("{PREFIX}{}", identity::memory(disk, nsid, nth)));
        let name = names
            .into_iter()
            .find(|name| !used.contains(name) && wanted(name))?;
        used.insert(name.clone());
        Some(Self(name))
    }
}

/// Returns whether the descriptor kept under this name is the memory of a volume or of reservations
/// of this disk.
pub(super) fn is_of(name: &str, disk: &DiskSpec) -> bool {
    let Some(name) = name.strip_prefix(PREFIX) else {
        return false;
    };
    let owner = subsystems::memory_owner(&**disk);
    let mut names = disk
        .nsids()
        .into_iter()
        .flat_map(|nsid| (0..ALIKE).map(move |nth| (nsid, nth)));
    let reservations = disk.subsystem().map(subsystems::reservations_owner);
    let owners = || [Some(&owner), reservations.as_ref()].into_iter().flatten();
    names.any(|(nsid, nth)| owners().any(|owner| identity::memory(owner, nsid, nth) == name))
}

impl Drop for MemoryName {
    fn drop(&mut self) {
        USED.lock().unpoisoned().remove(&self.0);
    }
}

/// Memory for the bytes of a volume: a new file, or the one that a previous process has left.
pub struct VolumeMemory {
    pub memory: MemoryPlace,
    name: Option<MemoryName>,
}

/// Returns the memory for the volume of a disk's namespace.
pub fn place(disk: &str, nsid: u32) -> VolumeMemory {
    let Some(kept) = kept() else {
        return VolumeMemory {
            memory: MemoryPlace::Process,
            name: None,
        };
    };
    let mut found = None;
    let name = MemoryName::new(disk, nsid, |name| {
        found = kept.take(name);
        found.is_some()
    });
    VolumeMemory {
        memory: found.map_or(MemoryPlace::New, |file| MemoryPlace::Kept(Arc::new(file))),
        name: name.or_else(|| MemoryName::new(disk, nsid, |_| true)),
    }
}

impl VolumeMemory {
    /// Keeps the bytes of the volume that was opened there, as long as it is open, if it is a
    /// volume in memory.
    pub fn keep(self, volume: Arc<dyn Volume>, url: &str) -> Arc<dyn Volume> {
        let inner = volume.clone();
        let (Some(kept), Some(name), Some(file)) = (kept(), self.name, inner.kept_memory()) else {
            return volume;
        };
        let taken = match &self.memory {
            MemoryPlace::Kept(file) => Some(file.clone()),
            MemoryPlace::Process | MemoryPlace::New => None,
        };
        // Another process's is kept already.
        if matches!(self.memory, MemoryPlace::New) {
            let mut keeper_client = KeeperClient::new(kept.link());
            let stored = keeper_client.store(&name.0, file);
            if let Err(error) = stored.and_then(|()| settled(&mut keeper_client)) {
                tracing::error!(volume = url, %error, "this memory will not outlive its process");
            }
        }
        Arc::new(KeptVolume {
            inner: volume,
            name,
            unused: Mutex::new(taken),
        })
    }
}

/// Memory volume whose memory file the keeper holds until the volume is closed.
#[derive(Debug)]
struct KeptVolume {
    inner: Arc<dyn Volume>,
    name: MemoryName,
    /// An earlier process's memory that nobody was served with yet: the disk may turn out to be
    /// unavailable, and has its bytes when it is served again.
    unused: Mutex<Option<Arc<OwnedFd>>>,
}

impl Drop for KeptVolume {
    fn drop(&mut self) {
        let Some(kept) = kept() else {
            return;
        };
        let unused = self.unused.lock().unpoisoned().take();
        let unused = unused.and_then(|file| file.try_clone().ok());
        match unused {
            Some(file) => kept.put_back(&self.name.0, file),
            // If the removal fails, the next process finds the file and removes it.
            None => {
                let _ = KeeperClient::new(kept.link()).remove(&self.name.0);
            }
        }
    }
}

impl Volume for KeptVolume {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        *self.unused.lock().unpoisoned() = None;
        self.inner.open(io)
    }

    fn id(&self) -> Vec<u8> {
        self.inner.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A replaced disk has the same name and number as the disk that takes its place.
    #[test]
    fn coexisting_volumes_have_distinct_memory_names() {
        let name = || MemoryName::new("memory-test", 1, |_| true).unwrap();
        let (first, second) = (name(), name());
        assert_ne!(first.0, second.0);
        let free = first.0.clone();
        drop(first);
        // The first name is free again, and is the one that a next process looks for first.
        assert_eq!(name().0, free);
        let none = MemoryName::new("memory-test", 1, |_| false);
        assert!(none.is_none());
    }
}
