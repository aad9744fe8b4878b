//! Grace periods: how memory that is unmapped stays until the commands that
//! may use it have completed.
//!
//! Time is cut into epochs by unmaps. A [`Pin`] is a reference count on the epoch in which it was
//! taken; each epoch holds the next one, and the memory that was unmapped at its end. So a pin
//! keeps everything that is unmapped after it was taken, a pin that is taken later keeps nothing of
//! it, and when the last old pin goes, the memory goes with it, even if the map itself is gone by
//! then. The counts are `Rc`'s: not atomic, one increment per pin.

use std::cell::{OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;

/// The source of map identities.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

struct Epoch {
    /// Identity of the map.
    map: u64,
    /// Memory that left the map at the end of this epoch, or during the next one while that had no
    /// pins.
    grave: RefCell<Vec<Memory>>,
    /// The epoch after this one, which it keeps alive.
    next: OnceCell<Rc<Epoch>>,
}

impl Epoch {
    fn new(map: u64) -> Rc<Epoch> {
        Rc::new(Epoch {
            map,
            grave: RefCell::default(),
            next: OnceCell::new(),
        })
    }
}

impl Drop for Epoch {
    /// Unlinks the chain step by step: one long pin under many unmaps makes it
    /// longer than a stack is deep.
    fn drop(&mut self) {
        let mut next = self.next.take();
        while let Some(epoch) = next {
            next = Rc::into_inner(epoch).and_then(|mut epoch| epoch.next.take());
        }
    }
}

/// Keeps all memory that was mapped when it was taken (and what was mapped later) from going away.
/// Taken by [`crate::DmaMap::pin`], for as long as a command is in flight.
#[derive(Clone)]
pub struct Pin(Rc<Epoch>);

impl Pin {
    /// Identity of the map that this pin belongs to.
    pub(crate) fn map(&self) -> u64 {
        self.0.map
    }
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pin")
            .field("map", &self.0.map)
            .finish_non_exhaustive()
    }
}

/// The map's side.
pub(crate) struct Epochs {
    current: Rc<Epoch>,
    /// The epoch before; alive as long as any pin of it or of an older one is.
    previous: Weak<Epoch>,
}

impl Epochs {
    pub(crate) fn new() -> Epochs {
        Epochs {
            current: Epoch::new(NEXT_ID.fetch_add(1, Ordering::Relaxed)),
            previous: Weak::new(),
        }
    }

    pub(crate) fn map(&self) -> u64 {
        self.current.map
    }

    #[inline]
    pub(crate) fn pin(&self) -> Pin {
        Pin(Rc::clone(&self.current))
    }

    /// Takes memory that has just left the map, and ends the epoch.
    pub(crate) fn retire(&mut self, removed: Vec<Memory>) {
        let older = self.previous.upgrade();
        // Our own reference, and the previous epoch's.
        let pinned = Rc::strong_count(&self.current) > 1 + usize::from(older.is_some());
        if pinned {
            self.current.grave.borrow_mut().extend(removed);
            let next = Epoch::new(self.current.map);
            if self.current.next.set(Rc::clone(&next)).is_ok() {
                self.previous = Rc::downgrade(&self.current);
                self.current = next;
            }
        } else if let Some(older) = older {
            // It goes with the last of the older pins, whether or not anyone asks then.
            older.grave.borrow_mut().extend(removed);
        }
    }

    /// Whether no pin is older than the last [`Epochs::retire`]; then nothing is kept any longer.
    pub(crate) fn quiesced(&self) -> bool {
        self.previous.strong_count() == 0
    }
}
