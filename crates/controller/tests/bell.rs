//! Waking a worker. The orders of memory are `loom.rs`'s.

use controller::{Bell, IrqSink};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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
