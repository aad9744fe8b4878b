//! Grace periods: unmapped memory stays until the commands that may use it have completed.
//!
//! Unmaps divide time into epochs. A [`Pin`] is a reference count on the epoch in which it was
//! taken. Each epoch holds the next one, and the memory that was unmapped at its end. A pin
//! therefore keeps everything that is unmapped after it was taken, and a later pin keeps nothing of
//! it. The memory is released with the last old pin, even if the map itself has been dropped. The
//! counts are `Rc`'s: not atomic, one increment per pin.

use std::cell::{OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;

/// Identity that the next DMA map gets.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

struct Epoch {
    /// Identity of the DMA map that the epoch belongs to.
    map: u64,
    /// Memory that was unmapped at the end of this epoch, or during the next one while that had no
    /// pins.
    grave: RefCell<Vec<Memory>>,
    /// Next epoch of the map, which this one keeps alive.
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

/// Keeps all memory that was mapped when the pin was taken (and later) from being released.
/// [`crate::DmaMap::pin`] takes one for the duration of a command.
#[derive(Clone)]
pub struct Pin(Rc<Epoch>);

impl Pin {
    /// Returns the identity of the map that this pin belongs to.
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

/// Epochs of a DMA map, by which unmapped memory is kept until no command can access it.
pub(crate) struct Epochs {
    current: Rc<Epoch>,
    /// Previous epoch, which is alive while it or an older one has a pin.
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

    /// Ends the epoch, and keeps memory that was just unmapped until the outstanding pins are gone.
    pub(crate) fn retire(&mut self, removed: Vec<Memory>) {
        let older = self.previous.upgrade();
        // The count includes the map's reference, and the previous epoch's.
        let pinned = Rc::strong_count(&self.current) > 1 + usize::from(older.is_some());
        if pinned {
            self.current.grave.borrow_mut().extend(removed);
            let next = Epoch::new(self.current.map);
            if self.current.next.set(Rc::clone(&next)).is_ok() {
                self.previous = Rc::downgrade(&self.current);
                self.current = next;
            }
        } else if let Some(older) = older {
            // The memory is released with the last of the older pins, even without a further call.
            older.grave.borrow_mut().extend(removed);
        }
    }

    /// Returns whether no pin is older than the last [`Epochs::retire`], so that no unmapped memory
    /// is kept any longer.
    pub(crate) fn quiesced(&self) -> bool {
        self.previous.strong_count() == 0
    }
}
