//! Where the namespaces come from that a host makes (Namespace Management).

use crate::config::NamespaceConfig;
use crate::formats::{BlockFormat, FormatSaved, FormatStore, Formats, KeptFormat, SavedFormat};
use std::fmt::Debug;
use std::sync::Arc;
use volume::Volume;

/// A namespace of a pool.
#[derive(Clone, Debug)]
pub struct PooledNamespace {
    /// Namespace ID.
    pub nsid: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Namespace Globally Unique Identifier: no other namespace has had it.
    pub nguid: [u8; 16],
    /// The host wants that several controllers can have it (NMIC.SHRNS).
    pub shared: bool,
    /// IDs of the controllers that it is attached to.
    pub attached: Vec<u16>,
    /// Its blocks: open as long as it is attached.
    pub volume: Option<Arc<dyn Volume>>,
}

impl PooledNamespace {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_size.into())
    }

    /// An identifier for hosts that know no NGUID, made of that: of no registered company.
    pub fn eui64(&self) -> [u8; 8] {
        let mut id = [0; 8];
        id.iter_mut()
            .zip(&self.nguid)
            .for_each(|(to, from)| *to = *from);
        id[0] = id[0] & 0xfc | 0x02;
        id
    }

    /// As a controller has it, whose pool that is; `None`: it is not open.
    pub(crate) fn config(&self, pool: &Arc<dyn NamespacePool>) -> Option<NamespaceConfig> {
        let store = PooledFormat {
            pool: pool.clone(),
            nguid: self.nguid,
        };
        Some(NamespaceConfig {
            nsid: self.nsid,
            volume: self.volume.clone()?,
            block_size: self.block_size,
            read_only: false,
            nguid: self.nguid,
            eui64: self.eui64(),
            zones: None,
            placement: None,
            metadata: None,
            formats: Some(Formats::new(pool.block_size(), Arc::new(store))),
        })
    }
}

/// A change of a pool. Namespaces are named by their NGUIDs: what was done already is done again
/// without effect, as a process does that does not know how far the one before it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolChange {
    /// Makes a namespace, which nobody has.
    Create {
        /// Its ID, which no other one of the pool has.
        nsid: u32,
        /// Size in blocks.
        blocks: u64,
        /// Bytes of a block: 512 or 4096.
        block_size: u32,
        /// Of [`NamespacePool::new_nguid`].
        nguid: [u8; 16],
        /// NMIC.SHRNS.
        shared: bool,
    },
    /// Removes one, with all that is in it.
    Delete {
        /// Which one.
        nguid: [u8; 16],
    },
    /// Opens one, for a controller that has it from now on.
    Attach {
        /// Which one.
        nguid: [u8; 16],
        /// The controller.
        cntlid: u16,
    },
    /// One has blocks of another size from now on, as many as it has bytes for. It is open.
    Format {
        /// Which one.
        nguid: [u8; 16],
        /// Bytes of a block: 512 or 4096.
        block_size: u32,
    },
    /// A controller does not have it any more.
    Detach {
        /// Which one.
        nguid: [u8; 16],
        /// The controller.
        cntlid: u16,
    },
}

/// Why a change was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolError {
    /// What the pool stands on is full.
    NoSpace,
    /// Something else. The pool has said what, in its log.
    Failed,
}

/// The pool keeps the format of a namespace.
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
                    // The change may have been made for all that.
                    Err(PoolError::Failed) => SavedFormat::Unknown,
                });
            }),
        );
    }
}

/// What is to be called when a change is made, or cannot be.
pub type PoolDone = Box<dyn FnOnce(Result<(), PoolError>) + Send>;

/// A pool of capacity for namespaces: those of one controller.
pub trait NamespacePool: Send + Sync + Debug {
    /// Bytes that all namespaces together may have.
    fn capacity(&self) -> u64;

    /// Logical block size in bytes of namespaces with LBA format 0, 512 or 4096; format 1 has the
    /// other one.
    fn block_size(&self) -> u32;

    /// Its namespaces, as they are kept. Must not block.
    fn namespaces(&self) -> Vec<PooledNamespace>;

    /// An identifier that no namespace has had; `None`: none can be made now. Must not block.
    fn new_nguid(&self) -> Option<[u8; 16]>;

    /// Makes a change. Must not block, and calls `done`, on whatever thread: with `Ok` when the
    /// change outlasts the process and a loss of power, and [`NamespacePool::namespaces`] has it.
    /// One call at a time. A pool that drops `done` without a call leaves the host's command
    /// without an end.
    fn change(&self, change: PoolChange, done: PoolDone);

    /// Bytes that its namespaces have.
    fn used(&self) -> u64 {
        let bytes = self.namespaces().into_iter().map(|ns| ns.bytes());
        bytes.fold(0, u64::saturating_add)
    }
}
