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
pub struct GuardedList<T>(Arc<Mutex<Inner<T>>>);

impl<T> Clone for GuardedList<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for GuardedList<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            next: 0,
            entries: Vec::new(),
        })))
    }
}

impl<T> GuardedList<T> {
    /// Adds an entry, which stays until the returned guard is dropped.
    #[must_use = "the entry goes with it"]
    pub fn enter(&self, entry: T) -> ListEntry<T> {
        // If a thread panicked while it held the lock, the list is still consistent.
        let mut inner = self.0.lock().unpoisoned();
        let number = inner.next;
        inner.next += 1;
        inner.entries.push((number, entry));
        ListEntry {
            list: Arc::downgrade(&self.0),
            number,
        }
    }

    /// Calls `look` with an iterator over all entries, in the order in which they were added.
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

/// Guard of an entry of a [`GuardedList`], which removes the entry when it is dropped.
pub struct ListEntry<T> {
    list: Weak<Mutex<Inner<T>>>,
    number: u64,
}

impl<T> fmt::Debug for ListEntry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listing({})", self.number)
    }
}

impl<T> Drop for ListEntry<T> {
    fn drop(&mut self) {
        let Some(list) = self.list.upgrade() else {
            return;
        };
        let mut inner = list.lock().unpoisoned();
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
    fn dropped_listing_removes_entry() {
        let list = GuardedList::default();
        let listings = ["a", "b", "c"].map(|name| list.enter(name));
        let [a, b, c] = listings;
        assert_eq!(list.all(), ["a", "b", "c"]);
        drop(b);
        assert_eq!(list.all(), ["a", "c"]);
        let d = list.enter("d");
        drop((a, d));
        assert_eq!(list.all(), ["c"]);
        drop(list);
        drop(c);
    }
}
