//! Waking a worker for a message, without a system call while it polls.

use crate::irq::IrqSink;
use crate::sync::{AtomicBool, Ordering, fence};
use std::sync::Arc;

/// One worker's bell. Others leave something for it (a message in a channel, a doorbell value in a cell) and ring; the
/// worker looks at one flag while it polls, and is woken by `wake` when it sleeps.
///
/// Why nothing is lost: who rings stores the flag, then looks whether the worker sleeps; the worker says that it sleeps,
/// then looks at the flag, and at everything that it is rung for. A full fence stands between the two steps on either
/// side, so at least one of them sees the other. And what several left is all seen by whoever takes the last one's flag: each
/// sets it by a read-modify-write, which goes on with what the ones before it have published; a plain store would hide that.
pub struct Bell {
    rung: AtomicBool,
    asleep: AtomicBool,
    wake: Arc<dyn IrqSink>,
}

impl Bell {
    /// `wake` ends the worker's sleep, now or when it next begins.
    pub fn new(wake: Arc<dyn IrqSink>) -> Self {
        Bell {
            rung: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wake,
        }
    }

    /// Something was left for the worker, before this call.
    pub fn ring(&self) {
        self.rung.swap(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            self.wake.signal();
        }
    }

    /// Whether it was rung since the last call; what was left before is visible then. One load if it was not. Only the
    /// worker calls this.
    #[inline]
    pub fn take(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::Acquire)
    }

    /// The worker is about to sleep: the last look at whatever it is rung for comes after this call. `true` when it was rung
    /// already: do not sleep. Each call wants one of [`Bell::awake`].
    pub fn doze(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.rung.load(Ordering::Relaxed)
    }

    /// The worker sleeps no more.
    pub fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}
