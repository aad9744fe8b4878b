//! Random histories, compared with a model that stores the writes to each unit.

use nvme::log::FdpEventType as Type;
use placement::{Event, EventSet, Geometry, Identity, Placement, Row, Writer, table};
use proptest::prelude::*;
use std::collections::VecDeque;

const IDENTITY: Identity = Identity { namespace: [9; 16] };

#[derive(Clone, Debug)]
enum Step {
    Write(Option<u16>, u64, bool),
    Renew(u16),
    Record(u16, u8, bool),
    Enable(bool),
    /// Another process takes over the same words.
    Again,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (prop::option::of(0..6u16), 1..70u64, any::<bool>())
            .prop_map(|(id, blocks, host)| Step::Write(id, blocks, host)),
        2 => (0..6u16).prop_map(Step::Renew),
        2 => (0..4u16, any::<u8>(), any::<bool>()).prop_map(|(h, ty, on)| Step::Record(h, ty, on)),
        1 => any::<bool>().prop_map(Step::Enable),
        1 => Just(Step::Again),
    ]
}

/// State of a handle in the model.
#[derive(Clone, Default)]
struct Handle {
    /// Number of blocks written to the handle's unit.
    written: u64,
    units: u64,
    bytes: u64,
    events: Vec<Type>,
}

struct Model {
    unit: u64,
    handles: Vec<Handle>,
    host: u64,
    media: u64,
    enabled: bool,
    events: VecDeque<Event>,
}

impl Model {
    /// Records a write block by block.
    fn write(&mut self, handle: u16, blocks: u64, host: bool) {
        let known = &mut self.handles[usize::from(handle)];
        for _ in 0..blocks {
            known.written += 1;
            if known.written == self.unit {
                known.written = 0;
                known.units += 1;
            }
            known.bytes += 512;
            self.media += 512;
            self.host += if host { 512 } else { 0 };
        }
    }

    fn happened(&mut self, event: Event) {
        self.events.push_back(event);
        if self.events.len() > 63 {
            self.events.pop_front();
        }
    }
}

fn again(placement: &Placement<Vec<Row>>) -> Placement<Vec<Row>> {
    let words = placement.words().iter().flatten();
    let bytes = words.flat_map(|word| {
        word.load(std::sync::atomic::Ordering::Relaxed)
            .to_ne_bytes()
    });
    let bytes: Vec<u8> = bytes.collect();
    table::check(&bytes, placement.geometry(), IDENTITY).unwrap();
    Placement::new(*placement.geometry(), table::words(&bytes)).unwrap()
}

fn event(ty: Type, handle: u16, identifier: u16, at: u64) -> Event {
    Event {
        ty,
        identifier,
        handle,
        nsid: 7,
        at,
    }
}

proptest! {
    #[test]
    fn random_histories_match_model(
        handles in 1..5u16,
        unit in 1..40u64,
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let geometry = Geometry { handles, unit, block: 512 };
        let mut real = Placement::new(geometry, table::empty(geometry, IDENTITY)).unwrap();
        let mut model = Model {
            unit,
            handles: vec![Handle::default(); handles.into()],
            host: 0,
            media: 0,
            enabled: true,
            events: VecDeque::new(),
        };
        for (at, step) in (0..).zip(steps) {
            match step {
                Step::Write(id, blocks, host) => {
                    let chosen = real.choose(id);
                    let wanted = id.filter(|id| *id < handles).unwrap_or(0);
                    prop_assert_eq!(chosen.handle, wanted);
                    prop_assert_eq!(chosen.invalid, id.filter(|id| *id >= handles));
                    if let Some(invalid) = chosen.invalid {
                        let ty = Type::INVALID_PLACEMENT_IDENTIFIER;
                        let recorded = real.recorded(0).contains(ty);
                        prop_assert_eq!(recorded, model.handles[0].events.contains(&ty));
                        if recorded {
                            let event = event(ty, 0, invalid, at);
                            real.record(&event);
                            model.happened(event);
                        }
                    }
                    let by = if host { Writer::Host } else { Writer::Controller };
                    real.write(chosen.handle, blocks, by);
                    model.write(wanted, blocks, host);
                }
                Step::Renew(handle) => {
                    let left = real.renew(handle);
                    let known = model.handles.get_mut(usize::from(handle));
                    let expected = known.filter(|known| known.written > 0).map(|known| {
                        known.units += 1;
                        unit - std::mem::take(&mut known.written)
                    });
                    prop_assert_eq!(left, expected);
                    let ty = Type::UNIT_NOT_FULLY_WRITTEN;
                    if left.is_some() && real.recorded(handle).contains(ty) {
                        let event = event(ty, handle, handle, at);
                        real.record(&event);
                        model.happened(event);
                    }
                }
                Step::Record(handle, ty, on) => {
                    let set = EventSet::NONE.with(Type(ty));
                    prop_assert_eq!(set.is_some(), matches!(ty, 0..=3 | 0x80 | 0x81));
                    let set = set.unwrap_or(EventSet::NONE.with(Type(ty & 3)).unwrap());
                    let ty = placement::SUPPORTED_EVENTS.into_iter().find(|ty| set.contains(*ty));
                    let ty = ty.unwrap();
                    real.record_events(handle, set, on);
                    if let Some(known) = model.handles.get_mut(usize::from(handle)) {
                        known.events.retain(|known| *known != ty);
                        known.events.extend(on.then_some(ty));
                    }
                }
                Step::Enable(on) => {
                    real.enable(on);
                    model.enabled = on;
                }
                Step::Again => real = again(&real),
            }
            for (handle, known) in (0..).zip(&model.handles) {
                prop_assert_eq!(real.left(handle), unit - known.written);
                prop_assert_eq!(real.units(handle), known.units);
                prop_assert_eq!(real.bytes(handle), known.bytes);
                for ty in placement::SUPPORTED_EVENTS {
                    let contains = real.recorded(handle).contains(ty);
                    prop_assert_eq!(contains, known.events.contains(&ty));
                }
            }
            prop_assert_eq!(real.host_bytes(), model.host);
            prop_assert_eq!(real.media_bytes(), model.media);
            prop_assert_eq!(real.is_enabled(), model.enabled);
            prop_assert_eq!(real.events(), model.events.iter().copied().collect::<Vec<_>>());
        }
    }

    /// Checks that for any stored words, all values read from them are in range.
    #[test]
    fn random_table_words_cause_no_panic(
        bytes in prop::collection::vec(any::<u8>(), 64 * 70),
        writes in prop::collection::vec((0..9u16, any::<u64>()), 0..8),
    ) {
        let geometry = Geometry { handles: 4, unit: 33, block: 4096 };
        prop_assert!(table::check(&bytes, &geometry, IDENTITY).is_err());
        let placement = Placement::new(geometry, table::words(&bytes)).unwrap();
        for (handle, blocks) in writes {
            placement.write(handle, blocks, Writer::Host);
            placement.renew(handle);
            placement.record(&event(Type::MEDIA_REALLOCATED, handle, 1, 2));
            prop_assert!((1..=33).contains(&placement.left(handle)));
        }
        prop_assert!(placement.events().len() <= 63);
    }
}

/// Checks that no write of several threads to one handle is lost.
#[test]
fn concurrent_writes_lose_nothing() {
    let geometry = Geometry {
        handles: 2,
        unit: 7,
        block: 512,
    };
    let placement = Placement::new(geometry, table::empty(geometry, IDENTITY)).unwrap();
    // So many that they are under way at the same time.
    let (threads, writes) = (4, 300_000);
    let start = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                start.wait();
                for _ in 0..writes {
                    placement.write(1, 3, Writer::Host);
                }
            });
        }
    });
    let blocks = threads * writes * 3;
    assert_eq!(placement.host_bytes(), blocks * 512);
    assert_eq!(placement.units(1), blocks / 7);
    assert_eq!(placement.left(1), 7 - blocks % 7);
    assert_eq!((placement.left(0), placement.units(0)), (7, 0));
}

/// Checks that the last 63 events are kept, oldest first.
#[test]
fn full_event_list_drops_oldest() {
    let geometry = Geometry {
        handles: 1,
        unit: 1,
        block: 512,
    };
    let placement = Placement::new(geometry, table::empty(geometry, IDENTITY)).unwrap();
    for at in 0..200 {
        placement.record(&event(Type::INVALID_PLACEMENT_IDENTIFIER, 0, 1, at));
        let times: Vec<u64> = placement.events().iter().map(|event| event.at).collect();
        assert_eq!(times, (at.saturating_sub(62)..=at).collect::<Vec<_>>());
    }
}
