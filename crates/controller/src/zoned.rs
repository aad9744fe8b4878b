//! The zones of a namespace, and the table that stores them.
//!
//! All workers of a controller share the zones, and so do all controllers of a subsystem that
//! have the namespace. A lock is held while a command is checked, recorded and counted, never
//! while a volume or guest memory is waited for. Reads take it only if a zone has become offline.
//!
//! Zones belong to the namespace, not to a controller: changes by one controller apply to all at
//! once, and a controller that is added, reset or removed leaves the zones as they are. Only the
//! first controller, where none is running, finds no zone open.
//!
//! The table is memory of a file that other processes may map, too: a word is in the file when
//! the store is done, without a system call, and the next process finds it there after a crash at
//! any point. A loss of power is different: a host's request for durability (Flush, Force Unit
//! Access, a zone's change) waits for the table's file, too, which is opened as a volume for that
//! purpose.

use dma::{Row, Rows, SharedPages};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use sync::Unpoisoned;
use volume::Volume;
use zones::{Geometry, State, Zones, table};

/// Words of a row.
const WORDS: usize = table::HEADER / table::WORD;
const _: () = assert!(WORDS == 8 && table::HEADER == dma::ROW);

/// The zones of a namespace.
#[derive(Debug)]
pub struct ZonedState {
    geometry: Geometry,
    zones: Mutex<Zones>,
    table: Option<ZoneTable>,
    /// Number of writes in flight on each zone, of all workers. It grows only under the lock.
    writes: Box<[AtomicU32]>,
    /// A zone is offline, permanently.
    offline: AtomicBool,
    /// Number of engines that have the namespace. Changes under the lock of the zones.
    users: AtomicUsize,
}

/// Counts an engine as a user of the zones until this is dropped.
#[derive(Debug)]
pub(crate) struct ZonesInUse(Arc<ZonedState>);

impl ZonesInUse {
    pub fn new(zoned: &Arc<ZonedState>) -> Self {
        let zones = zoned.lock();
        zoned.users.fetch_add(1, Ordering::Relaxed);
        drop(zones);
        Self(zoned.clone())
    }
}

impl Drop for ZonesInUse {
    fn drop(&mut self) {
        let zones = self.0.lock();
        self.0.users.fetch_sub(1, Ordering::Relaxed);
        drop(zones);
    }
}

/// Storage by which the state of zones outlasts the process.
#[derive(Clone, Debug)]
pub struct ZoneTable {
    pages: SharedPages,
    rows: Rows,
    volume: Arc<dyn Volume>,
}

impl ZoneTable {
    /// Opens a table ([`table::encode`]) in these pages; flushes of `volume`, which is their
    /// file, make stores durable. Returns `None` when the pages are fewer than the zones need.
    pub fn new(pages: SharedPages, zones: u32, volume: Arc<dyn Volume>) -> Option<Self> {
        let rows = 1 + (zones as usize).div_ceil(WORDS);
        let rows = Rows::new(&pages, 0, rows)?;
        Some(Self {
            pages,
            rows,
            volume,
        })
    }

    /// Returns the file.
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    fn store(&self, number: u32, word: u64) {
        let at = number as usize;
        let row: Option<&Row> = self.rows.get(1 + at / WORDS);
        if let Some(place) = row.and_then(|row| row.get(at % WORDS)) {
            place.store(word.to_le(), Ordering::Release);
        }
    }

    /// Returns whether another process has truncated the file, so that stores are lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.pages.memory().is_poisoned()
    }
}

impl ZonedState {
    /// Creates the state from these zones, stored in that table, which contains them already.
    pub fn new(zones: Zones, table: Option<ZoneTable>) -> Self {
        let geometry = *zones.geometry();
        let all = 0..geometry.zones;
        let mut states = all.clone().filter_map(|number| zones.get(number));
        Self {
            geometry,
            offline: AtomicBool::new(states.any(|zone| zone.state == State::Offline)),
            writes: all.map(|_| AtomicU32::new(0)).collect(),
            zones: Mutex::new(zones),
            table,
            users: AtomicUsize::new(0),
        }
    }

    /// Returns the geometry of the zones.
    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Locks the zones. A change of them is stored by [`ZonedState::keep`] before a volume gets
    /// the command.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Zones> {
        self.zones.lock().unpoisoned()
    }

    /// Stores changed zones in the table.
    pub(crate) fn keep(&self, zones: &mut Zones) {
        let changed: Vec<u32> = zones.take_changed().collect();
        for number in changed {
            let Some(zone) = zones.get(number) else {
                continue;
            };
            if zone.state == State::Offline {
                self.offline.store(true, Ordering::Release);
            }
            if let Some(kept) = &self.table {
                kept.store(number, table::word(number, zone));
            }
        }
    }

    /// Returns whether there are zones that cannot be read.
    pub(crate) fn any_offline(&self) -> bool {
        self.offline.load(Ordering::Acquire)
    }

    /// Begins a write of the zone, which was checked under this lock.
    pub(crate) fn begin_write(&self, _: &mut Zones, zone: u32) {
        if let Some(writes) = self.writes.get(zone as usize) {
            writes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends a write of the zone, after its record was removed.
    pub(crate) fn end_write(&self, zone: u32) {
        if let Some(writes) = self.writes.get(zone as usize) {
            writes.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns whether writes of the zone are in flight. While it is being reset, no new ones
    /// begin, except those that a process starts with.
    pub(crate) fn is_written_to(&self, zone: u32) -> bool {
        let writes = self.writes.get(zone as usize);
        writes.is_some_and(|writes| writes.load(Ordering::Acquire) > 0)
    }

    /// Returns the table that stores the zones.
    pub(crate) fn table(&self) -> Option<&ZoneTable> {
        self.table.as_ref()
    }

    /// Begins use by a controller. Where no other controller uses the zones, none stays open.
    pub(crate) fn begin(&self) {
        let mut zones = self.lock();
        if self.users.load(Ordering::Relaxed) > 0 {
            return;
        }
        zones.power_lost();
        self.keep(&mut zones);
    }

    /// Cancels resets of zones. The table has no word of resets in progress.
    pub(crate) fn cancel_resets(&self, resets: impl Iterator<Item = u32>) {
        let mut zones = self.lock();
        resets.for_each(|zone| zones.cancel_reset(zone));
    }

    /// Empties all zones.
    pub(crate) fn empty(&self) {
        let mut zones = self.lock();
        for number in zones.resettable().unwrap_or_default() {
            zones.end_reset(number);
        }
        self.keep(&mut zones);
    }

    /// Returns the number of blocks of the namespace.
    pub(crate) fn blocks(&self) -> u64 {
        self.geometry.blocks()
    }
}
