//! One mapping per file, however many windows are put on it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use rustix::fs::OFlags;

use crate::backing;
use crate::memory::{Mapping, system};
use crate::quota::Account;
use crate::{MapError, Memory, MemoryLimits};

/// What makes two file descriptors the same memory: device, inode, and how it is mapped.
type Key = ((u32, u32), u64, bool);

/// The memory files of one client: finds the existing mapping of a file, so that thousands of
/// windows on one memfd cost one `mmap`, and bounds what all of them take. It holds weak references
/// only: a mapping goes when its last window goes. Make one per client: who may map what is then
/// the client's own affair.
#[derive(Debug)]
pub struct MemoryCache {
    known: HashMap<Key, Weak<Mapping>>,
    /// Size at which the dead entries are swept next.
    sweep_at: usize,
    account: Arc<Account>,
}

impl Default for MemoryCache {
    fn default() -> MemoryCache {
        MemoryCache::new()
    }
}

impl MemoryCache {
    /// An empty cache, of a client that may take what most may.
    pub fn new() -> MemoryCache {
        MemoryCache::with_limits(MemoryLimits::DEFAULT)
    }

    /// An empty cache, of a client with these bounds.
    pub fn with_limits(limits: MemoryLimits) -> MemoryCache {
        MemoryCache {
            known: HashMap::new(),
            sweep_at: 0,
            account: Account::new(limits),
        }
    }

    /// The memory behind `fd`: mapped now, or found. `end` is what must be backed (offset plus
    /// size of the window). A mapping that is too short for it (the file has grown) or
    /// poisoned is not used again.
    ///
    /// # Errors
    /// As [`Memory::from_fd`], [`MapError::ReadOnly`] when `fd` itself is not open for writing and
    /// `writable` is asked, and [`MapError::TooManyMappings`] or [`MapError::TooManyBytes`]. A
    /// mapping counts until it is undone, a moment after its last window has gone.
    pub fn import(&mut self, fd: OwnedFd, end: u64, writable: bool) -> Result<Memory, MapError> {
        let (fd, backing) = backing::check(fd, end)?;
        // A mapping that is found here was made from another descriptor; this one
        // must carry the same right. The kernel knows it without asking the file.
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(system("fcntl"))?;
        if writable && flags & OFlags::RWMODE != OFlags::RDWR {
            sync::discard(fd);
            return Err(MapError::ReadOnly);
        }
        let key = (backing.device, backing.inode, writable);
        // While the mapping lives it holds the file open, so the inode number
        // cannot be another file's.
        if let Some(mapping) = self.known.get(&key).and_then(Weak::upgrade) {
            let found = Memory(mapping);
            if found.len() as u64 >= end && !found.is_poisoned() {
                // `fd` is closed here: a memory file's is nothing to wait for while the mapping
                // keeps the file.
                return Ok(found);
            }
        }
        if self.known.len() >= self.sweep_at {
            self.known.retain(|_, mapping| mapping.strong_count() > 0);
            self.sweep_at = self.known.len() * 2 + 16;
        }
        let memory = Memory::map_file(fd, backing, writable, Some(&self.account))?;
        self.known.insert(key, Arc::downgrade(&memory.0));
        Ok(memory)
    }
}
