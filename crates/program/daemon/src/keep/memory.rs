//! Volumes in memory, and keys of encrypted volumes, that survive the process, as their disks do.
//! Each is a memory file, which the keeper holds under a name made from the disk's name and the
//! namespace's.
//!
//! A volume that is closed in order is no longer kept: `mem://` promises no more, and a key is of
//! no use without its volume.

use super::session::KeeperSession;
use crate::open::subsystems;
use config::disk::DiskSpec;
use config::identity;
use dma::Buffer;
use rustix::fs::fstat;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{
    Allocation, AtomicWrites, Info, Io, IoError, MemoryPlace, OpenQueue, Volume, VolumeError,
};

/// Prefix of the names of volumes' bytes and of reservations; a digest of the disk's name and the
/// NSID follows.
pub(super) const BYTES: &str = "vnvme.m";
/// Prefix of the names of volume keys.
const KEY: &str = "vnvme.k";

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
    /// Reserves a name with this prefix that no other volume has, for a namespace of a disk.
    /// `wanted` selects usable names.
    pub(super) fn new(
        keeper: &Arc<KeeperSession>,
        prefix: &str,
        disk: &str,
        nsid: u32,
        mut wanted: impl FnMut(&str) -> bool,
    ) -> Option<Self> {
        let mut used = keeper.memory_names.0.lock().unpoisoned();
        let names = (0..ALIKE).map(|nth| format!("{prefix}{}", identity::memory(disk, nsid, nth)));
        let name = names
            .into_iter()
            .find(|name| !used.contains(name) && wanted(name))?;
        used.insert(name.clone());
        let keeper = keeper.clone();
        Some(Self { name, keeper })
    }
}

/// Returns whether the descriptor kept under this name is the memory of a volume, of its key, or of
/// reservations of this disk.
pub(super) fn is_of(name: &str, disk: &DiskSpec) -> bool {
    let digest = [BYTES, KEY].iter().find_map(|kind| name.strip_prefix(kind));
    let Some(name) = digest else {
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

/// Memory for the bytes and the key of a volume: new files, or those that a previous process has
/// left.
pub struct VolumeMemory {
    bytes: KeptFile,
    key: KeptFile,
}

/// Memory file of a volume, and the name under which the keeper holds it.
struct KeptFile {
    /// `None` without a keeper.
    name: Option<MemoryName>,
    /// File of a previous process.
    found: Option<Arc<OwnedFd>>,
}

/// Returns the memory for the volume of a disk's namespace.
pub fn place(keeper: &Arc<KeeperSession>, disk: &str, nsid: u32) -> VolumeMemory {
    VolumeMemory {
        bytes: KeptFile::new(keeper, BYTES, disk, nsid),
        key: KeptFile::new(keeper, KEY, disk, nsid),
    }
}

impl KeptFile {
    fn new(keeper: &Arc<KeeperSession>, prefix: &str, disk: &str, nsid: u32) -> Self {
        if !keeper.is_kept() {
            let (name, found) = (None, None);
            return Self { name, found };
        }
        let mut found = None;
        let name = MemoryName::new(keeper, prefix, disk, nsid, |name| {
            found = keeper.take(name);
            found.is_some()
        });
        Self {
            name: name.or_else(|| MemoryName::new(keeper, prefix, disk, nsid, |_| true)),
            found: found.map(Arc::new),
        }
    }

    fn memory(&self) -> MemoryPlace {
        match (&self.name, &self.found) {
            (_, Some(file)) => MemoryPlace::Kept(file.clone()),
            (Some(_), None) => MemoryPlace::New,
            (None, None) => MemoryPlace::Process,
        }
    }

    /// Has the keeper hold the file of the volume at `url` that was opened with this memory; `None`
    /// if the volume has no such file.
    fn keep(mut self, file: Option<BorrowedFd<'_>>, url: &str) -> Option<HeldFile> {
        let (name, found) = (self.name.take()?, self.found.take());
        let is_held = match (&found, file) {
            (Some(found), Some(file)) => is_same(found.as_fd(), file),
            _ => false,
        };
        if found.is_some() && !is_held {
            // The volume is another one by now, and does not use what was left of the former one.
            name.keeper.remove(&name.name);
        }
        let file = file?;
        if !is_held && let Err(error) = name.keeper.store(&name.name, file) {
            tracing::error!(volume = url, %error, "its memory will not outlive this process");
        }
        let unused = Mutex::new(found.filter(|_| is_held));
        Some(HeldFile { name, unused })
    }
}

impl Drop for KeptFile {
    /// Leaves the file of a previous process to the next attempt: the volume was not opened.
    fn drop(&mut self) {
        let found = self.found.take().and_then(|file| file.try_clone().ok());
        if let (Some(MemoryName { name, keeper }), Some(file)) = (&self.name, found) {
            keeper.put_back(name, file);
        }
    }
}

/// Returns whether both descriptors are of the same file.
fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    match (fstat(one), fstat(other)) {
        (Ok(one), Ok(other)) => (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino),
        _ => false,
    }
}

impl VolumeMemory {
    /// Returns the memory for the bytes of a memory volume.
    pub fn memory(&self) -> MemoryPlace {
        self.bytes.memory()
    }

    /// Returns the memory for the key of an encrypted volume.
    pub fn key_memory(&self) -> MemoryPlace {
        self.key.memory()
    }

    /// Keeps the bytes and the key of the volume that was opened there, as long as it is open, if
    /// it is a volume in memory or an encrypted one.
    pub fn keep(self, volume: Arc<dyn Volume>, url: &str) -> Arc<dyn Volume> {
        let inner = volume.clone();
        let bytes = self.bytes.keep(inner.kept_memory(), url);
        let key = self.key.keep(inner.kept_key(), url);
        if bytes.is_none() && key.is_none() {
            return volume;
        }
        Arc::new(KeptVolume {
            inner: volume,
            files: [bytes, key],
        })
    }
}

/// Memory file that the keeper holds until its volume is closed.
#[derive(Debug)]
struct HeldFile {
    name: MemoryName,
    /// An earlier process's file that nobody was served with yet: the disk may turn out to be
    /// unavailable, and has the file when it is served again.
    unused: Mutex<Option<Arc<OwnedFd>>>,
}

impl Drop for HeldFile {
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

/// Volume with memory files that the keeper holds: its bytes, its key.
#[derive(Debug)]
struct KeptVolume {
    inner: Arc<dyn Volume>,
    files: [Option<HeldFile>; 2],
}

impl Volume for KeptVolume {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        for file in self.files.iter().flatten() {
            *file.unused.lock().unpoisoned() = None;
        }
        self.inner.open(io)
    }

    fn id(&self) -> Vec<u8> {
        self.inner.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }

    /// Returns the promise of the inner volume: nothing is done for a request.
    fn atomic_writes(&self) -> AtomicWrites {
        self.inner.atomic_writes()
    }

    fn allocation(&self, offset: u64, len: u64) -> Option<(Allocation, u64)> {
        self.inner.allocation(offset, len)
    }

    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        self.inner.read_at(offset, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A replaced disk has the same name and number as the disk that takes its place.
    #[test]
    fn coexisting_volumes_have_distinct_memory_names() {
        let keeper = Arc::default();
        let name = || MemoryName::new(&keeper, BYTES, "memory-test", 1, |_| true).unwrap();
        let (first, second) = (name(), name());
        assert_ne!(first.name, second.name);
        let free = first.name.clone();
        drop(first);
        // The first name is free again, and is the one that a next process looks for first.
        assert_eq!(name().name, free);
        let none = MemoryName::new(&keeper, BYTES, "memory-test", 1, |_| false);
        assert!(none.is_none());
    }
}
