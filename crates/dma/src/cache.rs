//! One mapping per file, however many windows are put on it.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::fs::OFlags;

use crate::memory::{self, Mapping};
use crate::{MapError, Memory};

/// What makes two file descriptors the same memory: device, inode, and how it is mapped.
type Key = (u64, u64, bool);

/// Finds the existing mapping of a file, so that thousands of windows on one memfd cost one `mmap`.
/// It holds weak references only: a mapping goes when its last window goes. Make one per client:
/// who may map what is then the client's own affair.
#[derive(Debug, Default)]
pub struct MemoryCache {
    known: HashMap<Key, Weak<Mapping>>,
    /// Size at which the dead entries are swept next.
    sweep_at: usize,
}

impl MemoryCache {
    /// An empty cache.
    pub fn new() -> MemoryCache {
        MemoryCache::default()
    }

    /// The memory behind `fd`: mapped now, or found. `end` is what must be backed (offset plus
    /// size of the window). A mapping that is too short for it (the file has grown) or
    /// poisoned is not used again.
    ///
    /// # Errors
    /// As [`Memory::from_fd`], and [`MapError::ReadOnly`] when `fd` itself is not open for
    /// writing and `writable` is asked.
    pub fn import(&mut self, fd: OwnedFd, end: u64, writable: bool) -> Result<Memory, MapError> {
        let stat = memory::check(fd.as_fd(), end)?;
        // A mapping that is found here was made from another descriptor; this one
        // must carry the same right.
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(memory::system("fcntl"))?;
        if writable && flags & OFlags::RWMODE != OFlags::RDWR {
            return Err(MapError::ReadOnly);
        }
        let key = (stat.st_dev, stat.st_ino, writable);
        // While the mapping lives it holds the file open, so the inode number
        // cannot be another file's.
        if let Some(mapping) = self.known.get(&key).and_then(Weak::upgrade) {
            let found = Memory(mapping);
            if found.len() as u64 >= end && !found.is_poisoned() {
                return Ok(found);
            }
        }
        if self.known.len() >= self.sweep_at {
            self.known.retain(|_, mapping| mapping.strong_count() > 0);
            self.sweep_at = self.known.len() * 2 + 16;
        }
        let memory = Memory::map_file(fd, stat.st_size as u64, writable)?;
        self.known.insert(key, Arc::downgrade(&memory.0));
        Ok(memory)
    }
}
