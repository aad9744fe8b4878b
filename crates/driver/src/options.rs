//! What a user may choose.

use std::sync::Arc;
use std::time::Duration;

use dma::{MapError, Memory};
use doorbell::HostBehaviour;

/// How a [`Device`](crate::Device) is driven. The default suits a real device
/// as well as a virtual one.
#[derive(Clone, Debug)]
pub struct Options {
    /// I/O queue pairs to ask the controller for; it may allow fewer.
    pub io_queues: u16,
    /// Upper limit in bytes for one command's data, next to the controller's own (MDTS).
    /// Larger requests are split.
    pub max_transfer: u64,
    /// Use MSI-X, if there is any: queue pairs can sleep. A queue pair says
    /// for itself whether it does.
    pub interrupts: bool,
    /// Use SGLs where the controller offers them and they are shorter than PRP lists.
    pub sgl: bool,
    /// How doorbells are rung.
    pub doorbells: Doorbells,
    /// When a command that was not answered is aborted. Resets follow if that does not help.
    pub command_timeout: Duration,
    /// When an admin command that was not answered leads to a reset.
    pub admin_timeout: Duration,
    /// The longest time between two looks at the controller's status while commands are
    /// outstanding; a quarter of `command_timeout`, if that is shorter. Each is a register read,
    /// which wakes a sleeping controller, too.
    pub status_interval: Duration,
    /// How often a command is repeated after aborts and resets before it fails.
    pub retries: u8,
    /// Where the device's own memory comes from.
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

/// Where a device's own memory comes from: that of its queues, lists and doorbell buffers, and what
/// [`Device::allocate`](crate::Device::allocate) gives out. Memfds by default; huge pages, or
/// memory on a NUMA node of the user's choice, where that is better.
#[derive(Clone)]
pub struct MemorySource(Arc<Make>);

type Make = dyn Fn(usize) -> Result<Memory, MapError> + Send + Sync;

impl MemorySource {
    /// Memory that `make` makes of at least so many bytes, a multiple of the page size; writable,
    /// and the device's alone. It is asked for a few MiB at a time.
    pub fn new(make: impl Fn(usize) -> Result<Memory, MapError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    /// Memory of so many bytes.
    ///
    /// # Errors
    /// Those of its maker.
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

/// How doorbells are rung. Everything but the default is for tests of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbells {
    /// Use shadow doorbells if the controller has Doorbell Buffer Config (NVMe Base 2.1, 5.2.5).
    pub shadow: bool,
    /// How a shadow doorbell is published.
    pub behaviour: HostBehaviour,
    /// Use the shadow entries of the Admin queue too. The standard does not want that;
    /// QEMU's own driver did it.
    pub admin: bool,
    /// What becomes of the buffers at a reset.
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

/// What becomes of the shadow doorbell buffers at a controller reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowMemory {
    /// Zeroed and used again.
    Cleared,
    /// Used again with whatever they hold, as old Linux did.
    Stale,
    /// Others are used.
    Fresh,
}

/// How one queue pair is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Commands that can be in flight; limited by what the controller allows
    /// (CAP.MQES) and by 32,767.
    pub depth: u32,
    /// Entries of the submission queue, at least; one more than `depth`, if that is more. A ring
    /// that is never nearly full is cheaper for both sides: doorbells, EventIdx and the completion
    /// queue's head move seldom.
    pub entries: u32,
    /// Have an interrupt sent for completions, so that [`QueuePair::wait`](crate::QueuePair::wait)
    /// can sleep. Without it waiting is polling. Costs the device an interrupt for each batch of
    /// completions, asked for or not.
    pub interrupts: bool,
    /// The owner of the queue pair polls while there is work, and sleeps by
    /// [`QueuePair::arm`](crate::QueuePair::arm): the device interrupts only when that happens now
    /// and then. [`QueuePair::wait`](crate::QueuePair::wait) is not for such a queue pair.
    pub polled: bool,
    /// Repeat commands that fail and may succeed then, as their controller says (DNR), as often as
    /// those that a reset has ended: for owners who have nobody that would.
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
