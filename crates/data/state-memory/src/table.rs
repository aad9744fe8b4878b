//! Tables with entries of one cache line each. A nonzero first word marks an entry as used.

use crate::layout::Kind;
use crate::{StateError, StateMemory};
use dma::{ROW, Row, Rows};
use std::sync::atomic::{AtomicU64, Ordering};

/// Entries of a section. The section's first row describes the table: the number of entries that
/// were ever used, and a word for the owner.
#[derive(Debug)]
pub(crate) struct EntryTable {
    state: StateMemory,
    kind: Kind,
    rows: Rows,
    /// Number of entries that were ever used, all of which come first.
    used: usize,
    /// Indices of unused entries below `used`.
    free: Vec<u32>,
}

impl EntryTable {
    pub fn open(state: StateMemory, kind: Kind) -> Result<EntryTable, StateError> {
        let count = state.section(kind).len / ROW;
        let entries = count
            .checked_sub(1)
            .ok_or(StateError::Damaged("a table is missing"))?;
        state.prepare(kind, ROW)?;
        let rows = state.rows(kind, 0, count)?;
        let mut table = EntryTable {
            state,
            kind,
            rows,
            used: 0,
            free: Vec::new(),
        };
        let used = table.head(0).map_or(0, |word| word.load(Ordering::Acquire));
        if used > entries as u64 {
            return Err(StateError::Damaged("a table says that it has more places"));
        }
        table.used = used as usize;
        let vacant = |place: &u32| table.get(*place).is_none();
        table.free = (0..table.used as u32).filter(vacant).collect();
        Ok(table)
    }

    /// Returns a word of the row that describes the table.
    fn head(&self, word: usize) -> Option<&AtomicU64> {
        self.rows.get(0)?.get(word)
    }

    /// Returns the word that is reserved for the owner of the table.
    pub fn owners_word(&self) -> Option<&AtomicU64> {
        self.head(1)
    }

    fn row(&self, place: u32) -> Option<&Row> {
        self.rows.get((place as usize).checked_add(1)?)
    }

    /// Returns the four words of the entry with this index; `None` if it is unused.
    pub fn get(&self, place: u32) -> Option<[u64; 4]> {
        let [first, a, b, c, ..] = self.row(place)?;
        let valid = first.load(Ordering::Acquire);
        let rest = [a, b, c].map(|word| word.load(Ordering::Relaxed));
        let [a, b, c] = rest;
        (valid != 0).then_some([valid, a, b, c])
    }

    /// Returns all used entries, with their indices.
    pub fn iter(&self) -> impl Iterator<Item = (u32, [u64; 4])> {
        (0..self.used as u32).filter_map(|place| Some((place, self.get(place)?)))
    }

    /// Adds an entry with a nonzero first word; returns its index. `what` names the entries.
    pub fn add(&mut self, entry: [u64; 4], what: &'static str) -> Result<u32, StateError> {
        let place = match self.free.pop() {
            Some(place) => place,
            None => self.grow(what)?,
        };
        let row = self.row(place).ok_or(StateError::OutOfRange)?;
        let [first, rest @ ..] = row;
        let [valid, fields @ ..] = entry;
        for (word, field) in rest.iter().zip(fields) {
            word.store(field, Ordering::Relaxed);
        }
        crash::point!("state-memory.table.fields");
        first.store(valid, Ordering::Release);
        crash::point!("state-memory.table.valid");
        Ok(place)
    }

    /// Returns the index of an entry that was never used.
    fn grow(&mut self, what: &'static str) -> Result<u32, StateError> {
        let place = self.used;
        if place + 1 >= self.rows.count() {
            return Err(StateError::Full(what));
        }
        self.state.prepare(self.kind, (place + 2) * ROW)?;
        self.used = place + 1;
        if let Some(head) = self.head(0) {
            head.store(self.used as u64, Ordering::Release);
        }
        crash::point!("state-memory.table.grown");
        // A section's rows are numbered in 32 bits.
        Ok(place as u32)
    }

    /// Sets the second word of an entry, by a single store.
    pub fn set_field(&self, place: u32, value: u64) {
        if let Some([_, field, ..]) = self.row(place) {
            field.store(value, Ordering::Release);
        }
        crash::point!("state-memory.table.changed");
    }

    /// Removes the entry with this index.
    pub fn remove(&mut self, place: u32) {
        if self.get(place).is_none() {
            return;
        }
        if let Some(first) = self.row(place).and_then(|row| row.first()) {
            first.store(0, Ordering::Release);
            self.free.push(place);
        }
        crash::point!("state-memory.table.removed");
    }
}
