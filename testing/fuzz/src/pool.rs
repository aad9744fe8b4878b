//! A pool in memory for the controller's target: small, and its answers come late.

use controller::{NamespacePool, PoolChange, PoolDone, PoolError, PooledNamespace};
use std::collections::VecDeque;
use std::sync::{Arc, atomic::AtomicU8, atomic::Ordering};
use std::sync::{Mutex, MutexGuard};
use volume::{MemVolume, Volume};

const CAPACITY: u64 = 256 << 10;

/// See the module.
#[derive(Debug, Default)]
pub struct Pool {
    namespaces: Mutex<Vec<PooledNamespace>>,
    made: AtomicU8,
    late: Mutex<Late>,
}

#[derive(Default)]
struct Late(VecDeque<(Result<(), PoolError>, PoolDone)>);

impl std::fmt::Debug for Late {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Late").field(&self.0.len()).finish()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Pool {
    /// Answers the oldest request.
    pub fn answer(&self) {
        let first = locked(&self.late).0.pop_front();
        if let Some((result, done)) = first {
            done(result);
        }
    }

    /// Checks the invariants of the pool.
    pub fn check(&self) {
        assert!(self.used() <= CAPACITY, "more than there is");
        let all = self.namespaces();
        for (at, one) in all.iter().enumerate() {
            let others = all.get(at + 1..).unwrap_or_default();
            assert!(others.iter().all(|other| other.nsid != one.nsid));
            assert!(one.attached.len() <= 1 && one.volume.is_some() != one.attached.is_empty());
        }
    }

    fn make(&self, change: &PoolChange) -> Result<(), PoolError> {
        let mut all = locked(&self.namespaces);
        match change {
            PoolChange::Create {
                nsid,
                blocks,
                block_size,
                nguid,
                shared,
            } => all.push(PooledNamespace {
                nsid: *nsid,
                blocks: *blocks,
                block_size: *block_size,
                nguid: *nguid,
                shared: *shared,
                attached: Vec::new(),
                volume: None,
            }),
            PoolChange::Delete { nguid } => all.retain(|ns| ns.nguid != *nguid),
            PoolChange::Attach { nguid, cntlid } => {
                let found = all.iter_mut().find(|ns| ns.nguid == *nguid);
                let found = found.ok_or(PoolError::Failed)?;
                let volume = MemVolume::new(found.bytes()).map_err(|_| PoolError::NoSpace)?;
                let volume: Arc<dyn Volume> = Arc::new(volume);
                (found.attached, found.volume) = (vec![*cntlid], Some(volume));
            }
            PoolChange::Format { nguid, block_size } => {
                let found = all.iter_mut().find(|ns| ns.nguid == *nguid);
                let found = found.ok_or(PoolError::Failed)?;
                (found.blocks, found.block_size) =
                    (found.bytes() / u64::from(*block_size), *block_size);
            }
            PoolChange::Detach { nguid, .. } => {
                for found in all.iter_mut().filter(|ns| ns.nguid == *nguid) {
                    (found.attached, found.volume) = (Vec::new(), None);
                }
            }
        }
        Ok(())
    }
}

impl NamespacePool for Pool {
    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn block_size(&self) -> u32 {
        512
    }

    fn namespaces(&self) -> Vec<PooledNamespace> {
        locked(&self.namespaces).clone()
    }

    fn new_nguid(&self) -> Option<[u8; 16]> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        (number != 255).then_some([number.wrapping_add(2); 16])
    }

    fn change(&self, change: PoolChange, done: PoolDone) {
        let result = self.make(&change);
        locked(&self.late).0.push_back((result, done));
    }
}
