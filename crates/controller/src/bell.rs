//! Waking a worker for a message, without a system call while it polls.

use crate::irq::IrqSink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// One worker's bell. Others leave something for it (a message in a channel, a doorbell value in a cell) and ring; the
/// worker looks at one flag while it polls, and is woken by `wake` when it sleeps.
///
/// Why nothing is lost: who rings stores the flag, then looks whether the worker sleeps; the worker says that it sleeps,
/// then looks at the flag, and at everything that it is rung for. A full fence stands between the two steps on either
/// side, so at least one of them sees the other.
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
        self.rung.store(true, Ordering::Release);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, AtomicU64};
    use std::sync::mpsc;
    use std::time::Duration;

    struct Count(Arc<AtomicU32>);
    impl IrqSink for Count {
        fn signal(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_a_sleeper_is_woken() {
        let woken = Arc::new(AtomicU32::new(0));
        let bell = Bell::new(Arc::new(Count(woken.clone())));
        assert!(!bell.take());
        bell.ring();
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        assert!(bell.doze(), "rung before");
        bell.awake();
        assert!(bell.take());
        assert!(!bell.take());
        assert!(!bell.doze());
        bell.ring();
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        bell.awake();
        assert!(bell.take());
    }

    struct Token(mpsc::SyncSender<()>);
    impl IrqSink for Token {
        fn signal(&self) {
            let _ = self.0.try_send(());
        }
    }

    /// Two threads: one leaves a number and rings, the other takes it or sleeps until it is woken.
    #[test]
    fn no_ring_is_lost() {
        const ROUNDS: u64 = 20_000;
        let (wake, woken) = mpsc::sync_channel(1);
        let bell = Bell::new(Arc::new(Token(wake)));
        let (left, seen) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 1..=ROUNDS {
                    left.store(n, Ordering::Relaxed);
                    bell.ring();
                    while seen.load(Ordering::Acquire) < n {
                        std::thread::yield_now();
                    }
                }
            });
            let mut last = 0;
            while last < ROUNDS {
                if bell.take() {
                    last = left.load(Ordering::Relaxed);
                    seen.store(last, Ordering::Release);
                    continue;
                }
                if !bell.doze() {
                    woken
                        .recv_timeout(Duration::from_secs(60))
                        .expect("a ring was lost");
                }
                bell.awake();
            }
        });
    }
}
