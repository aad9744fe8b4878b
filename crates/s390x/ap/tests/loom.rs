//! The gate in every interleaving and under the memory model: no vCPU uses memory that the
//! destroyer frees, and each vCPU that enters sees everything from before the gate opened. Without
//! any one of its orders a model must notice.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use std::panic;
use std::rc::Rc;

use ap::gate::{Gate, Word};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

/// An order that is left out.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    Open,
    Enter,
    Leave,
    Empty,
}

struct Model {
    word: AtomicU32,
    without: Without,
}

impl Model {
    fn order(&self, of: Without, order: Ordering) -> Ordering {
        if self.without == of {
            Ordering::Relaxed
        } else {
            order
        }
    }
}

impl Word for Model {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(self.order(Without::Empty, order))
    }

    fn compare_exchange(&self, from: u32, to: u32, order: Ordering) -> Result<u32, u32> {
        let order = self.order(Without::Enter, order);
        self.word
            .compare_exchange(from, to, order, Ordering::Relaxed)
    }

    fn fetch_or(&self, bits: u32, order: Ordering) {
        self.word.fetch_or(bits, order);
    }

    fn fetch_and(&self, bits: u32, order: Ordering) {
        self.word.fetch_and(bits, self.order(Without::Open, order));
    }

    fn fetch_sub(&self, number: u32, order: Ordering) {
        self.word
            .fetch_sub(number, self.order(Without::Leave, order));
    }
}

/// Two vCPUs that run the hook once each, and a machine that is made, opened,
/// closed and destroyed meanwhile.
fn life(without: Without) {
    loom::model(move || {
        let gate = Gate::over(|state| Model {
            word: AtomicU32::new(state),
            without,
        });
        // loom runs its threads one at a time, on one thread.
        let shared = Rc::new((gate, UnsafeCell::new(0_u32)));
        let vcpu = || {
            let shared = Rc::clone(&shared);
            thread::spawn(move || {
                let (gate, resource) = &*shared;
                if let Some(_inside) = gate.enter() {
                    // loom looks for a write at the same time, or one that is not ordered before. A
                    // raw pointer is not followed: that it is taken is enough.
                    resource.with(|_| ());
                }
            })
        };
        let vcpus = [vcpu(), vcpu()];
        let (gate, resource) = &*shared;
        resource.with_mut(|_| ());
        gate.open();
        gate.close();
        while !gate.is_empty() {
            thread::yield_now();
        }
        resource.with_mut(|_| ());
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
}

#[test]
fn freed_hook_is_never_used() {
    life(Without::Nothing);
}

#[test]
fn each_memory_ordering_is_needed() {
    for (name, without) in [
        ("open", Without::Open),
        ("enter", Without::Enter),
        ("leave", Without::Leave),
        ("empty", Without::Empty),
    ] {
        let result = panic::catch_unwind(|| life(without));
        assert!(result.is_err(), "the model does not notice: {name}");
    }
}
