//! A model of the wake flag: the production code over loom's atomics, in every order. Mutants take
//! away one fence, or let one sender's store hide another's; each has to fail.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use loom::sync::Notify;
use loom::sync::atomic::AtomicU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Fault that a mutant of the wake flag has.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// No fence between setting the flag and reading whether the worker sleeps.
    SendersFence,
    /// No fence between marking the worker asleep and the last look.
    WorkersFence,
    /// A plain store sets the flag.
    PlainStore,
}

loom::lazy_static! {
    static ref FAULT: std::sync::Mutex<Fault> = std::sync::Mutex::new(Fault::None);
}
loom::thread_local! {
    static IS_WORKER: std::cell::Cell<bool> = std::cell::Cell::new(false);
}

fn has(fault: Fault) -> bool {
    *FAULT.lock().unwrap() == fault
}

mod sync {
    use super::{Fault, IS_WORKER, has};
    use loom::sync::atomic;
    pub use loom::sync::atomic::Ordering;

    pub struct AtomicBool(atomic::AtomicBool);

    impl AtomicBool {
        pub fn new(value: bool) -> Self {
            AtomicBool(atomic::AtomicBool::new(value))
        }
        pub fn load(&self, order: Ordering) -> bool {
            self.0.load(order)
        }
        pub fn store(&self, value: bool, order: Ordering) {
            self.0.store(value, order);
        }
        pub fn swap(&self, value: bool, order: Ordering) -> bool {
            if value && has(Fault::PlainStore) {
                self.0.store(value, order);
                return false;
            }
            self.0.swap(value, order)
        }
    }

    pub fn fence(order: Ordering) {
        let faulty = if IS_WORKER.with(|is| is.get()) {
            Fault::WorkersFence
        } else {
            Fault::SendersFence
        };
        if !has(faulty) {
            atomic::fence(order);
        }
    }
}

#[path = "../src/wake.rs"]
mod wake;

use sync::Ordering;
use wake::WakeFlag;

/// Senders leave a message each and raise the flag; one thread takes all messages, and sleeps when
/// there is none.
fn model(senders: usize, fault: Fault) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        *FAULT.lock().unwrap() = fault;
        IS_WORKER.with(|is| is.set(true));
        let woken = Arc::new(Notify::new());
        let signal = woken.clone();
        let flag = Arc::new(WakeFlag::new(move || signal.notify()));
        let left: Arc<Vec<AtomicU32>> = Arc::new((0..senders).map(|_| AtomicU32::new(0)).collect());
        let threads: Vec<_> = (0..senders)
            .map(|at| {
                let (flag, left) = (flag.clone(), left.clone());
                loom::thread::spawn(move || {
                    left[at].store(1, Ordering::Relaxed);
                    flag.raise();
                })
            })
            .collect();
        let mut seen = vec![false; senders];
        while seen.contains(&false) {
            if flag.take() {
                for (seen, left) in seen.iter_mut().zip(left.iter()) {
                    *seen |= left.load(Ordering::Relaxed) == 1;
                }
                continue;
            }
            // No needless wake-up occurs: when a wake-up is lost, the model does not end.
            if !flag.prepare_sleep() {
                woken.wait();
            }
            flag.awake();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

fn fails(senders: usize, fault: Fault) -> bool {
    catch_unwind(AssertUnwindSafe(|| model(senders, fault))).is_err()
}

#[test]
fn wake_up_is_never_lost() {
    model(1, Fault::None);
}

#[test]
fn messages_of_two_senders_are_seen() {
    model(2, Fault::None);
}

#[test]
fn mutants_lose_wake_up() {
    assert!(fails(1, Fault::SendersFence));
    assert!(fails(1, Fault::WorkersFence));
    assert!(fails(2, Fault::PlainStore));
}
