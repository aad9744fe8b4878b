//! Zones of a namespace, and the table that stores them.
//!
//! All workers of a controller share the zones, and so do all controllers of a subsystem that have
//! the namespace. A lock is held while a command is checked, recorded and counted, but never during
//! a wait for a volume or guest memory. Reads take the lock only if any zone is offline.
//!
//! Zones belong to the namespace, not to a controller. Changes by one controller apply to all at
//! once, and adding, resetting or removing a controller leaves the zones as they are. Only when a
//! controller starts and no other one runs are open zones closed.
//!
//! The table is memory of a mapped file. A store to the mapping needs no system call, and the next
//! process finds it after a crash at any point. To survive a loss of power, the file has to be
//! flushed: it is also opened as a volume, and commands that require durability (Flush, Force Unit
//! Access, a change of zone state) wait for a flush of it.

use dma::{Row, Rows, SharedPages};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use sync::Unpoisoned;
use volume::Volume;
use zones::{Geometry, ZoneRefusal, ZoneState, Zones, table};

/// Number of 64-bit words in a row of the zone table file.
const WORDS: usize = table::HEADER / table::WORD;
const _: () = assert!(WORDS == 8 && table::HEADER == dma::ROW);

/// Zones of a namespace, shared by all workers and controllers that use the namespace.
#[derive(Debug)]
pub struct ZonedState {
    geometry: Geometry,
    zones: Mutex<Zones>,
    table: Option<ZoneTable>,
    /// Number of write commands outstanding on each zone, over all workers. Counters are increased
    /// only under the lock of the zones.
    writes: Box<[AtomicU32]>,
    /// Whether any zone is offline. A zone never leaves that state.
    offline: AtomicBool,
    /// Number of engines that have the namespace. Changes only under the lock of the zones.
    users: AtomicUsize,
}

/// Guard that counts an engine as a user of the zones until it is dropped.
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

/// Mapped file that stores the states of a namespace's zones, so that they outlast the process.
#[derive(Clone, Debug)]
pub struct ZoneTable {
    pages: SharedPages,
    rows: Rows,
    volume: Arc<dyn Volume>,
}

impl ZoneTable {
    /// Opens a table ([`table::encode`]) in these pages. Flushes of `volume`, the file that they
    /// are mapped from, make stores durable. Returns `None` when there are fewer pages than the
    /// zones need.
    pub fn new(pages: SharedPages, zones: u32, volume: Arc<dyn Volume>) -> Option<Self> {
        let rows = 1 + (zones as usize).div_ceil(WORDS);
        let rows = Rows::new(&pages, 0, rows)?;
        Some(Self {
            pages,
            rows,
            volume,
        })
    }

    /// Returns the table's file as a volume, to be flushed for durability.
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

    /// Returns whether another process has truncated the table's file, so that stores are lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.pages.memory().is_poisoned()
    }
}

impl ZonedState {
    /// Creates the state of these zones. `table`, if any, stores them and already contains them.
    pub fn new(zones: Zones, table: Option<ZoneTable>) -> Self {
        let geometry = *zones.geometry();
        let all = 0..geometry.zones;
        let mut states = all.clone().filter_map(|number| zones.get(number));
        Self {
            geometry,
            offline: AtomicBool::new(states.any(|zone| zone.state == ZoneState::Offline)),
            writes: all.map(|_| AtomicU32::new(0)).collect(),
            zones: Mutex::new(zones),
            table,
            users: AtomicUsize::new(0),
        }
    }

    /// Returns the geometry of the zones: number, size and capacity.
    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Locks the zones. The caller stores changes with [`ZonedState::keep`] before it passes the
    /// command to a volume.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Zones> {
        self.zones.lock().unpoisoned()
    }

    /// Stores the zones that have changed in the zone table file, if there is one.
    pub(crate) fn keep(&self, zones: &mut Zones) {
        let changed: Vec<u32> = zones.take_changed().collect();
        for number in changed {
            let Some(zone) = zones.get(number) else {
                continue;
            };
            if zone.state == ZoneState::Offline {
                self.offline.store(true, Ordering::Release);
            }
            if let Some(kept) = &self.table {
                kept.store(number, table::word(number, zone));
            }
        }
    }

    /// Returns whether any zone is offline, so that it cannot be read.
    pub(crate) fn any_offline(&self) -> bool {
        self.offline.load(Ordering::Acquire)
    }

    /// Counts a write command that begins on the zone. `_` proves that the lock under which the
    /// command was checked is still held.
    pub(crate) fn begin_write(&self, _: &mut Zones, zone: u32) {
        if let Some(writes) = self.writes.get(zone as usize) {
            writes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends the count of a write command on the zone, after the command's record was removed.
    pub(crate) fn end_write(&self, zone: u32) {
        if let Some(writes) = self.writes.get(zone as usize) {
            writes.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns whether write commands are outstanding on the zone. While the zone is being reset no
    /// new ones begin, except those that a process starts with.
    pub(crate) fn is_written_to(&self, zone: u32) -> bool {
        let writes = self.writes.get(zone as usize);
        writes.is_some_and(|writes| writes.load(Ordering::Acquire) > 0)
    }

    /// Returns the table that stores the zones, if there is one.
    pub(crate) fn table(&self) -> Option<&ZoneTable> {
        self.table.as_ref()
    }

    /// Prepares the zones for a controller that starts. If no engine uses the zones, open zones are
    /// closed as after a loss of power.
    pub(crate) fn begin(&self) {
        let mut zones = self.lock();
        if self.users.load(Ordering::Relaxed) > 0 {
            return;
        }
        zones.power_lost();
        self.keep(&mut zones);
    }

    /// Cancels resets of zones in progress. The table does not record such resets.
    pub(crate) fn cancel_resets(&self, resets: impl Iterator<Item = u32>) {
        let mut zones = self.lock();
        resets.for_each(|zone| zones.cancel_reset(zone));
    }

    /// Makes all zones empty after an erasure, except those that cannot be reset.
    ///
    /// # Errors
    /// [`ZoneRefusal::Resetting`] when a command is resetting one of them.
    pub(crate) fn empty(&self) -> Result<(), ZoneRefusal> {
        let mut zones = self.lock();
        for number in zones.resettable()? {
            zones.end_reset(number);
        }
        self.keep(&mut zones);
        Ok(())
    }

    /// Returns the number of blocks of the namespace.
    pub(crate) fn blocks(&self) -> u64 {
        self.geometry.blocks()
    }
}
