//! Waking a thread for a message, without a system call while it polls.

use crate::sync::{AtomicBool, Ordering, fence};

/// One thread's wake flag. Others leave something for the thread (a message in a channel, a
/// doorbell value in a cell) and raise the flag; the thread looks at this one flag while it polls,
/// and `signal` ends its sleep.
///
/// Why no wake-up is lost: a sender raises the flag, then looks whether the thread sleeps; the
/// thread says that it sleeps, then looks at the flag, and at everything that the flag is raised
/// for. A full fence stands between the two steps on either side, so at least one of them sees the
/// other. What several senders left is all seen by the thread that takes the last one's flag: each
/// raises it by a read-modify-write, which continues the release sequence of the ones before; a
/// plain store would break that.
pub struct WakeFlag {
    raised: AtomicBool,
    asleep: AtomicBool,
    signal: Box<dyn Fn() + Send + Sync>,
}

impl WakeFlag {
    /// `signal` ends the thread's sleep, now or when it next begins.
    pub fn new(signal: impl Fn() + Send + Sync + 'static) -> Self {
        WakeFlag {
            raised: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            signal: Box::new(signal),
        }
    }

    /// Something was left for the thread, before this call.
    pub fn raise(&self) {
        self.raised.swap(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            (self.signal)();
        }
    }

    /// Whether it was raised since the last call; what was left before is visible then. One load if
    /// it was not. Only the flag's thread calls this.
    #[inline]
    pub fn take(&self) -> bool {
        self.raised.load(Ordering::Relaxed) && self.raised.swap(false, Ordering::Acquire)
    }

    /// The thread is about to sleep: its last look at whatever the flag is raised for comes after
    /// this call. `true` when the flag is up already: do not sleep. Each call wants one of
    /// [`WakeFlag::awake`].
    pub fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.raised.load(Ordering::Relaxed)
    }

    /// The thread is awake again.
    pub fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}
