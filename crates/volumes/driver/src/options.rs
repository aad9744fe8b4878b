//! User-selectable options.

use std::sync::Arc;
use std::time::Duration;

use dma::{MapError, Memory};
use doorbell::HostBehaviour;

/// Options of a [`Device`](crate::Device). The default suits real and virtual devices.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of I/O queue pairs to request; the controller may allow fewer.
    pub io_queues: u16,
    /// Upper limit in bytes for one command's data, in addition to the controller's own (MDTS).
    /// Larger requests are split.
    pub max_transfer: u64,
    /// Use MSI-X where available, so that queue pairs can sleep. Each queue pair also has its own
    /// setting.
    pub interrupts: bool,
    /// Whether to use SGLs where the controller supports them and they are shorter than PRP lists.
    pub sgl: bool,
    /// How the driver rings doorbells.
    pub doorbells: Doorbells,
    /// Time after which an unanswered command is aborted. Resets follow if that does not help.
    pub command_timeout: Duration,
    /// Time after which an admin command without an answer leads to a controller reset.
    pub admin_timeout: Duration,
    /// Maximum time between two reads of the controller's status while commands are outstanding;
    /// limited to a quarter of `command_timeout`. Each is a register read, which also wakes a
    /// sleeping controller.
    pub status_interval: Duration,
    /// Maximum number of times that a command is repeated after aborts and resets.
    pub retries: u8,
    /// Source of the memory for queues and buffers of the driver.
    pub memory: MemorySource,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io_queues: 64,
            max_transfer: 1 << 20,
            interrupts: true,
            sgl: true,
            doorbells: Doorbells::default(),
            command_timeout: Duration::from_secs(30),
            admin_timeout: Duration::from_secs(30),
            status_interval: Duration::from_millis(250),
            retries: 3,
            memory: MemorySource::default(),
        }
    }
}

/// Source of a device's own memory: for queues, lists and doorbell buffers, and for
/// [`Device::allocate`](crate::Device::allocate). Memfds by default; huge pages, or memory on a
/// chosen NUMA node, are alternatives.
#[derive(Clone)]
pub struct MemorySource(Arc<AllocateMemory>);

type AllocateMemory = dyn Fn(usize) -> Result<Memory, MapError> + Send + Sync;

impl MemorySource {
    /// Creates a source from an allocation function. The function returns at least the given number
    /// of bytes, which is a multiple of the page size; the memory must be writable and used by
    /// nothing else. Requests are for a few MiB each.
    pub fn new(make: impl Fn(usize) -> Result<Memory, MapError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    /// Allocates at least `len` bytes of memory.
    ///
    /// # Errors
    /// [`MapError`] when the source cannot allocate memory.
    pub fn make(&self, len: usize) -> Result<Memory, MapError> {
        (self.0)(len)
    }
}

impl Default for MemorySource {
    fn default() -> Self {
        Self::new(Memory::anonymous)
    }
}

impl std::fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MemorySource")
    }
}

/// How the driver rings doorbells. Values other than the default are for tests of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbells {
    /// Whether to use shadow doorbells if the controller supports Doorbell Buffer Config ("NVMe
    /// Base 2.1", 5.2.5).
    pub shadow: bool,
    /// Order of memory accesses with which a shadow doorbell is published.
    pub behaviour: HostBehaviour,
    /// Use the shadow entries of the Admin queue too. The standard excludes it; QEMU's own driver
    /// did it.
    pub admin: bool,
    /// Treatment of the shadow doorbell buffers at a controller reset: cleared, reused or replaced.
    pub memory: ShadowMemory,
}

impl Default for Doorbells {
    fn default() -> Self {
        Self {
            shadow: true,
            behaviour: HostBehaviour::STANDARD,
            admin: false,
            memory: ShadowMemory::Cleared,
        }
    }
}

/// Treatment of the shadow doorbell buffers at a controller reset: cleared, reused or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowMemory {
    /// The buffers are zeroed and used again.
    Cleared,
    /// The buffers are used again with their old content, as old Linux versions did.
    Stale,
    /// New buffers replace the old ones.
    Fresh,
}

/// Options of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Maximum number of outstanding commands, at most 32,767 and limited by the controller
    /// (CAP.MQES).
    pub depth: u32,
    /// Minimum number of entries of the submission queue; raised to `depth` + 1. A ring that is
    /// never nearly full is cheaper for both sides: doorbells, EventIdx and the completion queue's
    /// head change rarely.
    pub entries: u32,
    /// Enable the interrupt of the completion queue, so that
    /// [`QueuePair::wait`](crate::QueuePair::wait) can sleep; otherwise it polls. The device then
    /// sends an interrupt for each batch of completions, even while the owner polls.
    pub interrupts: bool,
    /// The owner polls while there is work, and sleeps by
    /// [`QueuePair::arm`](crate::QueuePair::arm). The interrupt stays enabled only while the owner
    /// sleeps often. Such a queue pair must not use [`QueuePair::wait`](crate::QueuePair::wait).
    pub polled: bool,
    /// Repeat failed commands with a status that allows a retry (Do Not Retry is clear), up to the
    /// limit of retries. For owners without retries of their own.
    pub repeats: bool,
    /// Maximum time that [`QueuePair::wait`](crate::QueuePair::wait) polls before it sleeps. The
    /// actual time adapts below this limit.
    pub poll_window: Duration,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            depth: 128,
            entries: 128,
            interrupts: true,
            polled: false,
            repeats: false,
            poll_window: Duration::from_micros(50),
        }
    }
}
