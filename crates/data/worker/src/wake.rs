//! Wake-up of a thread for a message, without a system call while the thread polls.

use crate::sync::{AtomicBool, Ordering, fence};

/// Wake flag of one thread. A sender leaves a message for the thread (in a channel, or as a
/// doorbell value in a cell) and raises the flag. The thread reads this one flag while it polls,
/// and `signal` ends its sleep.
///
/// No wake-up is lost. A sender raises the flag, then reads whether the thread sleeps. The thread
/// marks itself asleep, then reads the flag and everything that the flag is raised for. A full
/// fence stands between the two steps on either side, so at least one side sees the other. The
/// thread that takes the last sender's flag sees the messages of all senders before it. Each raise
/// is a read-modify-write, which continues the release sequence of the earlier ones; a plain store
/// would break it.
pub struct WakeFlag {
    raised: AtomicBool,
    asleep: AtomicBool,
    signal: Box<dyn Fn() + Send + Sync>,
}

impl WakeFlag {
    /// Creates a lowered flag. `signal` ends the thread's sleep, now or when it next begins.
    pub fn new(signal: impl Fn() + Send + Sync + 'static) -> Self {
        WakeFlag {
            raised: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            signal: Box::new(signal),
        }
    }

    /// Raises the flag, after something was left for the thread.
    pub fn raise(&self) {
        self.raised.swap(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            (self.signal)();
        }
    }

    /// Lowers the flag, and returns whether it was raised since the last call. Messages left before
    /// the raise are visible then. The call is one load if the flag was down. Only the flag's
    /// thread calls this.
    #[inline]
    pub fn take(&self) -> bool {
        self.raised.load(Ordering::Relaxed) && self.raised.swap(false, Ordering::Acquire)
    }

    /// Marks the thread as asleep. The thread polls the sources of the flag once more after this
    /// call. Returns `true` when the flag is already raised and the thread must not sleep. Each
    /// call is paired with one of [`WakeFlag::awake`].
    pub fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.raised.load(Ordering::Relaxed)
    }

    /// Marks the worker's thread as awake, so that raising the flag needs no system call.
    pub fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}
