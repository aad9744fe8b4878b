//! Mappings of a client's memory files: one per file, for any number of windows.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::task::Waker;

use rustix::fs::OFlags;

use crate::backing::{self, Backing};
use crate::mapper::Mapped;
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

    /// Creates an empty cache for the next client of the same disk: the limits are counted anew,
    /// and the budget of time for mapping stays.
    pub fn next_client(&self) -> MemoryCache {
        MemoryCache {
            known: HashMap::new(),
            sweep_at: 0,
            account: self.account.next_client(),
        }
    }

    /// Returns the memory behind `fd`, mapped now or earlier. `end` is the required length (offset
    /// plus size of the window). A mapping that is too short for it (the file has grown) or
    /// poisoned is not reused. A thread that must not wait uses [`MemoryCache::begin`].
    ///
    /// # Errors
    /// The errors of [`Memory::from_fd`]. [`MapError::ReadOnly`] when `writable` is set and `fd` is
    /// not open for writing. [`MapError::TooManyMappings`] or [`MapError::TooManyBytes`] at the
    /// client's limits. A mapping counts until it is undone, a moment after its last window.
    pub fn import(&mut self, fd: OwnedFd, end: u64, writable: bool) -> Result<Memory, MapError> {
        let (fd, backing, key) = match self.find(fd, end, writable)? {
            Found::Mapped(memory) => return Ok(memory),
            Found::New(fd, backing, key) => (fd, backing, key),
        };
        let memory = Memory::map_file(fd, backing, writable, Some(&self.account))?;
        self.enter(key, &memory);
        Ok(memory)
    }

    /// Returns the memory behind `fd` like [`MemoryCache::import`], and never waits for the kernel:
    /// a file without a mapping is mapped by a thread of its own, which then calls `waker`.
    ///
    /// A client should have one pending import at most. The files of all clients are mapped in
    /// turn, and those of a client whose mappings have waited in the kernel for long are delayed.
    ///
    /// # Errors
    /// The errors of [`MemoryCache::import`]; those of the mapping itself follow from
    /// [`MemoryCache::finish`].
    pub fn begin(
        &mut self,
        fd: OwnedFd,
        end: u64,
        writable: bool,
        waker: &Waker,
    ) -> Result<Import, MapError> {
        match self.find(fd, end, writable)? {
            Found::Mapped(memory) => Ok(Import::Done(memory)),
            Found::New(fd, backing, key) => {
                let mapped = Mapped::begin(fd, backing, writable, &self.account, waker)?;
                Ok(Import::Pending(PendingImport { key, mapped }))
            }
        }
    }

    /// Returns the result of a pending import, once; `None` before it is there.
    pub fn finish(&mut self, pending: &PendingImport) -> Option<Result<Memory, MapError>> {
        let result = pending.mapped.take()?;
        if let Ok(memory) = &result {
            self.enter(pending.key, memory);
        }
        Some(result)
    }

    #[cfg(test)]
    pub(crate) fn pace(&self) -> &crate::pace::Pace {
        self.account.pace()
    }

    /// Checks a file, and finds its mapping.
    fn find(&self, fd: OwnedFd, end: u64, writable: bool) -> Result<Found, MapError> {
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
                return Ok(Found::Mapped(found));
            }
        }
        Ok(Found::New(fd, backing, key))
    }

    fn enter(&mut self, key: Key, memory: &Memory) {
        if self.known.len() >= self.sweep_at {
            self.known.retain(|_, mapping| mapping.strong_count() > 0);
            self.sweep_at = self.known.len() * 2 + 16;
        }
        self.known.insert(key, Arc::downgrade(&memory.0));
    }
}

/// Result of the search for a file's mapping.
enum Found {
    Mapped(Memory),
    New(OwnedFd, Backing, Key),
}

/// Result of [`MemoryCache::begin`].
#[derive(Debug)]
pub enum Import {
    /// The file is mapped already.
    Done(Memory),
    /// The file is being mapped.
    Pending(PendingImport),
}

/// Memory file that is being mapped. Dropping this value cancels the mapping.
#[derive(Debug)]
pub struct PendingImport {
    key: Key,
    mapped: Mapped,
}

impl PendingImport {
    /// Returns whether [`MemoryCache::finish`] has a result.
    pub fn is_done(&self) -> bool {
        self.mapped.is_done()
    }
}
