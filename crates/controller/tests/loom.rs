//! A model of the bell: the production code over loom's atomics, in every order. Mutants take away one fence, or let one worker's
//! ring hide another's; each has to fail.

use loom::sync::Notify;
use loom::sync::atomic::AtomicU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What is missing.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The fence between setting the flag and the look whether the worker sleeps.
    RingersFence,
    /// The fence between saying that it sleeps and the last look.
    WorkersFence,
    /// The flag is set by a plain store.
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
            Fault::RingersFence
        };
        if !has(faulty) {
            atomic::fence(order);
        }
    }
}

mod irq {
    pub trait IrqSink: Send + Sync {
        fn signal(&self);
    }
}

#[path = "../src/bell.rs"]
mod bell;

use bell::Bell;
use sync::Ordering;

struct Wake(Arc<Notify>);
impl irq::IrqSink for Wake {
    fn signal(&self) {
        self.0.notify();
    }
}

/// Some workers leave something each and ring; one takes it all, and sleeps when there is nothing.
fn model(ringers: usize, fault: Fault) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        *FAULT.lock().unwrap() = fault;
        IS_WORKER.with(|is| is.set(true));
        let woken = Arc::new(Notify::new());
        let bell = Arc::new(Bell::new(Arc::new(Wake(woken.clone()))));
        let left: Arc<Vec<AtomicU32>> = Arc::new((0..ringers).map(|_| AtomicU32::new(0)).collect());
        let threads: Vec<_> = (0..ringers)
            .map(|at| {
                let (bell, left) = (bell.clone(), left.clone());
                loom::thread::spawn(move || {
                    left[at].store(1, Ordering::Relaxed);
                    bell.ring();
                })
            })
            .collect();
        let mut seen = vec![false; ringers];
        while seen.contains(&false) {
            if bell.take() {
                for (seen, left) in seen.iter_mut().zip(left.iter()) {
                    *seen |= left.load(Ordering::Relaxed) == 1;
                }
                continue;
            }
            // Nobody wakes it without need: where a ring is lost, the model does not end.
            if !bell.doze() {
                woken.wait();
            }
            bell.awake();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

fn fails(ringers: usize, fault: Fault) -> bool {
    catch_unwind(AssertUnwindSafe(|| model(ringers, fault))).is_err()
}

#[test]
fn no_ring_is_lost() {
    model(1, Fault::None);
}

#[test]
fn what_two_have_left_is_seen() {
    model(2, Fault::None);
}

#[test]
fn mutants() {
    assert!(fails(1, Fault::RingersFence));
    assert!(fails(1, Fault::WorkersFence));
    assert!(fails(2, Fault::PlainStore));
}
