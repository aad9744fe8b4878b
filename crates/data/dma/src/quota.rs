//! Limits on the address space used by memory files, for each client and for all clients together.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::mm::{MapFlags, ProtFlags};

use crate::MapError;
use crate::pace::Pace;

/// Limits on the memory files that one client may have mapped at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Number of mapped memory files; each also needs a descriptor. A file that is mapped both
    /// read-only and writable counts twice.
    pub mappings: u64,
    /// Maximum total size of the files in bytes. A file is mapped as a whole.
    pub bytes: u64,
}

impl MemoryLimits {
    /// Default limits: 512 memory files of 4 TiB in total.
    pub const DEFAULT: MemoryLimits = MemoryLimits {
        mappings: 512,
        bytes: 4 << 40,
    };
}

impl Default for MemoryLimits {
    fn default() -> MemoryLimits {
        MemoryLimits::DEFAULT
    }
}

/// Number and size of the memory files that one client has mapped.
#[derive(Debug)]
pub(crate) struct Account {
    limits: MemoryLimits,
    mappings: AtomicU64,
    bytes: AtomicU64,
    pace: Arc<Pace>,
}

impl Account {
    pub(crate) fn new(limits: MemoryLimits) -> Arc<Account> {
        Account::with_pace(limits, Arc::default())
    }

    fn with_pace(limits: MemoryLimits, pace: Arc<Pace>) -> Arc<Account> {
        Arc::new(Account {
            limits,
            mappings: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            pace,
        })
    }

    /// Creates the account of the next client of a disk, with the same budget of time.
    pub(crate) fn next_client(&self) -> Arc<Account> {
        Account::with_pace(self.limits, self.pace.clone())
    }

    /// Returns the budget of time for mapping and unmapping.
    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }
}

/// Number of bytes in the mapped memory files of all clients.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Resources of a mapping, charged to its client's account, if it has one, and to the process.
/// Dropping it, after the mapping was undone, returns them.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Option<Arc<Account>>,
    bytes: u64,
}

impl Charge {
    /// Charges the resources of a mapping of this size.
    ///
    /// # Errors
    /// [`MapError::TooManyMappings`] or [`MapError::TooManyBytes`] at the client's limits,
    /// [`MapError::AddressSpaceFull`] at the process's limit.
    pub(crate) fn take(account: Option<&Arc<Account>>, bytes: u64) -> Result<Charge, MapError> {
        if let Some(Account {
            limits,
            mappings,
            bytes: taken,
            ..
        }) = account.map(Arc::as_ref)
        {
            let limit = limits.mappings;
            if !take(mappings, 1, limit) {
                return Err(MapError::TooManyMappings { limit });
            }
            let limit = limits.bytes;
            if !take(taken, bytes, limit) {
                mappings.fetch_sub(1, Ordering::Relaxed);
                return Err(MapError::TooManyBytes { limit });
            }
        }
        let mut charge = Charge {
            account: account.cloned(),
            bytes,
        };
        let limit = address_space();
        if take(&TAKEN, bytes, limit) {
            return Ok(charge);
        }
        charge.release_account();
        // The process was charged nothing.
        std::mem::forget(charge);
        Err(MapError::AddressSpaceFull { limit })
    }

    /// Returns the account that was charged, if the mapping is a client's.
    pub(crate) fn account(&self) -> Option<&Arc<Account>> {
        self.account.as_ref()
    }

    fn release_account(&mut self) {
        if let Some(account) = self.account.take() {
            account.mappings.fetch_sub(1, Ordering::Relaxed);
            account.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release_account();
        TAKEN.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Adds `more` to a used amount and returns true, unless the sum would exceed the limit.
fn take(taken: &AtomicU64, more: u64, limit: u64) -> bool {
    let sum = |taken: u64| taken.checked_add(more).filter(|sum| *sum <= limit);
    taken
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum)
        .is_ok()
}

/// Returns the limit of memory files' address space in bytes: the largest power of two that leaves
/// a fifth of the free space at the first call. That is 64 TiB of the 128 TiB that Linux has on
/// x86-64. It is less on processors with shorter addresses, or under a limit (`ulimit -v`). The
/// rest is needed by the process itself: without it, an allocation fails and the process ends.
fn address_space() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let sizes = (20..=62).rev().map(|shift| 1usize << shift);
        let found = sizes.into_iter().find(|size| is_free(size + size / 4));
        found.unwrap_or(0) as u64
    })
}

/// Returns whether the process has a free address range of this length.
fn is_free(bytes: usize) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new, inaccessible mapping at an address of the kernel's choice.
    let mapped =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) };
    let Ok(start) = mapped else {
        return false;
    };
    // SAFETY: just mapped, and not published.
    let _ = unsafe { rustix::mm::munmap(start, bytes) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_is_bounded_and_refunded() {
        let account = Account::new(MemoryLimits {
            mappings: 2,
            bytes: 100,
        });
        let take = |bytes| Charge::take(Some(&account), bytes);
        let first = take(60).unwrap();
        assert_eq!(take(41).err(), Some(MapError::TooManyBytes { limit: 100 }));
        let second = take(40).unwrap();
        assert_eq!(take(0).err(), Some(MapError::TooManyMappings { limit: 2 }));
        drop(first);
        assert_eq!(take(61).err(), Some(MapError::TooManyBytes { limit: 100 }));
        drop(take(60).unwrap());
        drop(second);
        assert_eq!(account.bytes.load(Ordering::Relaxed), 0);
        assert_eq!(account.mappings.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn mappings_of_all_clients_are_bounded() {
        let limit = address_space();
        assert!(limit.is_power_of_two() && limit >= 1 << 20);
        let full = MapError::AddressSpaceFull { limit };
        assert_eq!(Charge::take(None, limit + 1).err(), Some(full));
        assert_eq!(Charge::take(None, u64::MAX).err(), Some(full));
        let account = Account::new(MemoryLimits {
            bytes: u64::MAX,
            ..MemoryLimits::DEFAULT
        });
        assert_eq!(Charge::take(Some(&account), limit + 1).err(), Some(full));
        assert_eq!(account.bytes.load(Ordering::Relaxed), 0);
        assert_eq!(account.mappings.load(Ordering::Relaxed), 0);
        assert!(is_free(limit as usize + limit as usize / 4));
    }
}
