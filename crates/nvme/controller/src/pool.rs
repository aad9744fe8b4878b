//! Pool of capacity from which a host creates namespaces (Namespace Management).

use crate::config::NamespaceConfig;
use crate::formats::{BlockFormat, FormatSaved, FormatStore, Formats, KeptFormat, SavedFormat};
use std::fmt::Debug;
use std::sync::Arc;
use volume::Volume;

/// A namespace that a host has created in a pool of capacity.
#[derive(Clone, Debug)]
pub struct PooledNamespace {
    /// Namespace ID (NSID), unique in the pool.
    pub nsid: u32,
    /// Size of the namespace in logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Namespace Globally Unique Identifier, which is never used again for another namespace.
    pub nguid: [u8; 16],
    /// Whether several controllers may attach the namespace (NMIC.SHRNS).
    pub shared: bool,
    /// IDs of the controllers that the namespace is attached to.
    pub attached: Vec<u16>,
    /// Volume that stores the blocks; present as long as the namespace is attached.
    pub volume: Option<Arc<dyn Volume>>,
}

impl PooledNamespace {
    /// Returns the size of the namespace in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_size.into())
    }

    /// Returns an EUI-64 for hosts that do not use the NGUID, derived from it, without a
    /// registered company ID.
    pub fn eui64(&self) -> [u8; 8] {
        let mut id = [0; 8];
        id.iter_mut()
            .zip(&self.nguid)
            .for_each(|(to, from)| *to = *from);
        id[0] = id[0] & 0xfc | 0x02;
        id
    }

    /// Returns the configuration for a controller with that pool; `None` when the namespace is
    /// not open.
    pub(crate) fn config(&self, pool: &Arc<dyn NamespacePool>) -> Option<NamespaceConfig> {
        let store = PooledFormat {
            pool: pool.clone(),
            nguid: self.nguid,
        };
        Some(NamespaceConfig {
            block_size: self.block_size,
            nguid: self.nguid,
            eui64: self.eui64(),
            formats: Some(Formats::new(pool.block_size(), Arc::new(store))),
            ..NamespaceConfig::new(self.nsid, self.volume.clone()?)
        })
    }
}

/// A change of a pool. Namespaces are named by their NGUIDs, so that a repeated change has no
/// effect: a new process does not know how far its predecessor got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolChange {
    /// Creates a namespace that is attached to no controller.
    Create {
        /// ID of the new namespace, unique in the pool.
        nsid: u32,
        /// Size of the new namespace in logical blocks.
        blocks: u64,
        /// Logical block size of the new namespace in bytes: 512 or 4096.
        block_size: u32,
        /// NGUID of the new namespace, made by [`NamespacePool::new_nguid`].
        nguid: [u8; 16],
        /// Whether several controllers may attach the new namespace (NMIC.SHRNS).
        shared: bool,
    },
    /// Deletes a namespace and its data.
    Delete {
        /// NGUID of the namespace to delete.
        nguid: [u8; 16],
    },
    /// Opens a namespace, and attaches it to a controller.
    Attach {
        /// NGUID of the namespace to attach.
        nguid: [u8; 16],
        /// ID of the controller that the namespace is attached to.
        cntlid: u16,
    },
    /// Changes the block size of an open namespace; its number of blocks follows from its size in
    /// bytes.
    Format {
        /// NGUID of the namespace to format.
        nguid: [u8; 16],
        /// New logical block size in bytes: 512 or 4096.
        block_size: u32,
    },
    /// Detaches a namespace from a controller.
    Detach {
        /// NGUID of the namespace to detach.
        nguid: [u8; 16],
        /// ID of the controller that the namespace is detached from.
        cntlid: u16,
    },
}

/// Reason why a pool could not create, delete, attach, format or detach a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolError {
    /// The storage of the pool has too little space left.
    NoSpace,
    /// The change failed for another reason, which the pool has logged.
    Failed,
}

/// Store of the block format of a namespace in a pool ([`FormatStore`]).
#[derive(Debug)]
struct PooledFormat {
    pool: Arc<dyn NamespacePool>,
    nguid: [u8; 16],
}

impl FormatStore for PooledFormat {
    fn save(&self, format: BlockFormat, done: FormatSaved) {
        let change = PoolChange::Format {
            nguid: self.nguid,
            block_size: format.block,
        };
        self.pool.change(
            change,
            Box::new(move |result: Result<(), PoolError>| {
                done(match result {
                    Ok(()) => SavedFormat::New(KeptFormat { metadata: None }),
                    Err(PoolError::NoSpace) => SavedFormat::Before,
                    // The change may have been made in spite of the error.
                    Err(PoolError::Failed) => SavedFormat::Unknown,
                });
            }),
        );
    }
}

/// Callback that receives the result of a pool's change, on any thread.
pub type PoolDone = Box<dyn FnOnce(Result<(), PoolError>) + Send>;

/// Pool of capacity from which the host of one controller creates namespaces.
pub trait NamespacePool: Send + Sync + Debug {
    /// Returns the total capacity of the pool in bytes, used or not.
    fn capacity(&self) -> u64;

    /// Returns the logical block size in bytes of namespaces with LBA format 0, 512 or 4096;
    /// format 1 has the other size.
    fn block_size(&self) -> u32;

    /// Returns all namespaces of the pool as they are stored. Must not block.
    fn namespaces(&self) -> Vec<PooledNamespace>;

    /// Returns an identifier that no namespace has had; `None`: none can be made now. Must not
    /// block.
    fn new_nguid(&self) -> Option<[u8; 16]>;

    /// Makes a change. Must not block, and calls `done`, on any thread: with `Ok` when the change
    /// outlasts the process and a loss of power, and [`NamespacePool::namespaces`] contains it.
    /// One call at a time. A pool that drops `done` without a call leaves the host's command
    /// without a completion.
    fn change(&self, change: PoolChange, done: PoolDone);

    /// Returns the sum of the sizes of all namespaces in the pool, in bytes.
    fn used(&self) -> u64 {
        let bytes = self.namespaces().into_iter().map(|ns| ns.bytes());
        bytes.fold(0, u64::saturating_add)
    }
}
