//! A pool in memory, which outlives the controller, and answers when the test wants.

use crate::common::*;
use controller::{NamespacePool, PoolChange, PoolDone, PoolError, PooledNamespace};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use volume::{FaultVolume, Faults, Volume};

/// Bytes of the pool.
pub const CAPACITY: u64 = 4 << 20;

/// See the module.
#[derive(Default)]
pub struct TestPool {
    namespaces: Mutex<Vec<(PooledNamespace, Arc<FaultVolume>)>>,
    made: AtomicU32,
    /// Changes are made, but not answered before [`TestPool::release`].
    pub holds: AtomicBool,
    held: Mutex<Vec<(Result<(), PoolError>, PoolDone)>>,
    /// How changes end that are not made.
    pub fails: Mutex<Option<PoolError>>,
    /// All of them.
    pub changes: Mutex<Vec<PoolChange>>,
    /// What is attached is not open.
    pub closed: AtomicBool,
    /// How often its namespaces were asked for.
    pub asked: AtomicU32,
}

impl std::fmt::Debug for TestPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestPool").finish_non_exhaustive()
    }
}

impl TestPool {
    /// Answers what was held.
    pub fn release(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        for (result, done) in held {
            done(result);
        }
    }

    /// Faults of a namespace's volume.
    pub fn faults(&self, nsid: u32) -> Arc<Faults> {
        let all = self.namespaces.lock().unwrap();
        let (_, volume) = all.iter().find(|(ns, _)| ns.nsid == nsid).unwrap();
        volume.faults()
    }

    fn make(&self, change: &PoolChange) -> Result<(), PoolError> {
        if let Some(error) = *self.fails.lock().unwrap() {
            return Err(error);
        }
        let mut all = self.namespaces.lock().unwrap();
        let place = |wanted: &[u8; 16]| all.iter().position(|(ns, _)| ns.nguid == *wanted);
        match change {
            PoolChange::Create {
                nsid,
                blocks,
                block_size,
                nguid,
                shared,
            } => {
                if place(nguid).is_some() {
                    return Ok(());
                }
                assert!(
                    all.iter().all(|(ns, _)| ns.nsid != *nsid),
                    "{nsid} is taken"
                );
                let pooled = PooledNamespace {
                    nsid: *nsid,
                    blocks: *blocks,
                    block_size: *block_size,
                    nguid: *nguid,
                    shared: *shared,
                    attached: Vec::new(),
                    volume: None,
                };
                let volume = FaultVolume::new(mem(pooled.bytes()));
                all.push((pooled, Arc::new(volume)));
            }
            PoolChange::Delete { nguid } => {
                if let Some(at) = place(nguid) {
                    all.remove(at);
                }
            }
            PoolChange::Attach { nguid, cntlid } => {
                let at = place(nguid).ok_or(PoolError::Failed)?;
                let (pooled, volume) = &mut all[at];
                if !pooled.attached.contains(cntlid) {
                    pooled.attached.push(*cntlid);
                }
                let closed = self.closed.load(Ordering::Relaxed);
                let volume: Arc<dyn Volume> = volume.clone();
                pooled.volume = (!closed).then_some(volume);
            }
            PoolChange::Format { nguid, block_size } => {
                let at = place(nguid).ok_or(PoolError::Failed)?;
                let (pooled, _) = &mut all[at];
                pooled.blocks = pooled.bytes() / u64::from(*block_size);
                pooled.block_size = *block_size;
            }
            PoolChange::Detach { nguid, cntlid } => {
                if let Some(at) = place(nguid) {
                    let (pooled, _) = &mut all[at];
                    pooled.attached.retain(|id| id != cntlid);
                    pooled.volume = None;
                }
            }
        }
        Ok(())
    }
}

impl NamespacePool for TestPool {
    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn block_size(&self) -> u32 {
        512
    }

    fn namespaces(&self) -> Vec<PooledNamespace> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let all = self.namespaces.lock().unwrap();
        all.iter().map(|(ns, _)| ns.clone()).collect()
    }

    fn new_nguid(&self) -> Option<[u8; 16]> {
        let number = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        let mut nguid = [0xa0; 16];
        nguid[..4].copy_from_slice(&number.to_be_bytes());
        Some(nguid)
    }

    fn change(&self, change: PoolChange, done: PoolDone) {
        let result = self.make(&change);
        self.changes.lock().unwrap().push(change);
        if self.holds.load(Ordering::Relaxed) {
            self.held.lock().unwrap().push((result, done))
        } else {
            done(result)
        }
    }
}
