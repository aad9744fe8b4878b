//! User-selectable options.

use std::sync::Arc;
use std::time::Duration;

use dma::{MapError, Memory};
use doorbell::HostBehaviour;

/// Options of a [`Device`](crate::Device). The default suits real and virtual devices.
#[derive(Clone, Debug)]
pub struct Options {
    /// I/O queue pairs to ask the controller for; it may allow fewer.
    pub io_queues: u16,
    /// Upper limit in bytes for one command's data, next to the controller's own (MDTS).
    /// Larger requests are split.
    pub max_transfer: u64,
    /// Use MSI-X, if there is any, so that queue pairs can sleep. Each queue pair decides for
    /// itself.
    pub interrupts: bool,
    /// Use SGLs where the controller offers them and they are shorter than PRP lists.
    pub sgl: bool,
    /// How doorbells are rung.
    pub doorbells: Doorbells,
    /// Time after which an unanswered command is aborted. Resets follow if that does not help.
    pub command_timeout: Duration,
    /// Time after which an unanswered admin command leads to a reset.
    pub admin_timeout: Duration,
    /// The longest time between two looks at the controller's status while commands are
    /// outstanding; a quarter of `command_timeout`, if that is shorter. Each is a register read,
    /// which wakes a sleeping controller, too.
    pub status_interval: Duration,
    /// Maximum number of repetitions of a command after aborts and resets.
    pub retries: u8,
    /// Source of the device's own memory.
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
pub struct MemorySource(Arc<Make>);

type Make = dyn Fn(usize) -> Result<Memory, MapError> + Send + Sync;

impl MemorySource {
    /// Creates a source from a function that allocates at least so many bytes, a multiple of the
    /// page size. The memory must be writable and exclusive to the device. It is requested a few
    /// MiB at a time.
    pub fn new(make: impl Fn(usize) -> Result<Memory, MapError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    /// Allocates memory of `len` bytes.
    ///
    /// # Errors
    /// The error of the source's function.
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

/// Doorbell options. Everything but the default is for tests of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbells {
    /// Use shadow doorbells if the controller has Doorbell Buffer Config (NVMe Base 2.1, 5.2.5).
    pub shadow: bool,
    /// Method of publishing a shadow doorbell.
    pub behaviour: HostBehaviour,
    /// Use the shadow entries of the Admin queue too. The standard excludes it; QEMU's own driver
    /// did it.
    pub admin: bool,
    /// Treatment of the buffers at a reset.
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

/// Treatment of the shadow doorbell buffers at a controller reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowMemory {
    /// Zeroed and used again.
    Cleared,
    /// Used again with their old content, as old Linux did.
    Stale,
    /// Replaced by new buffers.
    Fresh,
}

/// Options of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Maximum number of outstanding commands; limited by the controller (CAP.MQES) and to 32,767.
    pub depth: u32,
    /// Minimum number of entries of the submission queue; `depth` + 1, if that is more. A ring that
    /// is never nearly full is cheaper for both sides: doorbells, EventIdx and the completion
    /// queue's head change rarely.
    pub entries: u32,
    /// Have an interrupt sent for completions, so that [`QueuePair::wait`](crate::QueuePair::wait)
    /// can sleep. Without it waiting is polling. The device then sends an interrupt for each batch
    /// of completions, even while the owner polls.
    pub interrupts: bool,
    /// The owner of the queue pair polls while there is work, and sleeps by
    /// [`QueuePair::arm`](crate::QueuePair::arm). The device interrupts only if that happens now
    /// and then. [`QueuePair::wait`](crate::QueuePair::wait) must not be used with such a queue
    /// pair.
    pub polled: bool,
    /// Repeat failed commands that may succeed on a retry according to the controller (DNR), as
    /// often as those ended by a reset. For owners without retries of their own.
    pub repeats: bool,
    /// Longest time that [`QueuePair::wait`](crate::QueuePair::wait) polls before it sleeps.
    /// The window adapts below it.
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
