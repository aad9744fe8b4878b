//! Mappings of a client's memory files: one per file, for any number of windows.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use rustix::fs::OFlags;

use crate::backing;
use crate::memory::{Mapping, system};
use crate::quota::Account;
use crate::{MapError, Memory, MemoryLimits};

/// Identity of a mapping: device and inode of the file, and whether the mapping is writable.
type Key = ((u32, u32), u64, bool);

/// Memory files of one client. Finds the existing mapping of a file, so that thousands of windows
/// on one memfd cost one `mmap`, and bounds their total. It holds weak references only: a mapping
/// ends with its last window. Make one cache per client, so that clients share no access rights.
#[derive(Debug)]
pub struct MemoryCache {
    known: HashMap<Key, Weak<Mapping>>,
    /// Number of entries at which entries of closed files are removed.
    sweep_at: usize,
    account: Arc<Account>,
}

impl Default for MemoryCache {
    fn default() -> MemoryCache {
        MemoryCache::new()
    }
}

impl MemoryCache {
    /// Creates an empty cache of memory files with the default limits.
    pub fn new() -> MemoryCache {
        MemoryCache::with_limits(MemoryLimits::DEFAULT)
    }

    /// Creates an empty cache of memory files with these limits.
    pub fn with_limits(limits: MemoryLimits) -> MemoryCache {
        MemoryCache {
            known: HashMap::new(),
            sweep_at: 0,
            account: Account::new(limits),
        }
    }

    /// Returns the memory behind `fd`, mapped now or earlier. `end` is the required length (offset
    /// plus size of the window). A mapping that is too short for it (the file has grown) or
    /// poisoned is not reused.
    ///
    /// # Errors
    /// The errors of [`Memory::from_fd`]. [`MapError::ReadOnly`] when `writable` is set and `fd` is
    /// not open for writing. [`MapError::TooManyMappings`] or [`MapError::TooManyBytes`] at the
    /// client's limits. A mapping counts until it is undone, a moment after its last window.
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
                // `fd` is closed here: closing a memory file does not block while the mapping keeps
                // the file.
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
