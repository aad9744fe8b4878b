//! Waking a worker. The orders of memory are `loom.rs`'s.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use worker::WakeFlag;

#[test]
fn only_sleeping_worker_is_woken() {
    let woken = Arc::new(AtomicU32::new(0));
    let counter = woken.clone();
    let flag = WakeFlag::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    assert!(!flag.take());
    flag.raise();
    assert_eq!(woken.load(Ordering::Relaxed), 0);
    assert!(flag.prepare_sleep(), "raised before");
    flag.awake();
    assert!(flag.take());
    assert!(!flag.take());
    assert!(!flag.prepare_sleep());
    flag.raise();
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    flag.awake();
    assert!(flag.take());
}

/// Two threads: one leaves a number and raises the flag, the other takes it or sleeps until it is
/// woken.
#[test]
fn wake_up_is_never_lost() {
    const ROUNDS: u64 = 20_000;
    let (wake, woken) = mpsc::sync_channel(1);
    let flag = WakeFlag::new(move || {
        let _ = wake.try_send(());
    });
    let (left, seen) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=ROUNDS {
                left.store(n, Ordering::Relaxed);
                flag.raise();
                while seen.load(Ordering::Acquire) < n {
                    std::thread::yield_now();
                }
            }
        });
        let mut last = 0;
        while last < ROUNDS {
            if flag.take() {
                last = left.load(Ordering::Relaxed);
                seen.store(last, Ordering::Release);
                continue;
            }
            if !flag.prepare_sleep() {
                woken
                    .recv_timeout(Duration::from_secs(60))
                    .expect("a wake-up was lost");
            }
            flag.awake();
        }
    });
}
