//! A list that removes an entry when the entry's guard is dropped. It holds counters and the
//! assignment of front-ends to workers.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use sync::Unpoisoned;

struct Inner<T> {
    next: u64,
    entries: Vec<(u64, T)>,
}

/// Shared list whose entries are removed by dropping their guards; a clone is the same list.
pub struct Roll<T>(Arc<Mutex<Inner<T>>>);

impl<T> Clone for Roll<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Roll<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            next: 0,
            entries: Vec::new(),
        })))
    }
}

impl<T> Roll<T> {
    /// Adds an entry, which stays until the returned guard is dropped.
    #[must_use = "the entry goes with it"]
    pub fn enter(&self, entry: T) -> Listing<T> {
        // If a thread panicked while it held the lock, the list is still consistent.
        let mut inner = self.0.lock().unpoisoned();
        let number = inner.next;
        inner.next += 1;
        inner.entries.push((number, entry));
        Listing {
            roll: Arc::downgrade(&self.0),
            number,
        }
    }

    /// Calls `look` with an iterator over all entries, in the order of their registration.
    pub fn look<R>(&self, look: impl FnOnce(&mut dyn Iterator<Item = &T>) -> R) -> R {
        let inner = self.0.lock().unpoisoned();
        look(&mut inner.entries.iter().map(|(_, entry)| entry))
    }

    /// Returns copies of all entries.
    pub fn all(&self) -> Vec<T>
    where
        T: Clone,
    {
        self.look(|entries| entries.cloned().collect())
    }
}

/// Guard of an entry of a [`Roll`], which removes the entry when it is dropped.
pub struct Listing<T> {
    roll: Weak<Mutex<Inner<T>>>,
    number: u64,
}

impl<T> fmt::Debug for Listing<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listing({})", self.number)
    }
}

impl<T> Drop for Listing<T> {
    fn drop(&mut self) {
        let Some(roll) = self.roll.upgrade() else {
            return;
        };
        let mut inner = roll.lock().unpoisoned();
        let at = inner
            .entries
            .binary_search_by_key(&self.number, |(number, _)| *number);
        let gone = at.ok().map(|at| inner.entries.remove(at));
        // Dropping the entry may take long, so the lock is released first.
        drop(inner);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_goes_with_its_listing() {
        let roll = Roll::default();
        let listings = ["a", "b", "c"].map(|name| roll.enter(name));
        let [a, b, c] = listings;
        assert_eq!(roll.all(), ["a", "b", "c"]);
        drop(b);
        assert_eq!(roll.all(), ["a", "c"]);
        let d = roll.enter("d");
        drop((a, d));
        assert_eq!(roll.all(), ["c"]);
        drop(roll);
        drop(c);
    }
}
