//! Random histories of a namespace's zones, compared with a model without counters, which inspects
//! all zones each time. `VNVME_ZONE_STEPS` sets the number of steps (1,000,000).

use zones::table::{self, Identity};
use zones::{Action, Filter, Geometry, ZoneRefusal, ZoneState, Zones, Zrwa};

/// Reproducible pseudorandom numbers (SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Model of the standard's state machine, as tables.
#[derive(Clone)]
struct Model {
    geometry: Geometry,
    zones: Vec<(ZoneState, u64)>,
    /// Zones with a Zone Random Write Area.
    areas: Vec<bool>,
    /// Implicitly open zones, in the order in which they were opened.
    order: Vec<usize>,
}

impl Model {
    fn count(&self, of: fn(ZoneState) -> bool) -> u32 {
        self.zones.iter().filter(|(state, _)| of(*state)).count() as u32
    }

    fn set(&mut self, zone: usize, state: ZoneState, written: u64) {
        let was = self.zones[zone].0 == ZoneState::ImplicitlyOpen;
        let is = state == ZoneState::ImplicitlyOpen;
        if was && !is {
            self.order.retain(|other| *other != zone);
        }
        if is && !was {
            self.order.push(zone);
        }
        self.zones[zone] = (state, written);
        self.areas[zone] &= state.is_active();
    }

    /// Opens a zone that is not open.
    fn open(&mut self, zone: usize) -> Result<(), ZoneRefusal> {
        let (state, _) = self.zones[zone];
        if state.is_open() {
            return Ok(());
        }
        let active = self.count(ZoneState::is_active);
        if state == ZoneState::Empty && self.geometry.max_active.is_some_and(|max| active >= max) {
            return Err(ZoneRefusal::TooManyActive);
        }
        let open = self.count(ZoneState::is_open);
        if self.geometry.max_open.is_some_and(|max| open >= max) {
            let Some(&oldest) = self.order.first() else {
                return Err(ZoneRefusal::TooManyOpen);
            };
            let written = self.zones[oldest].1;
            self.set(oldest, ZoneState::Closed, written);
        }
        Ok(())
    }

    fn write(&mut self, lba: u64, blocks: u64) -> Result<(), ZoneRefusal> {
        let size = self.geometry.size;
        self.write_at((lba / size) as usize, lba % size, blocks)
    }

    fn write_at(&mut self, zone: usize, offset: u64, blocks: u64) -> Result<(), ZoneRefusal> {
        let capacity = self.geometry.capacity;
        let Some(&(state, written)) = self.zones.get(zone) else {
            return Err(ZoneRefusal::OutOfRange);
        };
        match state {
            ZoneState::Full => return Err(ZoneRefusal::Full),
            ZoneState::ReadOnly => return Err(ZoneRefusal::ReadOnly),
            ZoneState::Offline => return Err(ZoneRefusal::Offline),
            _ if self.areas.get(zone) == Some(&true) => {
                return self.write_in_area(zone, offset, blocks);
            }
            _ if offset != written => return Err(ZoneRefusal::InvalidWrite),
            _ if offset + blocks > capacity => return Err(ZoneRefusal::Boundary),
            _ => {}
        }
        let before = self.clone();
        self.open(zone)?;
        let written = offset + blocks;
        if written == capacity {
            // It was never open for longer than this.
            *self = before;
            self.set(zone, ZoneState::Full, written);
        } else if state == ZoneState::ExplicitlyOpen {
            self.set(zone, state, written);
        } else {
            self.set(zone, ZoneState::ImplicitlyOpen, written);
        }
        Ok(())
    }

    fn write_in_area(&mut self, zone: usize, offset: u64, blocks: u64) -> Result<(), ZoneRefusal> {
        let zrwa = self.geometry.zrwa.unwrap();
        let (state, mut written) = self.zones[zone];
        let size = u64::from(zrwa.size);
        for block in offset..offset + blocks {
            // The area, and as much behind it again.
            if block < written || block - written >= size * 2 {
                return Err(ZoneRefusal::InvalidWrite);
            }
        }
        if offset + blocks > self.geometry.capacity {
            return Err(ZoneRefusal::Boundary);
        }
        self.open(zone)?;
        while offset + blocks > written + size {
            written += u64::from(zrwa.granularity);
        }
        let state = match state {
            ZoneState::ExplicitlyOpen => state,
            _ => ZoneState::ImplicitlyOpen,
        };
        self.set(zone, state, written);
        Ok(())
    }

    fn open_with_zrwa(&mut self, zone: usize) -> Result<(), ZoneRefusal> {
        match self.zones[zone].0 {
            ZoneState::Empty => {}
            ZoneState::Full | ZoneState::ReadOnly | ZoneState::Offline => {
                return Err(ZoneRefusal::InvalidTransition);
            }
            _ => return Err(ZoneRefusal::InvalidOperation),
        }
        let Some(zrwa) = self.geometry.zrwa else {
            return Err(ZoneRefusal::InvalidOperation);
        };
        let before = self.clone();
        self.open(zone)?;
        let areas = before.areas.iter().filter(|area| **area).count() as u32;
        if zrwa.resources.is_some_and(|max| areas >= max) {
            *self = before;
            return Err(ZoneRefusal::ZrwaResources);
        }
        self.set(zone, ZoneState::ExplicitlyOpen, 0);
        self.areas[zone] = true;
        Ok(())
    }

    fn flush(&mut self, zone: usize, last: u64) -> Result<(), ZoneRefusal> {
        if self.areas.get(zone) != Some(&true) {
            let outside = zone >= self.zones.len();
            return Err(
                [ZoneRefusal::InvalidOperation, ZoneRefusal::OutOfRange][usize::from(outside)]
            );
        }
        let zrwa = self.geometry.zrwa.unwrap();
        let (state, written) = self.zones[zone];
        let end = self.geometry.capacity.min(written + u64::from(zrwa.size));
        if !(written..end).contains(&last) {
            return Err(ZoneRefusal::InvalidOperation);
        }
        let mut pointer = written;
        while pointer <= last {
            pointer += u64::from(zrwa.granularity);
        }
        if pointer != last + 1 {
            return Err(ZoneRefusal::Granularity);
        }
        let before = self.clone();
        self.open(zone)?;
        if pointer == self.geometry.capacity {
            *self = before;
            self.set(zone, ZoneState::Full, pointer);
        } else if state == ZoneState::ExplicitlyOpen {
            self.set(zone, state, pointer);
        } else {
            self.set(zone, ZoneState::ImplicitlyOpen, pointer);
        }
        Ok(())
    }

    fn act(&mut self, zone: usize, action: Action) -> Result<(), ZoneRefusal> {
        use ZoneState as S;
        let (state, written) = self.zones[zone];
        let next = match (action, state) {
            (Action::Open, S::Empty | S::ImplicitlyOpen | S::ExplicitlyOpen | S::Closed) => {
                self.open(zone)?;
                S::ExplicitlyOpen
            }
            (Action::Close, S::ImplicitlyOpen | S::ExplicitlyOpen | S::Closed) => S::Closed,
            (Action::Finish, S::ReadOnly | S::Offline) => {
                return Err(ZoneRefusal::InvalidTransition);
            }
            (Action::Finish, _) => S::Full,
            (Action::Offline, S::ReadOnly | S::Offline) => S::Offline,
            _ => return Err(ZoneRefusal::InvalidTransition),
        };
        let all = next == S::Full && self.areas[zone];
        let written = [written, self.geometry.capacity][usize::from(all)];
        self.set(zone, next, written);
        Ok(())
    }

    fn act_on_all(&mut self, action: Action) -> Result<(), ZoneRefusal> {
        let before = self.clone();
        let selected: Vec<usize> = (0..self.zones.len())
            .filter(|zone| match (action, self.zones[*zone].0) {
                (Action::Close, state) => state.is_open(),
                (Action::Finish, state) => state.is_active(),
                (Action::Open, state) => state == ZoneState::Closed,
                (Action::Offline, state) => state == ZoneState::ReadOnly,
            })
            .collect();
        for zone in selected {
            if let Err(refusal) = self.act(zone, action) {
                *self = before;
                return Err(refusal);
            }
        }
        Ok(())
    }

    fn reset(&mut self, zone: usize) -> Result<(), ZoneRefusal> {
        if matches!(self.zones[zone].0, ZoneState::ReadOnly | ZoneState::Offline) {
            return Err(ZoneRefusal::InvalidTransition);
        }
        self.set(zone, ZoneState::Empty, 0);
        Ok(())
    }
}

const ACTIONS: [Action; 4] = [Action::Close, Action::Finish, Action::Open, Action::Offline];

fn compare(zones: &Zones, model: &Model, step: u64) {
    for (number, (state, written)) in (0..).zip(&model.zones) {
        let zone = zones.get(number).unwrap();
        assert_eq!(zone.state, *state, "zone {number}, step {step}");
        assert_eq!(zone.written, *written, "zone {number}, step {step}");
        let area = model.areas[number as usize];
        assert_eq!(zone.zrwa, area, "zone {number}, step {step}");
        assert!(!zone.resetting);
    }
    assert_eq!(zones.open(), model.count(ZoneState::is_open), "step {step}");
    assert_eq!(
        zones.active(),
        model.count(ZoneState::is_active),
        "step {step}"
    );
    let areas = model.areas.iter().filter(|area| **area).count();
    assert_eq!(zones.zrwas() as usize, areas, "step {step}");
    let Geometry {
        max_open,
        max_active,
        ..
    } = model.geometry;
    assert!(max_open.is_none_or(|max| zones.open() <= max));
    assert!(max_active.is_none_or(|max| zones.active() <= max));
}

fn history(geometry: Geometry, seed: u64, steps: u64) {
    let mut chance = Chance(seed);
    let mut zones = Zones::new(geometry).unwrap();
    let mut model = Model {
        geometry,
        zones: vec![(ZoneState::Empty, 0); geometry.zones as usize],
        areas: vec![false; geometry.zones as usize],
        order: Vec::new(),
    };
    let identity = Identity {
        namespace: [7; 16],
        block: 512,
    };
    // Writes that may be in flight: the next process has to know that they were taken.
    let mut in_flight: Vec<(u64, u64)> = Vec::new();
    // The table as kept by a caller that stores only changed words.
    let mut kept = table::encode(&zones, identity);
    for step in 0..steps {
        let number = chance.below(u64::from(geometry.zones) + 1) as u32;
        let zone = number as usize;
        let start = geometry.start_of(number);
        let there = zone < model.zones.len();
        let blocks = 1 + chance.below(geometry.capacity / 2 + 2);
        match chance.below(if geometry.zrwa.is_some() { 120 } else { 100 }) {
            // A write where it belongs, near it, or anywhere.
            0..40 => {
                let written = model.zones.get(zone).map_or(0, |zone| zone.1);
                let lba = match chance.below(8) {
                    0 => chance.below(geometry.blocks() + 4),
                    1 => start + written + 1,
                    2..5 if model.areas.get(zone) == Some(&true) => {
                        start + written + chance.below(geometry.capacity)
                    }
                    _ => start + written,
                };
                let wanted = model.write(lba, blocks);
                assert_eq!(zones.check_write(lba, blocks), wanted, "step {step}");
                let before = zones.clone();
                assert_eq!(zones.write(lba, blocks), wanted, "step {step}");
                if wanted.is_ok() {
                    in_flight.push((lba, blocks));
                }
                // What has not been taken moves the pointer, or opens a zone that is closed.
                let number = (lba / geometry.size) as u32;
                if wanted.is_ok() && before.is_taken(lba, blocks) {
                    let (was, is) = (before.get(number).unwrap(), zones.get(number).unwrap());
                    assert!(was == is || was.state == ZoneState::Closed, "step {step}");
                    assert_eq!((was.written, was.zrwa), (is.written, true), "step {step}");
                }
            }
            40..60 => {
                let place = zones.check_append(start, blocks);
                let offset = model.zones.get(zone).map_or(0, |zone| zone.1);
                let wanted = match model.areas.get(zone) {
                    Some(true) => Err(ZoneRefusal::InvalidOperation),
                    _ => model.write_at(zone, offset, blocks),
                };
                assert_eq!(place, wanted.map(|()| start + offset), "step {step}");
                if let Ok(place) = place {
                    zones.write(place, blocks).unwrap();
                }
                if there && geometry.size > 1 {
                    assert_eq!(
                        zones.check_append(start + 1, 1),
                        Err(ZoneRefusal::NotAtStart)
                    );
                }
            }
            60..80 if there => {
                let action = ACTIONS[chance.below(4) as usize];
                // Zones do not go offline for ever in a few steps.
                let wanted = model.act(zone, action);
                assert_eq!(zones.act(number, action), wanted, "step {step}, {action:?}");
            }
            80..92 if there => {
                let wanted = model.reset(zone);
                match zones.begin_reset(number) {
                    Ok((lba, blocks)) => {
                        assert_eq!(lba, start);
                        assert!(blocks >= model.zones[zone].1 && blocks <= geometry.capacity);
                        // Where it was written in its area, nobody knows.
                        assert!(!zones.get(number).unwrap().zrwa || blocks == geometry.capacity);
                        for lba in [start, start + blocks.min(geometry.size - 1)] {
                            let refused = zones.check_write(lba, 1);
                            assert_eq!(refused, Err(ZoneRefusal::Resetting));
                        }
                        assert_eq!(
                            zones.act(number, Action::Close),
                            Err(ZoneRefusal::Resetting)
                        );
                        assert_eq!(zones.begin_reset(number), Err(ZoneRefusal::Resetting));
                        zones.end_reset(number);
                        assert_eq!(wanted, Ok(()));
                    }
                    Err(refusal) => assert_eq!(wanted, Err(refusal), "step {step}"),
                }
            }
            92 => {
                let action = ACTIONS[chance.below(4) as usize];
                let wanted = model.act_on_all(action);
                assert_eq!(zones.act_on_all(action), wanted, "step {step}, {action:?}");
            }
            93 => {
                for number in zones.resettable().unwrap() {
                    zones.begin_reset(number).unwrap();
                    zones.end_reset(number);
                }
                for zone in 0..model.zones.len() {
                    let _ = model.reset(zone);
                }
            }
            94 if there && chance.below(8) == 0 => {
                let offline = chance.below(2) == 0;
                zones.set_worn(number, offline);
                let state = if offline {
                    ZoneState::Offline
                } else {
                    ZoneState::ReadOnly
                };
                let written = model.zones[zone].1;
                model.set(zone, state, written);
            }
            95 => {
                // Another process begins anew.
                zones.power_lost();
                for zone in 0..model.zones.len() {
                    let (state, written) = model.zones[zone];
                    if state.is_active() {
                        let kept = written > 0 || model.areas[zone];
                        let state = [ZoneState::Empty, ZoneState::Closed][usize::from(kept)];
                        model.set(zone, state, written);
                    }
                }
            }
            // Worn zones are replaced now and then, or all of them are worn some time.
            96 if chance.below(40) == 0 => {
                zones = Zones::new(geometry).unwrap();
                kept = table::encode(&zones, identity);
                model.zones.fill((ZoneState::Empty, 0));
                model.areas.fill(false);
                model.order.clear();
            }
            100..110 if there => {
                let wanted = model.open_with_zrwa(zone);
                assert_eq!(zones.check_open_with_zrwa(number), wanted, "step {step}");
                assert_eq!(zones.open_with_zrwa(number), wanted, "step {step}");
            }
            110.. => {
                let written = model.zones.get(zone).map_or(0, |zone| zone.1);
                let lba = match chance.below(8) {
                    0 => chance.below(geometry.blocks() + 4),
                    _ => start + written + chance.below(geometry.capacity),
                };
                let wanted = model.flush((lba / geometry.size) as usize, lba % geometry.size);
                assert_eq!(zones.check_flush(lba), wanted, "step {step}");
                assert_eq!(zones.flush(lba), wanted, "step {step}");
            }
            _ => {
                let filter = Filter::of(chance.below(8) as u8).unwrap();
                let lba = chance.below(geometry.blocks());
                let first = (lba / geometry.size) as usize;
                let wanted = model.zones.iter().enumerate().skip(first);
                let wanted = wanted.filter(|(_, (state, _))| match filter {
                    Filter::All => true,
                    Filter::In(wanted) => wanted == *state,
                });
                let wanted: Vec<(u64, ZoneState)> = wanted
                    .map(|(zone, (state, _))| (zone as u64 * geometry.size, *state))
                    .collect();
                let found = zones.report(lba, filter).map(|zone| {
                    let written = model.zones[(zone.start / geometry.size) as usize].1;
                    let pointer = match zone.state {
                        ZoneState::Full | ZoneState::ReadOnly | ZoneState::Offline => u64::MAX,
                        _ => zone.start + written,
                    };
                    assert_eq!(zone.write_pointer, pointer);
                    let area = model.areas[(zone.start / geometry.size) as usize];
                    assert_eq!(zone.zrwa, area);
                    assert_eq!(zone.capacity, geometry.capacity);
                    (zone.start, zone.state)
                });
                assert_eq!(found.collect::<Vec<_>>(), wanted);
                let offline = model.zones.iter().skip(first).take(2);
                let offline = offline.into_iter().any(|zone| zone.0 == ZoneState::Offline);
                let end = geometry.blocks().min((first as u64 + 2) * geometry.size);
                let read = zones.check_read(lba, end - lba);
                assert_eq!(
                    read,
                    [Ok(()), Err(ZoneRefusal::Offline)][usize::from(offline)]
                );
                let outside = zones.check_read(lba, geometry.blocks() - lba + 1);
                assert_eq!(outside, Err(ZoneRefusal::OutOfRange));
            }
        }
        compare(&zones, &model, step);
        // A reset waits for them.
        in_flight.retain(|(lba, _)| {
            let state = model.zones[(lba / geometry.size) as usize].0;
            state.is_active() || state == ZoneState::Full
        });
        in_flight.drain(..in_flight.len().saturating_sub(8));
        for (lba, blocks) in &in_flight {
            assert!(
                zones.is_taken(*lba, *blocks),
                "{lba}, {blocks}, step {step}"
            );
        }
        let changed: Vec<u32> = zones.take_changed().collect();
        for number in changed {
            let at = table::HEADER + number as usize * table::WORD;
            let word = table::word(number, zones.get(number).unwrap());
            kept[at..at + table::WORD].copy_from_slice(&word.to_le_bytes());
        }
        if step % 64 == 0 {
            let again = table::decode(&kept, geometry, identity).unwrap();
            compare(&again, &model, step);
            assert_eq!(kept, table::encode(&zones, identity), "step {step}");
        }
    }
}

#[test]
fn random_histories_match_naive_model() {
    let steps = std::env::var("VNVME_ZONE_STEPS");
    let steps: u64 = steps.map_or(1_000_000, |steps| steps.parse().unwrap());
    let limits = [
        (None, None),
        (Some(1), Some(1)),
        (Some(2), Some(4)),
        (Some(3), None),
        (Some(5), Some(5)),
    ];
    for (seed, (max_open, max_active)) in (1..).zip(limits) {
        for (zones, size, capacity) in [(6, 16, 12), (9, 8, 8), (1, 4, 3)] {
            let geometry = Geometry {
                zones,
                size,
                capacity,
                max_open,
                max_active,
                zrwa: None,
            };
            history(geometry, seed, steps / 60);
            for (size, granularity, resources) in [(4, 2, Some(1)), (1, 1, None), (8, 4, Some(2))] {
                let max = max_active.unwrap_or(u32::MAX);
                let resources = resources.map(|resources: u32| resources.min(max));
                let zrwa = Zrwa {
                    size,
                    granularity,
                    resources,
                };
                let geometry = Geometry {
                    zrwa: Some(zrwa),
                    ..geometry
                };
                if geometry.check().is_ok() {
                    history(geometry, seed, steps / 60);
                }
            }
        }
    }
}
