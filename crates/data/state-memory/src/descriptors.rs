//! Table of the descriptors that a keeper holds for the disk, by number.

use crate::layout::Kind;
use crate::table::EntryTable;
use crate::{StateError, StateMemory};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

const VALID: u64 = 1;

/// Kind of a descriptor that the keeper holds. Newer versions may define more kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DescriptorKind(
    /// Number of the kind, as the table stores it.
    pub u8,
);

impl DescriptorKind {
    /// Socket of the connected client.
    pub const CLIENT: Self = Self(1);
    /// Memory file of guest memory.
    pub const MEMORY: Self = Self(2);
    /// Eventfd of an interrupt vector, or of the INTx pin.
    pub const EVENTFD: Self = Self(3);
    /// Memory file of the pages behind BAR0, with the doorbells.
    pub const PAGES: Self = Self(4);
    /// Write end of a pipe of the journal.
    pub const PIPE_WRITE: Self = Self(5);
    /// Read end of a pipe of the journal.
    pub const PIPE_READ: Self = Self(6);
    /// Connection to the receiver process.
    pub const RECEIVER: Self = Self(7);
    /// Listening socket of the disk.
    pub const LISTENER: Self = Self(8);
    /// Lock file beside a listening socket.
    pub const LOCK: Self = Self(9);
    /// Kick eventfd of a vhost-user front-end.
    pub const KICK: Self = Self(10);
    /// Inflight region of a vhost-user front-end.
    pub const INFLIGHT: Self = Self(11);
    /// Connection of a volume to its server, which is drained before it is used again.
    pub const CONNECTION: Self = Self(12);
    /// Memory file of a volume in memory.
    pub const VOLUME: Self = Self(13);
}

/// Entry of a descriptor that the keeper holds for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Number of the descriptor in this disk. Numbers are never reused.
    pub number: NonZeroU32,
    /// Kind of the descriptor.
    pub kind: DescriptorKind,
    /// Further information about the descriptor; its meaning depends on the kind.
    pub detail: u64,
}

/// Table of the descriptors that the keeper holds for a disk.
#[derive(Debug)]
pub struct DescriptorTable {
    table: EntryTable,
    places: BTreeMap<NonZeroU32, u32>,
}

impl DescriptorTable {
    pub(crate) fn open(state: StateMemory) -> Result<DescriptorTable, StateError> {
        let table = EntryTable::open(state, Kind::Descriptors)?;
        let numbers = table
            .iter()
            .map(|(place, entry)| Some((decode(entry)?.number, place)));
        let places: Option<BTreeMap<_, _>> = numbers.collect();
        let places = places.ok_or(StateError::Damaged("a descriptor has no number"))?;
        if places.len() != table.iter().count() {
            return Err(StateError::Damaged("two descriptors have one number"));
        }
        Ok(DescriptorTable { table, places })
    }

    /// Returns all descriptors, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = Descriptor> {
        self.table.iter().filter_map(|(_, entry)| decode(entry))
    }

    /// Assigns a number to a descriptor, and records it before the descriptor is passed to the
    /// keeper.
    ///
    /// # Errors
    /// [`StateError::Full`] when the table is full, [`StateError::Memory`] when no memory is left.
    pub fn add(&mut self, kind: DescriptorKind, detail: u64) -> Result<NonZeroU32, StateError> {
        let number = self.next_number()?;
        let first = VALID | u64::from(kind.0) << 8 | u64::from(number.get()) << 32;
        let place = self.table.add([first, detail, 0, 0], "descriptor")?;
        self.places.insert(number, place);
        Ok(number)
    }

    /// Returns a new number. The last number is stored before it is used, so that none is assigned
    /// twice.
    fn next_number(&mut self) -> Result<NonZeroU32, StateError> {
        let word = self.table.owners_word().ok_or(StateError::OutOfRange)?;
        let next = u32::try_from(word.load(Ordering::Acquire));
        let next = next.ok().and_then(|last| last.checked_add(1));
        let next = next.and_then(NonZeroU32::new);
        let number = next.ok_or(StateError::Full("descriptor's number"))?;
        word.store(number.get().into(), Ordering::Release);
        Ok(number)
    }

    /// Sets the further information about a descriptor, by a single store.
    pub fn set_detail(&mut self, number: NonZeroU32, detail: u64) {
        if let Some(place) = self.places.get(&number) {
            self.table.set_field(*place, detail);
        }
    }

    /// Removes the entry of a descriptor that the keeper no longer holds.
    pub fn remove(&mut self, number: NonZeroU32) {
        if let Some(place) = self.places.remove(&number) {
            self.table.remove(place);
        }
    }
}

fn decode([first, detail, ..]: [u64; 4]) -> Option<Descriptor> {
    Some(Descriptor {
        number: NonZeroU32::new((first >> 32) as u32)?,
        kind: DescriptorKind((first >> 8) as u8),
        detail,
    })
}
