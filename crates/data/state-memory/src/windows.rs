//! Table of guest memory windows, with one entry for each.

use crate::layout::Kind;
use crate::table::EntryTable;
use crate::{StateError, StateMemory};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

const VALID: u64 = 1;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const BACKED: u64 = 1 << 3;

/// Memory file that the keeper holds, and the offset of a window in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptMemory {
    /// Number of the file among the kept descriptors. `None` when the file is not kept, so that the
    /// next process cannot serve the disk.
    pub number: Option<NonZeroU32>,
    /// Byte offset of the window in the memory file.
    pub offset: u64,
}

/// Window of guest memory, as recorded for the next process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptWindow {
    /// First guest address (IOVA) of the window.
    pub iova: u64,
    /// Length of the window in bytes.
    pub len: u64,
    /// Whether the device may read guest memory.
    pub read: bool,
    /// Whether the device may write guest memory.
    pub write: bool,
    /// Memory file of the window; `None` for memory that is not shared.
    pub memory: Option<KeptMemory>,
}

impl KeptWindow {
    fn encode(&self) -> [u64; 4] {
        let flag = |bit, on: bool| if on { bit } else { 0 };
        let number = self.memory.and_then(|memory| memory.number);
        let first = VALID
            | flag(READ, self.read)
            | flag(WRITE, self.write)
            | flag(BACKED, self.memory.is_some())
            | u64::from(number.map_or(0, NonZeroU32::get)) << 32;
        let offset = self.memory.map_or(0, |memory| memory.offset);
        [first, self.iova, self.len, offset]
    }

    fn decode([first, iova, len, offset]: [u64; 4]) -> Self {
        let number = NonZeroU32::new((first >> 32) as u32);
        KeptWindow {
            iova,
            len,
            read: first & READ != 0,
            write: first & WRITE != 0,
            memory: (first & BACKED != 0).then_some(KeptMemory { number, offset }),
        }
    }
}

/// Table of guest memory windows in the state memory.
#[derive(Debug)]
pub struct WindowTable {
    table: EntryTable,
    /// Index of each window's entry, by the window's first IOVA.
    places: BTreeMap<u64, u32>,
    /// Number of windows in each memory file, by the keeper's number of the file.
    users: BTreeMap<NonZeroU32, usize>,
}

impl WindowTable {
    pub(crate) fn open(state: StateMemory) -> Result<WindowTable, StateError> {
        let table = EntryTable::open(state, Kind::Windows)?;
        let places = table.iter().map(|(place, [_, iova, ..])| (iova, place));
        let places: BTreeMap<u64, u32> = places.collect();
        if places.len() != table.iter().count() {
            return Err(StateError::Damaged("two windows begin at one address"));
        }
        let mut windows = WindowTable {
            table,
            places,
            users: BTreeMap::new(),
        };
        let all: Vec<KeptWindow> = windows.iter().collect();
        all.iter().for_each(|window| windows.count(window));
        Ok(windows)
    }

    fn count(&mut self, window: &KeptWindow) {
        if let Some(number) = window.memory.and_then(|memory| memory.number) {
            *self.users.entry(number).or_default() += 1;
        }
    }

    fn discount(&mut self, window: &KeptWindow) {
        if let Some(number) = window.memory.and_then(|memory| memory.number)
            && let Some(users) = self.users.get_mut(&number)
        {
            *users -= 1;
            if *users == 0 {
                self.users.remove(&number);
            }
        }
    }

    /// Returns whether any window lies in the memory file with this number.
    pub fn needs(&self, number: NonZeroU32) -> bool {
        self.users.contains_key(&number)
    }

    /// Returns all recorded windows, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = KeptWindow> {
        self.table
            .iter()
            .map(|(_, entry)| KeptWindow::decode(entry))
    }

    /// Adds a window. One that begins at the same address is removed first.
    ///
    /// # Errors
    /// [`StateError::Full`] when the table is full, [`StateError::Memory`] when no memory is left.
    pub fn add(&mut self, window: &KeptWindow) -> Result<(), StateError> {
        self.remove(window.iova);
        let place = self.table.add(window.encode(), "window")?;
        self.places.insert(window.iova, place);
        self.count(window);
        Ok(())
    }

    /// Removes the window that begins at the address `iova`, if there is one.
    pub fn remove(&mut self, iova: u64) {
        if let Some(place) = self.places.remove(&iova) {
            if let Some(entry) = self.table.get(place) {
                self.discount(&KeptWindow::decode(entry));
            }
            self.table.remove(place);
        }
    }

    /// Removes the windows that begin between the addresses `first` and `last`, inclusive.
    pub fn remove_range(&mut self, first: u64, last: u64) {
        if first > last {
            return;
        }
        let inside: Vec<u64> = self.places.range(first..=last).map(|(i, _)| *i).collect();
        for iova in inside {
            self.remove(iova);
        }
    }
}
