//! The gate between vCPUs that run the PQAP hook and the thread that destroys the virtual machine.
//!
//! A vCPU enters before it accesses the mediated device, and leaves when its [`Inside`] is dropped.
//! The destroyer closes the gate, waits until no vCPU is inside, and only then frees the data of
//! the hook. The gate stays closed until it is opened for the next machine. (Linux:
//! `pqap_hook_rwsem` in `struct kvm_s390_crypto`.)
//!
//! ```
//! use ap::gate::Gate;
//!
//! static GATE: Gate = Gate::new();
//! GATE.open(); // the machine exists
//! if let Some(_inside) = GATE.enter() {
//!     // a vCPU: the hook
//! }
//! GATE.close(); // destroying it
//! while !GATE.is_empty() {
//!     std::thread::yield_now();
//! }
//! // now free
//! ```

use core::sync::atomic::{AtomicU32, Ordering};

/// Atomic word of a gate, replaceable for model checking.
#[expect(missing_docs, reason = "as in core::sync::atomic")]
pub trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn compare_exchange(&self, from: u32, to: u32, order: Ordering) -> Result<u32, u32>;
    fn fetch_or(&self, bits: u32, order: Ordering);
    fn fetch_and(&self, bits: u32, order: Ordering);
    fn fetch_sub(&self, number: u32, order: Ordering);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn compare_exchange(&self, from: u32, to: u32, order: Ordering) -> Result<u32, u32> {
        self.compare_exchange_weak(from, to, order, Ordering::Relaxed)
    }

    fn fetch_or(&self, bits: u32, order: Ordering) {
        self.fetch_or(bits, order);
    }

    fn fetch_and(&self, bits: u32, order: Ordering) {
        self.fetch_and(bits, order);
    }

    fn fetch_sub(&self, number: u32, order: Ordering) {
        self.fetch_sub(number, order);
    }
}

/// Gate between vCPUs and the destroyer of a virtual machine; initially closed.
#[derive(Debug)]
pub struct Gate<W: Word = AtomicU32> {
    /// Number of vCPUs inside, and [`CLOSED`].
    state: W,
}

const CLOSED: u32 = 1 << 31;

/// Guard of a vCPU that runs the hook.
#[derive(Debug)]
pub struct Inside<'a, W: Word = AtomicU32> {
    gate: &'a Gate<W>,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate::new()
    }
}

impl Gate {
    /// Creates a closed gate.
    pub const fn new() -> Gate {
        Gate {
            state: AtomicU32::new(CLOSED),
        }
    }
}

impl<W: Word> Gate<W> {
    /// Creates a closed gate with another implementation of the word.
    pub fn over(word: impl FnOnce(u32) -> W) -> Gate<W> {
        Gate {
            state: word(CLOSED),
        }
    }

    /// Opens the gate for a machine. All writes before this call are visible to vCPUs that enter.
    pub fn open(&self) {
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Enters, or returns `None` if the gate is closed, so that the guest has no queues.
    pub fn enter(&self) -> Option<Inside<'_, W>> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            // A full count cannot occur; the gate counts as closed then.
            if state & CLOSED != 0 || state == CLOSED - 1 {
                return None;
            }
            match self
                .state
                .compare_exchange(state, state + 1, Ordering::Acquire)
            {
                Ok(_) => return Some(Inside { gate: self }),
                Err(now) => state = now,
            }
        }
    }

    /// Closes the gate to vCPUs that are not inside.
    pub fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::Relaxed);
    }

    /// Returns whether the gate is closed and all vCPUs have left. The data of the hook may then be
    /// freed.
    pub fn is_empty(&self) -> bool {
        self.state.load(Ordering::Acquire) == CLOSED
    }
}

impl<W: Word> Drop for Inside<'_, W> {
    fn drop(&mut self) {
        self.gate.state.fetch_sub(1, Ordering::Release);
    }
}
