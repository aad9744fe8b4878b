//! A model of how a queue's two sides tell each other to wake up, over loom's atomics: the
//! export arms `avail_event` (or the flag that stands for it) and looks once more before it
//! sleeps, and looks at `used_event` (or the flag) after it has shown what it used; the driver
//! does the same the other way round (virtio 1.2, 2.7.7.2 and 2.7.10). Both directions need a
//! full fence on both sides.
//!
//! Loads, stores and fences are those of `ring.rs` and `run.rs`, in their order; the mutants take
//! one fence away, or the second look, and have to lose a wake-up. On x86 alone no test of the
//! export notices most of them.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU16, Ordering, fence};
use loom::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What is missing.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The fence of the export, between arming and its second look, or between what it
    /// used and the driver's wish.
    ExportFence,
    /// The same of the driver.
    DriverFence,
    /// The look after arming.
    SecondLook,
}

/// One direction of a queue: who moves the index, and who asks to be told.
struct Direction {
    index: AtomicU16,
    /// `avail_event` or `used_event`.
    event: AtomicU16,
    /// Without EVENT_IDX: 0 asks to be told.
    flag: AtomicU16,
    told: AtomicU16,
    event_idx: bool,
}

fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl Direction {
    /// The event was armed long ago, the flag says that nobody is to be told.
    fn new(event_idx: bool, start: u16) -> Arc<Self> {
        Arc::new(Direction {
            index: AtomicU16::new(start),
            event: AtomicU16::new(start.wrapping_sub(1)),
            flag: AtomicU16::new(1),
            told: AtomicU16::new(0),
            event_idx,
        })
    }

    /// Moves the index on, and tells the other side if it asks for that.
    fn publish(&self, old: u16, new: u16, fenced: bool) {
        self.index.store(new, Ordering::Release);
        if fenced {
            fence(Ordering::SeqCst);
        }
        let wanted = if self.event_idx {
            need_event(self.event.load(Ordering::Relaxed), new, old)
        } else {
            self.flag.load(Ordering::Relaxed) == 0
        };
        if wanted {
            self.told.store(1, Ordering::Relaxed);
        }
    }

    /// Asks to be told of what follows `seen`; whether there is something already.
    fn arm(&self, seen: u16, fenced: bool) -> bool {
        if self.event_idx {
            self.event.store(seen, Ordering::Relaxed);
        } else {
            self.flag.store(0, Ordering::Relaxed);
        }
        if fenced {
            fence(Ordering::SeqCst);
        }
        self.index.load(Ordering::Acquire) != seen
    }
}

/// One side publishes in these moves, the other takes what there is, arms, and sleeps when there is
/// nothing more. In the end it has seen everything, or was told.
fn history(event_idx: bool, start: u16, moves: u16, publisher: bool, sleeper: bool, look: bool) {
    let direction = Direction::new(event_idx, start);
    let other = {
        let direction = direction.clone();
        thread::spawn(move || {
            for i in 0..moves {
                let old = start.wrapping_add(i);
                direction.publish(old, old.wrapping_add(1), publisher);
            }
        })
    };
    let end = start.wrapping_add(moves);
    let mut seen = start;
    while seen != end {
        let more = direction.arm(seen, sleeper);
        if !(more && look) {
            break;
        }
        seen = direction.index.load(Ordering::Acquire);
    }
    other.join().unwrap();
    let told = direction.told.load(Ordering::Relaxed) == 1;
    assert!(seen == end || told, "it sleeps, and nobody wakes it");
}

/// All histories, with what is missing. `exports`: it is the export that sleeps, for what is
/// available; else it publishes what it used.
fn all(exports: bool, event_idx: bool, fault: Fault) {
    for start in [7, u16::MAX] {
        let (publisher, sleeper) = match (exports, fault) {
            (true, Fault::ExportFence) | (false, Fault::DriverFence) => (true, false),
            (true, Fault::DriverFence) | (false, Fault::ExportFence) => (false, true),
            _ => (true, true),
        };
        let look = fault != Fault::SecondLook;
        loom::model(move || history(event_idx, start, 2, publisher, sleeper, look));
    }
}

#[test]
fn wake_up_in_either_direction_is_never_lost() {
    for event_idx in [true, false] {
        all(true, event_idx, Fault::None);
        all(false, event_idx, Fault::None);
    }
}

#[test]
fn missing_fence_or_second_check_loses_wake_up() {
    for (exports, event_idx) in [(true, true), (true, false), (false, true), (false, false)] {
        for fault in [Fault::ExportFence, Fault::DriverFence, Fault::SecondLook] {
            let survived = catch_unwind(AssertUnwindSafe(|| all(exports, event_idx, fault)));
            assert!(survived.is_err(), "nobody notices");
        }
    }
}
