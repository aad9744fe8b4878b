//! The gate between vCPUs that run the PQAP hook and the thread that destroys the virtual machine.
//!
//! A vCPU enters before it looks at the mediated device and leaves when its [`Inside`] is dropped. The destroyer closes
//! the gate, waits until nobody is inside, and only then frees what the hook uses. Closing is final until the gate is
//! opened for the next machine. (Linux: `pqap_hook_rwsem` in `struct kvm_s390_crypto`.)

use core::sync::atomic::{AtomicU32, Ordering};

/// The gate; it starts closed.
#[derive(Debug)]
pub struct Gate {
    /// The number of those inside, and [`CLOSED`].
    state: AtomicU32,
}

const CLOSED: u32 = 1 << 31;

/// Somebody who runs the hook.
#[derive(Debug)]
pub struct Inside<'a> {
    gate: &'a Gate,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate::new()
    }
}

impl Gate {
    /// A closed gate.
    pub const fn new() -> Gate {
        Gate {
            state: AtomicU32::new(CLOSED),
        }
    }

    /// Opens it for a machine.
    pub fn open(&self) {
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Goes in, unless it is closed. Then there is no hook: the guest has no queues.
    pub fn enter(&self) -> Option<Inside<'_>> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            // As many inside as the count can hold cannot be; treat it as closed.
            if state & CLOSED != 0 || state == CLOSED - 1 {
                return None;
            }
            let more = state + 1;
            match self.state.compare_exchange_weak(
                state,
                more,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(Inside { gate: self }),
                Err(now) => state = now,
            }
        }
    }

    /// Lets nobody in any more.
    pub fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::Relaxed);
    }

    /// Whether it is closed and all have left. From then on what the hook uses may be freed.
    pub fn is_empty(&self) -> bool {
        self.state.load(Ordering::Acquire) == CLOSED
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.gate.state.fetch_sub(1, Ordering::Release);
    }
}
