//! Handler for memory files that shrink under their mapping, which must not kill the process.
//!
//! An access beyond the new end of the file raises SIGBUS. This handler finds every mapping of this
//! crate in a table that it reads without locks. For a fault inside one of them it maps anonymous
//! zero memory over the whole mapping (a huge page cannot be replaced in part), marks it poisoned
//! and returns. The access then reads zeroes, and its caller sees the mark. Any other SIGBUS is
//! passed to the previous action.
//!
//! Threads that access guest memory must not block SIGBUS: the kernel kills a process that faults
//! while it is blocked.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock};

use rustix::io::Errno;
use sync::Unpoisoned;

use crate::MapError;

/// Maximum number of mapped memory files in the whole process: a quarter of the kernel's default
/// limit of mappings (`vm.max_map_count`). Beyond that an allocation could fail, too. Each client
/// may have far fewer: [`MemoryLimits`](crate::MemoryLimits).
pub const MAX_MAPPINGS: usize = 16_384;

/// Number of slots by which the table of mappings grows.
const BLOCK: usize = 64;

/// `si_code` of an access to an address without a page behind it (`siginfo.h`).
const BUS_ADRERR: c_int = 2;
/// `si_code` of an access to a page that the hardware has lost.
const BUS_MCEERR_AR: c_int = 4;

/// The blocks of the table, the newest first. They are never freed: the handler may be reading them
/// at any time.
static TABLE: AtomicPtr<Block> = AtomicPtr::new(null_mut());
/// Action for SIGBUS before this handler was installed; set once, never freed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
/// Number of faults on mapped files that the handler has handled.
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// Free slots of the table of mappings. The handler does not use this list.
static FREE: Mutex<FreeSlots> = Mutex::new(FreeSlots {
    slots: Vec::new(),
    made: 0,
});

struct FreeSlots {
    slots: Vec<&'static MappingSlot>,
    /// Number of slots that the table has.
    made: usize,
}

/// Block of slots in the table of mappings, which is a list of blocks.
struct Block {
    slots: [MappingSlot; BLOCK],
    /// Block that was created before this one; never changes.
    next: Option<&'static Block>,
}

impl FreeSlots {
    /// Returns an unused slot; `None` when the table has its maximum size.
    fn take(&mut self) -> Option<&'static MappingSlot> {
        if let Some(slot) = self.slots.pop() {
            return Some(slot);
        }
        if self.made >= MAX_MAPPINGS {
            return None;
        }
        let block: &'static Block = Box::leak(Box::new(Block {
            slots: [const { MappingSlot::new() }; BLOCK],
            next: first_block(),
        }));
        self.made += BLOCK;
        self.slots.extend(&block.slots);
        TABLE.store(std::ptr::from_ref(block).cast_mut(), Ordering::Release);
        self.slots.pop()
    }
}

/// Returns the newest block of slots, which is the head of the list.
fn first_block() -> Option<&'static Block> {
    // SAFETY: null, or a block that was leaked; blocks are changed by atomics only.
    unsafe { TABLE.load(Ordering::Acquire).as_ref() }
}

/// Returns the number of faults in mapped memory that this process has survived. A worker that sees
/// it change checks whether its map and rings are poisoned.
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// Table entry of a mapping. Its owner writes it under an odd sequence number; a reader that sees
/// one skips the slot, since a mapping in use is not being registered.
pub(crate) struct MappingSlot {
    sequence: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    poisoned: AtomicBool,
}

impl std::fmt::Debug for MappingSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MappingSlot")
            .field("poisoned", &self.is_poisoned())
            .finish_non_exhaustive()
    }
}

impl MappingSlot {
    pub(crate) const fn new() -> MappingSlot {
        MappingSlot {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            poisoned: AtomicBool::new(false),
        }
    }

    /// Returns whether a fault has been taken in this mapping. Permanent while the mapping is
    /// registered.
    #[inline]
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    fn publish(&self, start: usize, len: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence
            .store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.sequence
            .store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Returns address and length of the slot's mapping, if the slot did not change while they were
    /// read.
    fn range(&self) -> Option<(usize, usize)> {
        let before = self.sequence.load(Ordering::Acquire);
        let range = (
            self.start.load(Ordering::Relaxed),
            self.len.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        let after = self.sequence.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(range)
    }
}

/// Registration of a mapping in the table. It is dropped before the mapping itself is undone, so
/// that no stale range remains.
#[derive(Debug)]
pub(crate) struct Registration(&'static MappingSlot);

impl Registration {
    /// Registers a mapping that has not been accessed yet, and installs the handler the first time.
    pub(crate) fn new(start: usize, len: usize) -> Result<Registration, MapError> {
        install()?;
        let slot = FREE.lock().unpoisoned().take().ok_or(MapError::TableFull)?;
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.publish(start, len);
        Ok(Registration(slot))
    }

    #[inline]
    pub(crate) fn slot(&self) -> &'static MappingSlot {
        self.0
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.0.publish(0, 0);
        FREE.lock().unpoisoned().slots.push(self.0);
    }
}

/// Installs the SIGBUS handler, once in the life of the process.
fn install() -> Result<(), MapError> {
    static INSTALLED: OnceLock<Result<(), Errno>> = OnceLock::new();
    INSTALLED
        .get_or_init(install_handler)
        .map_err(|errno| MapError::System {
            call: "sigaction",
            errno,
        })
}

fn install_handler() -> Result<(), Errno> {
    // SAFETY: all zero is a valid sigaction (default action, empty mask).
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only asks for the present action.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) } != 0 {
        return Err(last_errno());
    }
    // Stored before the handler is installed, for a fault may occur in between; leaked, for one may
    // occur at any time after.
    PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` is fully initialised and its handler calls async-signal-safe functions only.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) } != 0 {
        return Err(last_errno());
    }
    Ok(())
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let siginfo = unsafe { &*info };
    match siginfo.si_code {
        BUS_ADRERR | BUS_MCEERR_AR => {
            // SAFETY: these codes come with an address.
            let address = unsafe { siginfo.si_addr() } as usize;
            if !replace(address) {
                chain(signal, info, context);
            }
        }
        // The signal was sent by a process: there is no address. The standard library's handler
        // would treat it as its end, put the default action in place of this handler, and continue.
        code if code <= 0 => default_action(signal),
        _ => chain(signal, info, context),
    }
}

/// Maps zero memory over the registered mapping that contains `address`; `false` when there is
/// none.
fn replace(address: usize) -> bool {
    let blocks = std::iter::successors(first_block(), |block| block.next);
    for slot in blocks.flat_map(|block| &block.slots) {
        let Some((start, len)) = slot.range() else {
            continue;
        };
        if address.wrapping_sub(start) >= len {
            continue;
        }
        // Marked first, so that a reader of the zeroes can see the mark.
        slot.poisoned.store(true, Ordering::SeqCst);
        FAULTS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: no preconditions; the result is this thread's own.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: valid for the thread's life. Saved because the interrupted
        // code may be about to read it.
        let saved = unsafe { *errno };
        let done = map_zeroes(start, len) || map_zeroes(address & !(page_size() - 1), page_size());
        // SAFETY: as above.
        unsafe { *errno = saved };
        return done;
    }
    false
}

fn map_zeroes(start: usize, len: usize) -> bool {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range belongs to a registered mapping, which its owner keeps until the faulting
    // access has ended; no Rust reference to plain data in it exists.
    let ptr = unsafe { libc::mmap(start as *mut c_void, len, prot, flags, -1, 0) };
    ptr != libc::MAP_FAILED
}

/// Returns the page size. The value is initialised when the first memory is mapped, so this is only
/// a load.
fn page_size() -> usize {
    rustix::param::page_size()
}

/// Passes the signal to the action that was set before this handler.
fn chain(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: stored before this handler was installed, and never freed.
    let Some(previous) = (unsafe { PREVIOUS.load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    match previous.sa_sigaction {
        libc::SIG_IGN | libc::SIG_DFL => default_action(signal),
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the stored value is such a function.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without SA_SIGINFO the stored value is such a function.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Ends the process, as the signal does by default. (Ignoring it is no alternative: a
/// fault cannot be ignored.)
fn default_action(signal: c_int) {
    // SAFETY: all zero is the default action.
    let action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: async-signal-safe; `action` is valid.
    unsafe { libc::sigaction(signal, &raw const action, null_mut()) };
    // SAFETY: async-signal-safe. The signal is blocked while we handle it: it is
    // delivered when we return.
    unsafe { libc::raise(signal) };
}
