//! State of a namespace's placement, and all changes of it.

use crate::table::{COUNTERS, HANDLES, Row, WordStore};
use crate::{Event, EventSet, Geometry, GeometryError};
use nvme::log::{FDP_EVENTS, FdpEventType};
use std::sync::atomic::{AtomicU64, Ordering};

/// Index of a word in the row of counters ([`COUNTERS`]): Host Bytes with Metadata Written. The
/// next indices follow.
const HOST_BYTES: usize = 0;
const MEDIA_BYTES: usize = 1;
const FLAGS: usize = 2;
const EVENTS: usize = 3;
/// Bit of [`FLAGS`] that is set while the host has disabled the Data Placement directive.
const DISABLED: u64 = 1;

/// Index of a word in the row of a placement handle: blocks left in its reclaim unit. The next
/// indices follow.
const LEFT: usize = 0;
const BYTES: usize = 1;
const UNITS: usize = 2;
const ENABLED: usize = 3;

/// Index of a word in the row of an event: the event's number. The next indices follow.
const NUMBER: usize = 0;
const AT: usize = 1;
const WHERE: usize = 2;
const WHAT: usize = 3;

/// Origin of written blocks, which decides the counters that count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// Host: the data is sent with the command, or the blocks are zeroed.
    Host,
    /// The controller has written data that was in the namespace already (Copy).
    Controller,
}

/// Placement handle that a write uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Number of the placement handle.
    pub handle: u16,
    /// Placement Identifier of the command if it names no handle, so that a default is used.
    pub invalid: Option<u16>,
}

/// Flexible Data Placement state of a namespace, stored in words of type `W`.
#[derive(Debug)]
pub struct Placement<W> {
    geometry: Geometry,
    words: W,
}

fn word(row: &Row, at: usize) -> &AtomicU64 {
    let [first, ..] = row;
    row.get(at).unwrap_or(first)
}

fn add(word: Option<&AtomicU64>, more: u64) {
    let next = |value: u64| Some(value.saturating_add(more));
    if let Some(word) = word {
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }
}

fn load(word: Option<&AtomicU64>) -> u64 {
    word.map_or(0, |word| word.load(Ordering::Relaxed))
}

impl<W: WordStore> Placement<W> {
    /// Creates the placement on a table that [`table::check`](crate::table::check) has accepted.
    ///
    /// # Errors
    /// [`GeometryError`] when the geometry is invalid.
    pub fn new(geometry: Geometry, words: W) -> Result<Self, GeometryError> {
        geometry.check()?;
        Ok(Self { geometry, words })
    }

    /// Returns the number of placement handles and the size of reclaim units.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the storage of the state's words.
    pub fn words(&self) -> &W {
        &self.words
    }

    fn word(&self, row: usize, at: usize) -> Option<&AtomicU64> {
        Some(word(self.words.row(row)?, at))
    }

    fn counter(&self, at: usize) -> Option<&AtomicU64> {
        self.word(COUNTERS, at)
    }

    fn of_handle(&self, handle: u16, at: usize) -> Option<&AtomicU64> {
        let there = handle < self.geometry.handles;
        there.then(|| self.word(HANDLES + usize::from(handle), at))?
    }

    fn value(&self, handle: u16, at: usize) -> u64 {
        load(self.of_handle(handle, at))
    }

    /// Returns the remaining blocks of a unit, clamping the stored word to the valid range.
    fn rest(&self, word: u64) -> u64 {
        word.clamp(1, self.geometry.unit)
    }

    // ---- writes

    /// Returns the handle for a write with or without a Placement Identifier. An invalid identifier
    /// selects the default handle ("NVMe Base 2.1", 8.1.10).
    pub fn choose(&self, identifier: Option<u16>) -> Chosen {
        let handle = identifier.map(|id| self.geometry.handle_of(id));
        match handle {
            Some(Some(handle)) => Chosen {
                handle,
                invalid: None,
            },
            Some(None) => Chosen {
                handle: 0,
                invalid: identifier,
            },
            None => Chosen {
                handle: 0,
                invalid: None,
            },
        }
    }

    /// Records a write of `blocks` blocks by a handle, which reduces the remaining blocks of its
    /// unit. At the end of a unit the handle continues with the next one, as often as necessary.
    pub fn write(&self, handle: u16, blocks: u64, writer: Writer) {
        let unit = self.geometry.unit;
        let Some(left) = self.of_handle(handle, LEFT) else {
            return;
        };
        let after = |left: u64| {
            let left = self.rest(left);
            Some(match blocks.checked_sub(left) {
                None => left - blocks,
                Some(over) => unit - over % unit,
            })
        };
        let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        let before = self.rest(before.unwrap_or(unit));
        let begun = blocks.checked_sub(before).map_or(0, |over| 1 + over / unit);
        let bytes = blocks.saturating_mul(self.geometry.block.into());
        add(self.of_handle(handle, BYTES), bytes);
        add(self.of_handle(handle, UNITS), begun);
        add(self.counter(MEDIA_BYTES), bytes);
        if writer == Writer::Host {
            add(self.counter(HOST_BYTES), bytes);
        }
    }

    /// Begins a new unit at the host's request. Returns the remaining blocks of a partly written
    /// unit; `None` when the unit was not written, and is kept.
    pub fn renew(&self, handle: u16) -> Option<u64> {
        let unit = self.geometry.unit;
        let left = self.of_handle(handle, LEFT)?.swap(unit, Ordering::Relaxed);
        let left = self.rest(left);
        if left == unit {
            return None;
        }
        add(self.of_handle(handle, UNITS), 1);
        Some(left)
    }

    /// Returns the number of blocks that can still be written to the handle's unit (RUAMW), from 1
    /// to the unit size.
    pub fn left(&self, handle: u16) -> u64 {
        self.rest(self.value(handle, LEFT))
    }

    /// Returns the number of bytes that were written through the handle.
    pub fn bytes(&self, handle: u16) -> u64 {
        self.value(handle, BYTES)
    }

    /// Returns the number of reclaim units that the handle has filled or left.
    pub fn units(&self, handle: u16) -> u64 {
        self.value(handle, UNITS)
    }

    /// Returns the statistic Host Bytes with Metadata Written (HBMW).
    pub fn host_bytes(&self) -> u64 {
        load(self.counter(HOST_BYTES))
    }

    /// Returns the statistic Media Bytes with Metadata Written (MBMW).
    pub fn media_bytes(&self) -> u64 {
        load(self.counter(MEDIA_BYTES))
    }

    // ---- the directive

    /// Returns whether the Data Placement directive is enabled, so that writes may carry Placement
    /// Identifiers.
    pub fn is_enabled(&self) -> bool {
        load(self.counter(FLAGS)) & DISABLED == 0
    }

    /// Enables or disables the Data Placement directive for the namespace.
    pub fn enable(&self, on: bool) {
        let Some(flags) = self.counter(FLAGS) else {
            return;
        };
        if on {
            flags.fetch_and(!DISABLED, Ordering::Relaxed)
        } else {
            flags.fetch_or(DISABLED, Ordering::Relaxed)
        };
    }

    // ---- events

    /// Returns the event types that the handle records.
    pub fn recorded(&self, handle: u16) -> EventSet {
        EventSet(self.value(handle, ENABLED))
    }

    /// Enables or disables the recording of event types for the handle.
    pub fn record_events(&self, handle: u16, events: EventSet, on: bool) {
        let Some(word) = self.of_handle(handle, ENABLED) else {
            return;
        };
        if on {
            word.fetch_or(events.0, Ordering::Relaxed)
        } else {
            word.fetch_and(!events.0, Ordering::Relaxed)
        };
    }

    fn event_row(&self, number: u64) -> Option<&Row> {
        let place = (number % FDP_EVENTS as u64) as usize;
        let first = HANDLES + usize::from(self.geometry.handles);
        self.words.row(first + place)
    }

    /// Records an event, which replaces the oldest one when there is no room.
    pub fn record(&self, event: &Event) {
        let Some(count) = self.counter(EVENTS) else {
            return;
        };
        let number = count.fetch_add(1, Ordering::Relaxed);
        let Some(row) = self.event_row(number) else {
            return;
        };
        let place = u64::from(event.nsid) << 32 | u64::from(event.handle);
        let what = u64::from(event.identifier) << 8 | u64::from(event.ty.0);
        // An event is valid only while its number is stored: readers skip one that is being
        // written.
        word(row, NUMBER).store(0, Ordering::Release);
        word(row, AT).store(event.at, Ordering::Release);
        word(row, WHERE).store(place, Ordering::Release);
        word(row, WHAT).store(what, Ordering::Release);
        word(row, NUMBER).store(number.wrapping_add(1), Ordering::Release);
    }

    /// Returns the recorded FDP events, oldest first.
    pub fn events(&self) -> Vec<Event> {
        let end = load(self.counter(EVENTS));
        let first = end.saturating_sub(FDP_EVENTS as u64);
        (first..end)
            .filter_map(|number| self.event(number))
            .collect()
    }

    fn event(&self, number: u64) -> Option<Event> {
        let row = self.event_row(number)?;
        let load = |at| word(row, at).load(Ordering::Acquire);
        let whole = || load(NUMBER) == number.wrapping_add(1);
        if !whole() {
            return None;
        }
        let (at, place, what) = (load(AT), load(WHERE), load(WHAT));
        whole().then_some(Event {
            ty: FdpEventType(what as u8),
            identifier: (what >> 8) as u16,
            handle: place as u16,
            nsid: (place >> 32) as u32,
            at,
        })
    }
}
