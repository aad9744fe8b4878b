//! Volumes in memory that survive the process, as their disks do. Each is a memory file, which the
//! keeper holds under a name made from the disk's name and the namespace's.
//!
//! A volume that is closed in order is no longer kept: `mem://` promises no more.

use super::session::KeeperSession;
use crate::open::subsystems;
use config::disk::DiskSpec;
use config::identity;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{Info, Io, MemoryPlace, OpenQueue, Volume, VolumeError};

/// Prefix of the volumes' names; a digest of the disk's name and the NSID follows.
const PREFIX: &str = "vnvme.m";

/// Names that memory volumes of this process have with the keeper.
#[derive(Debug, Default)]
pub struct MemoryNames(Mutex<BTreeSet<String>>);

/// Name of a memory volume with the keeper, reserved until this value is dropped.
#[derive(Debug)]
pub struct MemoryName {
    pub(super) name: String,
    pub(super) keeper: Arc<KeeperSession>,
}

/// Volumes of the same disk and number that there may be: a disk is replaced while the one before
/// it is still there, and disks need not have names.
const ALIKE: u32 = 64;

impl MemoryName {
    /// Reserves a name that no other volume has, for a namespace of a disk. `wanted` selects usable
    /// names.
    pub(super) fn new(
        keeper: &Arc<KeeperSession>,
        disk: &str,
        nsid: u32,
        mut wanted: impl FnMut(&str) -> bool,
    ) -> Option<Self> {
        let mut used = keeper.memory_names.0.lock().unpoisoned();
        let names = (0..ALIKE).map(|nth| format!("{PREFIX}{}", identity::memory(disk, nsid, nth)));
        let name = names
            .into_iter()
            .find(|name| !used.contains(name) && wanted(name))?;
        used.insert(name.clone());
        let keeper = keeper.clone();
        Some(Self { name, keeper })
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
        let mut used = self.keeper.memory_names.0.lock().unpoisoned();
        used.remove(&self.name);
    }
}

/// Memory for the bytes of a volume: a new file, or the one that a previous process has left.
pub struct VolumeMemory {
    pub memory: MemoryPlace,
    name: Option<MemoryName>,
}

/// Returns the memory for the volume of a disk's namespace.
pub fn place(keeper: &Arc<KeeperSession>, disk: &str, nsid: u32) -> VolumeMemory {
    if !keeper.is_kept() {
        return VolumeMemory {
            memory: MemoryPlace::Process,
            name: None,
        };
    }
    let mut found = None;
    let name = MemoryName::new(keeper, disk, nsid, |name| {
        found = keeper.take(name);
        found.is_some()
    });
    VolumeMemory {
        memory: found.map_or(MemoryPlace::New, |file| MemoryPlace::Kept(Arc::new(file))),
        name: name.or_else(|| MemoryName::new(keeper, disk, nsid, |_| true)),
    }
}

impl VolumeMemory {
    /// Keeps the bytes of the volume that was opened there, as long as it is open, if it is a
    /// volume in memory.
    pub fn keep(self, volume: Arc<dyn Volume>, url: &str) -> Arc<dyn Volume> {
        let inner = volume.clone();
        let (Some(name), Some(file)) = (self.name, inner.kept_memory()) else {
            return volume;
        };
        let taken = match &self.memory {
            MemoryPlace::Kept(file) => Some(file.clone()),
            MemoryPlace::Process | MemoryPlace::New => None,
        };
        // Another process's is kept already.
        if matches!(self.memory, MemoryPlace::New)
            && let Err(error) = name.keeper.store(&name.name, file)
        {
            tracing::error!(volume = url, %error, "this memory will not outlive its process");
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
        let MemoryName { name, keeper } = &self.name;
        let unused = self.unused.lock().unpoisoned().take();
        let unused = unused.and_then(|file| file.try_clone().ok());
        match unused {
            Some(file) => keeper.put_back(name, file),
            None => keeper.remove(name),
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
        let keeper = Arc::default();
        let name = || MemoryName::new(&keeper, "memory-test", 1, |_| true).unwrap();
        let (first, second) = (name(), name());
        assert_ne!(first.name, second.name);
        let free = first.name.clone();
        drop(first);
        // The first name is free again, and is the one that a next process looks for first.
        assert_eq!(name().name, free);
        let none = MemoryName::new(&keeper, "memory-test", 1, |_| false);
        assert!(none.is_none());
    }
}
