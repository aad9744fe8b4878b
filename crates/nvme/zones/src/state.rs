//! State of a namespace's zones, and all changes of it.

use crate::{Action, Filter, Geometry, GeometryError, ZoneRefusal, ZoneState, Zrwa};
use std::collections::VecDeque;

/// State and write position of one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// State of the zone, such as empty or open.
    pub state: ZoneState,
    /// Number of written blocks, counted from the first block of the zone up to the write pointer.
    /// For a full zone, the blocks written before it was finished. With a Zone Random Write Area,
    /// blocks after the write pointer may be written, too; in a full zone that had one, all blocks
    /// count as written.
    pub written: u64,
    /// Whether the zone has a Zone Random Write Area, which makes it active.
    pub zrwa: bool,
    /// Whether the zone is being reset, so that its data is being discarded.
    pub resetting: bool,
}

impl Zone {
    pub(crate) const EMPTY: Self = Self {
        state: ZoneState::Empty,
        written: 0,
        zrwa: false,
        resetting: false,
    };
}

/// Zone descriptor, as Zone Management Receive reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reported {
    /// State of the reported zone.
    pub state: ZoneState,
    /// LBA of the zone's first block.
    pub start: u64,
    /// Number of writable blocks of the zone.
    pub capacity: u64,
    /// Next block to be written; all ones when the write pointer is not valid in this state.
    pub write_pointer: u64,
    /// Whether the zone has a Zone Random Write Area.
    pub zrwa: bool,
}

/// States of all zones of a namespace, and the numbers of open and active ones.
#[derive(Clone, Debug)]
pub struct Zones {
    geometry: Geometry,
    zones: Vec<Zone>,
    open: u32,
    active: u32,
    /// Number of zones that have a Zone Random Write Area at present.
    zrwas: u32,
    /// Implicitly open zones, in the order in which they are closed to make room for another zone.
    implicit: VecDeque<u32>,
    /// Numbers of the zones that have changed since the last [`Zones::take_changed`].
    changed: Vec<u32>,
}

impl Zones {
    /// Creates a namespace with empty zones.
    ///
    /// # Errors
    /// [`GeometryError`] when a size or limit is invalid.
    pub fn new(geometry: Geometry) -> Result<Self, GeometryError> {
        geometry.check()?;
        let zones = vec![Zone::EMPTY; geometry.zones as usize];
        Ok(Self {
            geometry,
            zones,
            open: 0,
            active: 0,
            zrwas: 0,
            implicit: VecDeque::new(),
            changed: Vec::new(),
        })
    }

    /// Restores the states of zones from saved ones, one for each zone of the geometry.
    pub(crate) fn of(geometry: Geometry, zones: Vec<Zone>) -> Self {
        let count = |is: fn(ZoneState) -> bool| zones.iter().filter(|z| is(z.state)).count() as u32;
        let implicit = (0..).zip(&zones);
        let implicit = implicit.filter(|(_, zone)| zone.state == ZoneState::ImplicitlyOpen);
        Self {
            geometry,
            open: count(ZoneState::is_open),
            active: count(ZoneState::is_active),
            zrwas: zones.iter().filter(|zone| zone.zrwa).count() as u32,
            implicit: implicit.map(|(zone, _)| zone).collect(),
            changed: Vec::new(),
            zones,
        }
    }

    /// Returns the geometry of the zones.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the state and write position of the zone with this number.
    pub fn get(&self, zone: u32) -> Option<Zone> {
        self.zones.get(zone as usize).copied()
    }

    /// Returns the number of open zones, implicitly or explicitly opened.
    pub fn open(&self) -> u32 {
        self.open
    }

    /// Returns the number of active zones, which are open or closed.
    pub fn active(&self) -> u32 {
        self.active
    }

    /// Returns the number of zones with a Zone Random Write Area.
    pub fn zrwas(&self) -> u32 {
        self.zrwas
    }

    /// Returns the zones that have changed since the last call, each of them once.
    pub fn take_changed(&mut self) -> impl Iterator<Item = u32> + '_ {
        self.changed.sort_unstable();
        self.changed.dedup();
        self.changed.drain(..)
    }

    /// Closes all open zones, because a power cut or a restart loses the open states. Zones without
    /// written blocks become empty. A Zone Random Write Area remains, because its content is on the
    /// volume.
    pub fn power_lost(&mut self) {
        for number in 0..self.geometry.zones {
            let Some(zone) = self.get(number) else {
                return;
            };
            if zone.resetting {
                self.cancel_reset(number);
            }
            match zone.state {
                _ if zone.state.is_active() && zone.written == 0 && !zone.zrwa => {
                    self.change(number, ZoneState::Empty, 0);
                }
                state if state.is_open() => self.change(number, ZoneState::Closed, zone.written),
                _ => {}
            }
        }
    }

    /// Makes a zone read-only or offline, as worn-out media do; for tests, too.
    pub fn set_worn(&mut self, number: u32, offline: bool) {
        if let Some(zone) = self.get(number) {
            let state = if offline {
                ZoneState::Offline
            } else {
                ZoneState::ReadOnly
            };
            self.change(number, state, zone.written);
        }
    }

    // ---- reads and writes

    /// Checks that blocks can be read. They may lie in several zones, and after write pointers.
    ///
    /// # Errors
    /// [`ZoneRefusal::OutOfRange`] outside the namespace, [`ZoneRefusal::Offline`] in an offline
    /// zone.
    pub fn check_read(&self, lba: u64, blocks: u64) -> Result<(), ZoneRefusal> {
        let last = lba.checked_add(blocks.max(1) - 1);
        let last = last.and_then(|last| self.geometry.zone_of(last));
        let (Some(first), Some(last)) = (self.geometry.zone_of(lba), last) else {
            return Err(ZoneRefusal::OutOfRange);
        };
        let zones = self.zones.get(first as usize..=last as usize);
        let mut zones = zones.unwrap_or_default().iter();
        if zones.any(|zone| zone.state == ZoneState::Offline) {
            Err(ZoneRefusal::Offline)
        } else {
            Ok(())
        }
    }

    /// Checks that the zone accepts a write of these blocks in its current state.
    ///
    /// # Errors
    /// [`ZoneRefusal`] with the status that the write command has to fail with.
    pub fn check_write(&self, lba: u64, blocks: u64) -> Result<(), ZoneRefusal> {
        let (number, zone) = self.writable(lba)?;
        let offset = lba - self.geometry.start_of(number);
        if let Some(zrwa) = self.zrwa_of(&zone) {
            return self.check_random(zone, zrwa, offset, blocks);
        }
        if offset != zone.written {
            return Err(ZoneRefusal::InvalidWrite);
        }
        self.check_room(zone, blocks)
    }

    /// Checks that a zone with a Zone Random Write Area accepts a write. The write must begin at or
    /// after the write pointer, and end within twice the area's size, as far as an implicit flush
    /// can make room ("NVMe Zoned Namespace Command Set 1.1", Zone Random Write Area).
    fn check_random(
        &self,
        zone: Zone,
        zrwa: Zrwa,
        offset: u64,
        blocks: u64,
    ) -> Result<(), ZoneRefusal> {
        let end = offset.saturating_add(blocks.max(1));
        if offset < zone.written || end > zone.written + 2 * u64::from(zrwa.size) {
            return Err(ZoneRefusal::InvalidWrite);
        }
        if end > self.geometry.capacity {
            return Err(ZoneRefusal::Boundary);
        }
        self.check_limits(zone.state)
    }

    /// Returns the parameters of the zone's Zone Random Write Area, if it has one.
    fn zrwa_of(&self, zone: &Zone) -> Option<Zrwa> {
        self.geometry.zrwa.filter(|_| zone.zrwa)
    }

    /// Returns the block at which an append of `blocks` blocks to the zone beginning at `start` has
    /// to be written.
    ///
    /// # Errors
    /// [`ZoneRefusal`] when the zone does not accept the append.
    pub fn check_append(&self, start: u64, blocks: u64) -> Result<u64, ZoneRefusal> {
        let number = self.zone_at(start)?;
        let (_, zone) = self.writable(start)?;
        if zone.zrwa {
            return Err(ZoneRefusal::InvalidOperation);
        }
        self.check_room(zone, blocks)?;
        Ok(self.geometry.start_of(number) + zone.written)
    }

    /// Records a checked write. Moves the write pointer to the end of the write; with a Zone Random
    /// Write Area, only as far as the area has to move.
    ///
    /// # Errors
    /// The conditions of [`Zones::check_write`]; nothing has changed then.
    pub fn write(&mut self, lba: u64, blocks: u64) -> Result<(), ZoneRefusal> {
        self.check_write(lba, blocks)?;
        let Some(number) = self.geometry.zone_of(lba) else {
            return Err(ZoneRefusal::OutOfRange);
        };
        let Some(zone) = self.get(number) else {
            return Err(ZoneRefusal::OutOfRange);
        };
        let Some(zrwa) = self.zrwa_of(&zone) else {
            self.advance(number, zone, zone.written + blocks);
            return Ok(());
        };
        let end = lba - self.geometry.start_of(number) + blocks;
        let beyond = end.saturating_sub(zone.written + u64::from(zrwa.size));
        // The implicit flush. The pointer stays before the write's end, so that no zone gets full.
        let flushed = beyond.next_multiple_of(u64::from(zrwa.granularity).max(1));
        if flushed > 0 || !zone.state.is_open() {
            self.advance(number, zone, zone.written + flushed);
        }
        Ok(())
    }

    /// Advances the write pointer of a zone, which becomes open or full.
    fn advance(&mut self, number: u32, zone: Zone, written: u64) {
        if written == self.geometry.capacity {
            return self.change(number, ZoneState::Full, written);
        }
        if !zone.state.is_open() {
            self.make_room();
        }
        let state = match zone.state {
            ZoneState::ExplicitlyOpen => ZoneState::ExplicitlyOpen,
            _ => ZoneState::ImplicitlyOpen,
        };
        self.change(number, state, written);
    }

    /// Returns whether a write that was checked before may already have been recorded, so that it
    /// needs nothing more of its zone. For a repeated command after a restart: either the write
    /// pointer is at or behind its end, or a Zone Random Write Area covers its end.
    pub fn is_taken(&self, lba: u64, blocks: u64) -> bool {
        let number = self.geometry.zone_of(lba);
        let zone = number.and_then(|number| Some((number, self.get(number)?)));
        zone.is_some_and(|(number, zone)| {
            let end = (lba - self.geometry.start_of(number)).saturating_add(blocks);
            match (zone.state, self.zrwa_of(&zone)) {
                (ZoneState::Full, _) => end <= self.geometry.capacity,
                (_, Some(zrwa)) => end <= zone.written + u64::from(zrwa.size),
                _ => end <= zone.written,
            }
        })
    }

    /// Returns the zone that contains a block if the zone accepts writes, otherwise the reason.
    fn writable(&self, lba: u64) -> Result<(u32, Zone), ZoneRefusal> {
        let number = self.geometry.zone_of(lba).ok_or(ZoneRefusal::OutOfRange)?;
        let zone = self.get(number).ok_or(ZoneRefusal::OutOfRange)?;
        match zone.state {
            _ if zone.resetting => Err(ZoneRefusal::Resetting),
            ZoneState::Full => Err(ZoneRefusal::Full),
            ZoneState::ReadOnly => Err(ZoneRefusal::ReadOnly),
            ZoneState::Offline => Err(ZoneRefusal::Offline),
            _ => Ok((number, zone)),
        }
    }

    /// Checks that `blocks` more blocks fit into the zone, and that it may be open.
    fn check_room(&self, zone: Zone, blocks: u64) -> Result<(), ZoneRefusal> {
        let end = zone.written.checked_add(blocks.max(1));
        if end.is_none_or(|end| end > self.geometry.capacity) {
            return Err(ZoneRefusal::Boundary);
        }
        self.check_limits(zone.state)
    }

    /// Checks that a zone in this state may become open under the limits.
    fn check_limits(&self, state: ZoneState) -> Result<(), ZoneRefusal> {
        let is_below = |count: u32, limit: Option<u32>| limit.is_none_or(|limit| count < limit);
        if !state.is_active() && !is_below(self.active, self.geometry.max_active) {
            return Err(ZoneRefusal::TooManyActive);
        }
        // An implicitly open zone gives way.
        let room = is_below(self.open, self.geometry.max_open) || !self.implicit.is_empty();
        if !state.is_open() && !room {
            return Err(ZoneRefusal::TooManyOpen);
        }
        Ok(())
    }

    /// Closes the zone that has been implicitly open for longest, if the limit requires it.
    fn make_room(&mut self) {
        if self
            .geometry
            .max_open
            .is_some_and(|limit| self.open >= limit)
            && let Some(oldest) = self.implicit.front().copied()
            && let Some(zone) = self.get(oldest)
        {
            self.change(oldest, ZoneState::Closed, zone.written);
        }
    }

    // ---- actions

    /// Returns the zone that begins with this block.
    ///
    /// # Errors
    /// [`ZoneRefusal::OutOfRange`] outside the namespace, [`ZoneRefusal::NotAtStart`] when no zone
    /// begins at this block.
    pub fn zone_at(&self, start: u64) -> Result<u32, ZoneRefusal> {
        let number = self
            .geometry
            .zone_of(start)
            .ok_or(ZoneRefusal::OutOfRange)?;
        if self.geometry.start_of(number) == start {
            Ok(number)
        } else {
            Err(ZoneRefusal::NotAtStart)
        }
    }

    /// Applies an action to a zone.
    ///
    /// # Errors
    /// [`ZoneRefusal`] when the zone's state or a limit does not allow the action; nothing has
    /// changed then.
    pub fn act(&mut self, number: u32, action: Action) -> Result<(), ZoneRefusal> {
        use ZoneState as S;
        let zone = self.get(number).ok_or(ZoneRefusal::OutOfRange)?;
        if zone.resetting {
            return Err(ZoneRefusal::Resetting);
        }
        let state = match (action, zone.state) {
            (Action::Close, S::ImplicitlyOpen | S::ExplicitlyOpen | S::Closed) => S::Closed,
            (Action::Finish, state) if state.has_write_pointer() || state == S::Full => S::Full,
            (Action::Open, state) if state.has_write_pointer() => {
                self.check_limits(state)?;
                if !state.is_open() {
                    self.make_room();
                }
                S::ExplicitlyOpen
            }
            (Action::Offline, S::ReadOnly | S::Offline) => S::Offline,
            _ => return Err(ZoneRefusal::InvalidTransition),
        };
        // Which blocks of its Zone Random Write Area were written is not recorded.
        let written = if zone.zrwa && state == S::Full {
            self.geometry.capacity
        } else {
            zone.written
        };
        self.change(number, state, written);
        Ok(())
    }

    /// Checks that a zone can be opened with a Zone Random Write Area now.
    ///
    /// # Errors
    /// [`ZoneRefusal`] when the zone's state or a limit does not allow it.
    pub fn check_open_with_zrwa(&self, number: u32) -> Result<(), ZoneRefusal> {
        let zone = self.get(number).ok_or(ZoneRefusal::OutOfRange)?;
        match zone.state {
            _ if zone.resetting => return Err(ZoneRefusal::Resetting),
            ZoneState::Empty => {}
            state if state.is_active() => return Err(ZoneRefusal::InvalidOperation),
            _ => return Err(ZoneRefusal::InvalidTransition),
        }
        let resources = self.geometry.zrwa_resources();
        let resources = resources.ok_or(ZoneRefusal::InvalidOperation)?;
        self.check_limits(zone.state)?;
        if self.zrwas < resources {
            Ok(())
        } else {
            Err(ZoneRefusal::ZrwaResources)
        }
    }

    /// Opens an empty zone with a Zone Random Write Area (Open Zone with ZRWAA).
    ///
    /// # Errors
    /// The conditions of [`Zones::check_open_with_zrwa`]; nothing has changed then.
    pub fn open_with_zrwa(&mut self, number: u32) -> Result<(), ZoneRefusal> {
        self.check_open_with_zrwa(number)?;
        self.make_room();
        self.change(number, ZoneState::ExplicitlyOpen, 0);
        if let Some(zone) = self.zones.get_mut(number as usize) {
            zone.zrwa = true;
            self.zrwas += 1;
        }
        Ok(())
    }

    /// Checks that a zone's Zone Random Write Area can be flushed up to this block. The flushed
    /// blocks must be within the area and a multiple of the granularity.
    ///
    /// # Errors
    /// [`ZoneRefusal`] when the zone or the block does not allow the flush.
    pub fn check_flush(&self, lba: u64) -> Result<(), ZoneRefusal> {
        let number = self.geometry.zone_of(lba).ok_or(ZoneRefusal::OutOfRange)?;
        let zone = self.get(number).ok_or(ZoneRefusal::OutOfRange)?;
        if zone.resetting {
            return Err(ZoneRefusal::Resetting);
        }
        let zrwa = self.zrwa_of(&zone).ok_or(ZoneRefusal::InvalidOperation)?;
        let end = lba - self.geometry.start_of(number) + 1;
        let reach = zone.written + u64::from(zrwa.size);
        if end <= zone.written || end > reach.min(self.geometry.capacity) {
            return Err(ZoneRefusal::InvalidOperation);
        }
        if !(end - zone.written).is_multiple_of(u64::from(zrwa.granularity)) {
            return Err(ZoneRefusal::Granularity);
        }
        self.check_limits(zone.state)
    }

    /// Moves the write pointer behind this block (Flush Explicit ZRWA Range). A closed zone becomes
    /// open, as after a write.
    ///
    /// # Errors
    /// The conditions of [`Zones::check_flush`]; nothing has changed then.
    pub fn flush(&mut self, lba: u64) -> Result<(), ZoneRefusal> {
        self.check_flush(lba)?;
        let number = self.geometry.zone_of(lba).ok_or(ZoneRefusal::OutOfRange)?;
        let zone = self.get(number).ok_or(ZoneRefusal::OutOfRange)?;
        let end = lba - self.geometry.start_of(number) + 1;
        self.advance(number, zone, end);
        Ok(())
    }

    /// Applies an action to all zones in the states that Select All covers: closes the open zones,
    /// finishes the active ones, opens the closed ones, or takes the read-only ones offline.
    ///
    /// # Errors
    /// [`ZoneRefusal`] when a zone or a limit does not allow the action; nothing has changed then.
    pub fn act_on_all(&mut self, action: Action) -> Result<(), ZoneRefusal> {
        let selects = |state: ZoneState| match action {
            Action::Close => state.is_open(),
            Action::Finish => state.is_active(),
            Action::Open => state == ZoneState::Closed,
            Action::Offline => state == ZoneState::ReadOnly,
        };
        let selected = |zone: &Zone| selects(zone.state);
        if self.zones.iter().any(|z| selected(z) && z.resetting) {
            return Err(ZoneRefusal::Resetting);
        }
        if action == Action::Open {
            // Implicitly open zones give way, one after the other.
            let closed = self.zones.iter().filter(|zone| selected(zone)).count() as u64;
            let explicit = u64::from(self.open) - self.implicit.len() as u64;
            let limit = self.geometry.max_open.map_or(u64::MAX, u64::from);
            if closed > 0 && explicit + closed > limit {
                return Err(ZoneRefusal::TooManyOpen);
            }
        }
        let zones = (0..).zip(&self.zones).filter(|(_, zone)| selected(zone));
        let zones: Vec<u32> = zones.map(|(number, _)| number).collect();
        for number in zones {
            self.act(number, action)?;
        }
        Ok(())
    }

    /// Begins the reset of a zone, which excludes all other changes of the zone until
    /// [`Zones::end_reset`] or [`Zones::cancel_reset`]. Returns the first block and the number of
    /// blocks that may hold data; the number may be 0.
    ///
    /// # Errors
    /// [`ZoneRefusal`] when the zone's state does not allow a reset; nothing has changed then.
    pub fn begin_reset(&mut self, number: u32) -> Result<(u64, u64), ZoneRefusal> {
        let (start, capacity) = (self.geometry.start_of(number), self.geometry.capacity);
        let zone = self.zones.get_mut(number as usize);
        let zone = zone.ok_or(ZoneRefusal::OutOfRange)?;
        if zone.resetting {
            return Err(ZoneRefusal::Resetting);
        }
        if matches!(zone.state, ZoneState::ReadOnly | ZoneState::Offline) {
            return Err(ZoneRefusal::InvalidTransition);
        }
        zone.resetting = true;
        // Which blocks of its Zone Random Write Area were written is not recorded, nor how large it
        // was in another process.
        let written = if zone.zrwa { capacity } else { zone.written };
        Ok((start, written.min(capacity)))
    }

    /// Returns the zones affected by a reset of all zones: those that are active or full.
    ///
    /// # Errors
    /// [`ZoneRefusal::Resetting`] when one of them is being reset.
    pub fn resettable(&self) -> Result<Vec<u32>, ZoneRefusal> {
        let is = |zone: &Zone| zone.state.is_active() || zone.state == ZoneState::Full;
        if self.zones.iter().any(|zone| is(zone) && zone.resetting) {
            return Err(ZoneRefusal::Resetting);
        }
        let zones = (0..).zip(&self.zones).filter(|(_, zone)| is(zone));
        Ok(zones.map(|(number, _)| number).collect())
    }

    /// Makes a zone empty, after its data was discarded.
    pub fn end_reset(&mut self, number: u32) {
        self.cancel_reset(number);
        self.change(number, ZoneState::Empty, 0);
    }

    /// Cancels the reset of a zone, which keeps the state that it had.
    pub fn cancel_reset(&mut self, number: u32) {
        if let Some(zone) = self.zones.get_mut(number as usize) {
            zone.resetting = false;
        }
    }

    /// Sets the state of a zone and its number of written blocks, and updates the counts.
    fn change(&mut self, number: u32, state: ZoneState, written: u64) {
        let Some(zone) = self.zones.get_mut(number as usize) else {
            return;
        };
        let before = zone.state;
        (zone.state, zone.written) = (state, written);
        if zone.zrwa && !state.is_active() {
            zone.zrwa = false;
            self.zrwas -= 1;
        }
        self.open = self.open + u32::from(state.is_open()) - u32::from(before.is_open());
        self.active = self.active + u32::from(state.is_active()) - u32::from(before.is_active());
        let implicit = |state| state == ZoneState::ImplicitlyOpen;
        match (implicit(before), implicit(state)) {
            (false, true) => self.implicit.push_back(number),
            (true, false) => self.implicit.retain(|zone| *zone != number),
            _ => {}
        }
        if self.changed.last() != Some(&number) {
            self.changed.push(number);
        }
    }

    // ---- reports

    /// Returns the zones that match a filter, beginning with the zone of block `lba`.
    pub fn report(&self, lba: u64, filter: Filter) -> impl Iterator<Item = Reported> + '_ {
        let first = self.geometry.zone_of(lba).unwrap_or(self.geometry.zones);
        let zones = (first..).zip(self.zones.iter().skip(first as usize));
        let zones = zones.filter(move |(_, zone)| filter.takes(zone.state));
        zones.map(|(number, zone)| {
            let start = self.geometry.start_of(number);
            Reported {
                state: zone.state,
                start,
                capacity: self.geometry.capacity,
                zrwa: zone.zrwa,
                write_pointer: if zone.state.has_write_pointer() {
                    start + zone.written
                } else {
                    u64::MAX
                },
            }
        })
    }
}
