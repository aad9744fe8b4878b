//! The state of a namespace's zones, and every change of it.

use crate::{Action, Filter, Geometry, GeometryError, Refusal, State, Zrwa};
use std::collections::VecDeque;

/// State of one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Zone state.
    pub state: State,
    /// Blocks before its write pointer, from its first one on. Of a full zone, those that were
    /// written before it was finished.
    /// The blocks behind it may be written, too, where the zone has a Zone Random Write Area; of a
    /// full zone that had one all count.
    pub written: u64,
    /// The zone has a Zone Random Write Area, and is therefore active.
    pub zrwa: bool,
    /// The zone is being reset: its data is being discarded.
    pub resetting: bool,
}

impl Zone {
    pub(crate) const EMPTY: Self = Self {
        state: State::Empty,
        written: 0,
        zrwa: false,
        resetting: false,
    };
}

/// Zone descriptor for a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reported {
    /// Zone state.
    pub state: State,
    /// First block of the zone.
    pub start: u64,
    /// Blocks of it that can be written.
    pub capacity: u64,
    /// The block that is written next; all bits are ones where a write pointer means nothing.
    pub write_pointer: u64,
    /// The zone has a Zone Random Write Area.
    pub zrwa: bool,
}

/// All zones of a namespace.
#[derive(Clone, Debug)]
pub struct Zones {
    geometry: Geometry,
    zones: Vec<Zone>,
    open: u32,
    active: u32,
    /// Number of zones that have a Zone Random Write Area.
    zrwas: u32,
    /// Implicitly open zones; the first one is the next to be closed for another zone.
    implicit: VecDeque<u32>,
    /// Zones that have changed since [`Zones::take_changed`].
    changed: Vec<u32>,
}

impl Zones {
    /// Creates empty zones.
    ///
    /// # Errors
    /// [`GeometryError`], if a size or limit is invalid.
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

    /// Restores zones from their saved states; `zones` has as many as the geometry.
    pub(crate) fn of(geometry: Geometry, zones: Vec<Zone>) -> Self {
        let count = |is: fn(State) -> bool| zones.iter().filter(|z| is(z.state)).count() as u32;
        let implicit = (0..).zip(&zones);
        let implicit = implicit.filter(|(_, zone)| zone.state == State::ImplicitlyOpen);
        Self {
            geometry,
            open: count(State::is_open),
            active: count(State::is_active),
            zrwas: zones.iter().filter(|zone| zone.zrwa).count() as u32,
            implicit: implicit.map(|(zone, _)| zone).collect(),
            changed: Vec::new(),
            zones,
        }
    }

    /// Returns the geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns a zone, by its number.
    pub fn get(&self, zone: u32) -> Option<Zone> {
        self.zones.get(zone as usize).copied()
    }

    /// Returns the number of open zones.
    pub fn open(&self) -> u32 {
        self.open
    }

    /// Returns the number of open or closed zones.
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

    /// Closes all open zones, as after a loss of power or a restart, which loses the open states.
    /// Zones that were not written become empty. A Zone Random Write Area remains, because its
    /// content is on the volume.
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
                    self.change(number, State::Empty, 0);
                }
                state if state.is_open() => self.change(number, State::Closed, zone.written),
                _ => {}
            }
        }
    }

    /// Makes the zone read-only or offline: for devices that wear out, and for tests.
    pub fn set_worn(&mut self, number: u32, offline: bool) {
        if let Some(zone) = self.get(number) {
            let state = match offline {
                true => State::Offline,
                false => State::ReadOnly,
            };
            self.change(number, state, zone.written);
        }
    }

    // ---- reads and writes

    /// Checks that these blocks can be read: they may lie in several zones, and behind write
    /// pointers.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`], [`Refusal::Offline`].
    pub fn check_read(&self, lba: u64, blocks: u64) -> Result<(), Refusal> {
        let last = lba.checked_add(blocks.max(1) - 1);
        let last = last.and_then(|last| self.geometry.zone_of(last));
        let (Some(first), Some(last)) = (self.geometry.zone_of(lba), last) else {
            return Err(Refusal::OutOfRange);
        };
        let zones = self.zones.get(first as usize..=last as usize);
        let mut zones = zones.unwrap_or_default().iter();
        match zones.any(|zone| zone.state == State::Offline) {
            true => Err(Refusal::Offline),
            false => Ok(()),
        }
    }

    /// Checks that the zone accepts a write of these blocks now.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check_write(&self, lba: u64, blocks: u64) -> Result<(), Refusal> {
        let (number, zone) = self.writable(lba)?;
        let offset = lba - self.geometry.start_of(number);
        if let Some(zrwa) = self.zrwa_of(&zone) {
            return self.check_random(zone, zrwa, offset, blocks);
        }
        if offset != zone.written {
            return Err(Refusal::InvalidWrite);
        }
        self.check_room(zone, blocks)
    }

    /// Checks that a zone with a Zone Random Write Area accepts a write there: from the write
    /// pointer on, and as far as a flush can make room for it ("NVMe Zoned Namespace Command Set
    /// 1.1", Zone Random Write Area: twice its size).
    fn check_random(
        &self,
        zone: Zone,
        zrwa: Zrwa,
        offset: u64,
        blocks: u64,
    ) -> Result<(), Refusal> {
        let end = offset.saturating_add(blocks.max(1));
        if offset < zone.written || end > zone.written + 2 * u64::from(zrwa.size) {
            return Err(Refusal::InvalidWrite);
        }
        if end > self.geometry.capacity {
            return Err(Refusal::Boundary);
        }
        self.check_limits(zone.state)
    }

    /// Returns the parameters of the zone's Zone Random Write Area, if it has one.
    fn zrwa_of(&self, zone: &Zone) -> Option<Zrwa> {
        self.geometry.zrwa.filter(|_| zone.zrwa)
    }

    /// Returns the block at which an append of so many blocks to the zone that begins at `start` is
    /// written.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check_append(&self, start: u64, blocks: u64) -> Result<u64, Refusal> {
        let number = self.zone_at(start)?;
        let (_, zone) = self.writable(start)?;
        if zone.zrwa {
            return Err(Refusal::InvalidOperation);
        }
        self.check_room(zone, blocks)?;
        Ok(self.geometry.start_of(number) + zone.written)
    }

    /// Records a write that was checked. It moves the write pointer to its end; in a Zone Random
    /// Write Area, only as far as the area has to move.
    ///
    /// # Errors
    /// As [`Zones::check_write`]; nothing has changed then.
    pub fn write(&mut self, lba: u64, blocks: u64) -> Result<(), Refusal> {
        self.check_write(lba, blocks)?;
        let Some(number) = self.geometry.zone_of(lba) else {
            return Err(Refusal::OutOfRange);
        };
        let Some(zone) = self.get(number) else {
            return Err(Refusal::OutOfRange);
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

    /// Advances the write pointer, and makes the zone open or full.
    fn advance(&mut self, number: u32, zone: Zone, written: u64) {
        if written == self.geometry.capacity {
            return self.change(number, State::Full, written);
        }
        if !zone.state.is_open() {
            self.make_room();
        }
        let state = match zone.state {
            State::ExplicitlyOpen => State::ExplicitlyOpen,
            _ => State::ImplicitlyOpen,
        };
        self.change(number, state, written);
    }

    /// A write of these blocks that was checked once, and may have been taken then, needs nothing
    /// more of its zone: the write pointer is behind it; or the Zone Random Write Area reaches its
    /// end, and if it was not taken, then the zone is one that was closed at once after it.
    pub fn is_taken(&self, lba: u64, blocks: u64) -> bool {
        let number = self.geometry.zone_of(lba);
        let zone = number.and_then(|number| Some((number, self.get(number)?)));
        zone.is_some_and(|(number, zone)| {
            let end = (lba - self.geometry.start_of(number)).saturating_add(blocks);
            match (zone.state, self.zrwa_of(&zone)) {
                (State::Full, _) => end <= self.geometry.capacity,
                (_, Some(zrwa)) => end <= zone.written + u64::from(zrwa.size),
                _ => end <= zone.written,
            }
        })
    }

    /// Returns the zone of a block, if it accepts writes.
    fn writable(&self, lba: u64) -> Result<(u32, Zone), Refusal> {
        let number = self.geometry.zone_of(lba).ok_or(Refusal::OutOfRange)?;
        let zone = self.get(number).ok_or(Refusal::OutOfRange)?;
        match zone.state {
            _ if zone.resetting => Err(Refusal::Resetting),
            State::Full => Err(Refusal::Full),
            State::ReadOnly => Err(Refusal::ReadOnly),
            State::Offline => Err(Refusal::Offline),
            _ => Ok((number, zone)),
        }
    }

    /// Checks that so many more blocks fit into the zone, and that it may be open.
    fn check_room(&self, zone: Zone, blocks: u64) -> Result<(), Refusal> {
        let end = zone.written.checked_add(blocks.max(1));
        if end.is_none_or(|end| end > self.geometry.capacity) {
            return Err(Refusal::Boundary);
        }
        self.check_limits(zone.state)
    }

    /// Checks that a zone in this state may be open.
    fn check_limits(&self, state: State) -> Result<(), Refusal> {
        let is_below = |count: u32, limit: Option<u32>| limit.is_none_or(|limit| count < limit);
        if !state.is_active() && !is_below(self.active, self.geometry.max_active) {
            return Err(Refusal::TooManyActive);
        }
        // An implicitly open zone gives way.
        let room = is_below(self.open, self.geometry.max_open) || !self.implicit.is_empty();
        if !state.is_open() && !room {
            return Err(Refusal::TooManyOpen);
        }
        Ok(())
    }

    /// Closes the zone that has been implicitly open for longest, if another one needs its place.
    fn make_room(&mut self) {
        if self
            .geometry
            .max_open
            .is_some_and(|limit| self.open >= limit)
            && let Some(oldest) = self.implicit.front().copied()
            && let Some(zone) = self.get(oldest)
        {
            self.change(oldest, State::Closed, zone.written);
        }
    }

    // ---- actions

    /// Returns the zone that begins with this block.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`], [`Refusal::NotAtStart`].
    pub fn zone_at(&self, start: u64) -> Result<u32, Refusal> {
        let number = self.geometry.zone_of(start).ok_or(Refusal::OutOfRange)?;
        match self.geometry.start_of(number) == start {
            true => Ok(number),
            false => Err(Refusal::NotAtStart),
        }
    }

    /// Applies an action to a zone.
    ///
    /// # Errors
    /// [`Refusal`]; nothing has changed then.
    pub fn act(&mut self, number: u32, action: Action) -> Result<(), Refusal> {
        use State as S;
        let zone = self.get(number).ok_or(Refusal::OutOfRange)?;
        if zone.resetting {
            return Err(Refusal::Resetting);
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
            _ => return Err(Refusal::InvalidTransition),
        };
        // Which blocks of its Zone Random Write Area were written is not recorded.
        let written = match zone.zrwa && state == S::Full {
            true => self.geometry.capacity,
            false => zone.written,
        };
        self.change(number, state, written);
        Ok(())
    }

    /// Checks that a zone can be opened with a Zone Random Write Area now.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check_open_with_zrwa(&self, number: u32) -> Result<(), Refusal> {
        let zone = self.get(number).ok_or(Refusal::OutOfRange)?;
        match zone.state {
            _ if zone.resetting => return Err(Refusal::Resetting),
            State::Empty => {}
            state if state.is_active() => return Err(Refusal::InvalidOperation),
            _ => return Err(Refusal::InvalidTransition),
        }
        let resources = self.geometry.zrwa_resources();
        let resources = resources.ok_or(Refusal::InvalidOperation)?;
        self.check_limits(zone.state)?;
        match self.zrwas < resources {
            true => Ok(()),
            false => Err(Refusal::ZrwaResources),
        }
    }

    /// Opens an empty zone, and gives it a Zone Random Write Area: Open Zone with ZRWAA.
    ///
    /// # Errors
    /// As [`Zones::check_open_with_zrwa`]; nothing has changed then.
    pub fn open_with_zrwa(&mut self, number: u32) -> Result<(), Refusal> {
        self.check_open_with_zrwa(number)?;
        self.make_room();
        self.change(number, State::ExplicitlyOpen, 0);
        if let Some(zone) = self.zones.get_mut(number as usize) {
            zone.zrwa = true;
            self.zrwas += 1;
        }
        Ok(())
    }

    /// Checks that a zone's Zone Random Write Area can be flushed up to this block: its last one,
    /// or one before it that makes a multiple of the granularity.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check_flush(&self, lba: u64) -> Result<(), Refusal> {
        let number = self.geometry.zone_of(lba).ok_or(Refusal::OutOfRange)?;
        let zone = self.get(number).ok_or(Refusal::OutOfRange)?;
        if zone.resetting {
            return Err(Refusal::Resetting);
        }
        let zrwa = self.zrwa_of(&zone).ok_or(Refusal::InvalidOperation)?;
        let end = lba - self.geometry.start_of(number) + 1;
        let reach = zone.written + u64::from(zrwa.size);
        if end <= zone.written || end > reach.min(self.geometry.capacity) {
            return Err(Refusal::InvalidOperation);
        }
        if !(end - zone.written).is_multiple_of(u64::from(zrwa.granularity)) {
            return Err(Refusal::Granularity);
        }
        self.check_limits(zone.state)
    }

    /// Moves the write pointer of the block's zone behind that block: Flush Explicit ZRWA Range. A
    /// closed zone is opened by it, as by a write.
    ///
    /// # Errors
    /// As [`Zones::check_flush`]; nothing has changed then.
    pub fn flush(&mut self, lba: u64) -> Result<(), Refusal> {
        self.check_flush(lba)?;
        let number = self.geometry.zone_of(lba).ok_or(Refusal::OutOfRange)?;
        let zone = self.get(number).ok_or(Refusal::OutOfRange)?;
        let end = lba - self.geometry.start_of(number) + 1;
        self.advance(number, zone, end);
        Ok(())
    }

    /// Applies an action to all zones in the states that it is for (Select All). It closes the open
    /// zones, finishes the active ones, opens the closed ones, or takes the read-only ones offline.
    ///
    /// # Errors
    /// [`Refusal`]; nothing has changed then.
    pub fn act_on_all(&mut self, action: Action) -> Result<(), Refusal> {
        let selects = |state: State| match action {
            Action::Close => state.is_open(),
            Action::Finish => state.is_active(),
            Action::Open => state == State::Closed,
            Action::Offline => state == State::ReadOnly,
        };
        let selected = |zone: &Zone| selects(zone.state);
        if self.zones.iter().any(|z| selected(z) && z.resetting) {
            return Err(Refusal::Resetting);
        }
        if action == Action::Open {
            // Implicitly open zones give way, one after the other.
            let closed = self.zones.iter().filter(|zone| selected(zone)).count() as u64;
            let explicit = u64::from(self.open) - self.implicit.len() as u64;
            let limit = self.geometry.max_open.map_or(u64::MAX, u64::from);
            if closed > 0 && explicit + closed > limit {
                return Err(Refusal::TooManyOpen);
            }
        }
        let zones = (0..).zip(&self.zones).filter(|(_, zone)| selected(zone));
        let zones: Vec<u32> = zones.map(|(number, _)| number).collect();
        for number in zones {
            self.act(number, action)?;
        }
        Ok(())
    }

    /// Begins the reset of a zone. Until [`Zones::end_reset`] or [`Zones::cancel_reset`] nothing
    /// else can be done to it. Returns its blocks that may hold data: first one and number, which
    /// may be 0.
    ///
    /// # Errors
    /// [`Refusal`]; nothing has changed then.
    pub fn begin_reset(&mut self, number: u32) -> Result<(u64, u64), Refusal> {
        let (start, capacity) = (self.geometry.start_of(number), self.geometry.capacity);
        let zone = self.zones.get_mut(number as usize);
        let zone = zone.ok_or(Refusal::OutOfRange)?;
        if zone.resetting {
            return Err(Refusal::Resetting);
        }
        if matches!(zone.state, State::ReadOnly | State::Offline) {
            return Err(Refusal::InvalidTransition);
        }
        zone.resetting = true;
        // Which blocks of its Zone Random Write Area were written is not recorded, nor how large it
        // was in another process.
        let written = if zone.zrwa { capacity } else { zone.written };
        Ok((start, written.min(capacity)))
    }

    /// Returns the zones that a reset of all affects: those that are active or full.
    ///
    /// # Errors
    /// [`Refusal::Resetting`]: one of them is being reset.
    pub fn resettable(&self) -> Result<Vec<u32>, Refusal> {
        let is = |zone: &Zone| zone.state.is_active() || zone.state == State::Full;
        if self.zones.iter().any(|zone| is(zone) && zone.resetting) {
            return Err(Refusal::Resetting);
        }
        let zones = (0..).zip(&self.zones).filter(|(_, zone)| is(zone));
        Ok(zones.map(|(number, _)| number).collect())
    }

    /// Makes the zone empty after its data was discarded.
    pub fn end_reset(&mut self, number: u32) {
        self.cancel_reset(number);
        self.change(number, State::Empty, 0);
    }

    /// Cancels the reset of a zone.
    pub fn cancel_reset(&mut self, number: u32) {
        if let Some(zone) = self.zones.get_mut(number as usize) {
            zone.resetting = false;
        }
    }

    /// Changes the state of a zone.
    fn change(&mut self, number: u32, state: State, written: u64) {
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
        let implicit = |state| state == State::ImplicitlyOpen;
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

    /// Returns the zones that the filter selects, from the one with block `lba` on.
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
                write_pointer: match zone.state.has_write_pointer() {
                    true => start + zone.written,
                    false => u64::MAX,
                },
            }
        })
    }
}
