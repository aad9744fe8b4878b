//! How much of this process's address space memory files may take: bounds for each client, and one
//! for all of them.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::mm::{MapFlags, ProtFlags};

use crate::MapError;

/// What one client's memory files may take, at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Memory files that are mapped: each costs a descriptor, too. A file that is mapped for
    /// reading only and for writing counts twice.
    pub mappings: u64,
    /// Sum of the sizes of these files, in bytes: a file is mapped whole.
    pub bytes: u64,
}

impl MemoryLimits {
    /// What clients may take unless something else is said: 512 files, of 4 TiB together.
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

/// What one client has taken.
#[derive(Debug)]
pub(crate) struct Account {
    limits: MemoryLimits,
    mappings: AtomicU64,
    bytes: AtomicU64,
}

impl Account {
    pub(crate) fn new(limits: MemoryLimits) -> Arc<Account> {
        Arc::new(Account {
            limits,
            mappings: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }
}

/// Bytes that memory files of all clients have taken.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// What one mapping has taken, of its client's account if it has one, and of the process. It is
/// returned when this is dropped: after the mapping was undone.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Option<Arc<Account>>,
    bytes: u64,
}

impl Charge {
    /// Takes what a mapping of so many bytes needs.
    ///
    /// # Errors
    /// [`MapError::TooManyMappings`], [`MapError::TooManyBytes`], [`MapError::AddressSpaceFull`].
    pub(crate) fn take(account: Option<&Arc<Account>>, bytes: u64) -> Result<Charge, MapError> {
        if let Some(Account {
            limits,
            mappings,
            bytes: taken,
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
        // Nothing was taken of the process.
        std::mem::forget(charge);
        Err(MapError::AddressSpaceFull { limit })
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

/// Adds to what was taken, unless it would be more than there may be.
fn take(taken: &AtomicU64, more: u64, limit: u64) -> bool {
    let sum = |taken: u64| taken.checked_add(more).filter(|sum| *sum <= limit);
    taken
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum)
        .is_ok()
}

/// How much memory files may take of the address space, in bytes: the largest power of two that
/// leaves a fifth of what is free when it is first asked for. That is 64 TiB of the 128 TiB that
/// Linux has on x86-64; less on processors with shorter addresses, or under a limit (`ulimit -v`).
/// What they leave is what everything else of the process needs: without it, an allocation fails
/// and the process ends.
fn address_space() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let sizes = (20..=62).rev().map(|shift| 1usize << shift);
        let found = sizes.into_iter().find(|size| is_free(size + size / 4));
        found.unwrap_or(0) as u64
    })
}

/// Whether so many bytes of addresses are free in one piece.
fn is_free(bytes: usize) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, that nobody may access.
    let mapped =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) };
    let Ok(start) = mapped else {
        return false;
    };
    // SAFETY: mapped just now, and not known to anybody.
    let _ = unsafe { rustix::mm::munmap(start, bytes) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_bounded_and_what_it_took_returns() {
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
    fn all_clients_together_leave_addresses_free() {
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
